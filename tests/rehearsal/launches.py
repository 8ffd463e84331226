"""The kernels that are launched on the pretended device, in place of Triton's own launching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from kernels.ahead_of_time import compile_shipped, source_of
from kernels.shipping import Shipped
from tests.rehearsal.gpu import PretendedGPU, Refused

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""Of a launch, in each dimension (CUDA programming guide, table of technical limits)."""

ALIGNED = 16
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.bool: "i1",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
NAMES = {name: str(dtype).removeprefix("torch.") for dtype, name in TYPES.items()}
"""Triton's names of types, and the attributes of PyTorch's and of `triton.language` that have them."""


@dataclass(frozen=True)
class Launch:
    """A launch as Triton compiles it: launches that are alike in this share their code.

    Attributes:
        types: of each argument, as Triton writes them. constants: values of those that are "constexpr".
        aligned: arguments that are multiples of 16. options: warps and stages.
    """

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: frozenset[str]
    options: tuple[tuple[str, Any], ...]

    def document(self) -> dict[str, Any]:
        """The launch for `benchmarks.gpu_turn.precompile`."""
        tensors = {name: NAMES[kind[1:]] for name, kind in self.types if kind.startswith("*")}
        constants = {k: {"dtype": NAMES[v.name]} if isinstance(v, tl.dtype) else v for k, v in self.constants}
        document = {"module": self.kernel.__module__, "kernel": self.kernel.__name__, "types": dict(self.types)}
        return document | {
            "tensors": tensors, "constants": constants, "aligned": sorted(self.aligned), "options": dict(self.options)
        }  # fmt: skip

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel.__name__}[{constants}], aligned {sorted(self.aligned)}, {dict(self.options)}"


class Launches:
    """Takes the place of Triton's launching, for the rest of the process.

    Attributes:
        seen: how often each kind was launched.
    """

    def __init__(self, gpu: PretendedGPU) -> None:
        self.seen: Counter[Launch] = Counter()
        launches = self

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            with torch._C.DisableTorchFunction():  # asking a tensor for its type is a call of PyTorch, too
                launches.seen[launch(kernel, args, kwargs, grid)] += 1
            gpu.work()

        JITFunction.run = run


def launch(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], grid: Any) -> Launch:
    """One launch, as Triton specialises it: whole numbers that are 1 become constants, multiples of 16 are known to be.

    Raises:
        Refused: tensors that are not on the device, or more programs than a GPU takes.
    """
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in kwargs.items() if k in kernel.arg_names
    }
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned = set()
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            types[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            if not (isinstance(value, FakeTensor) and value.is_cuda):
                raise Refused(f"{kernel.__name__}: {name} is on {value.device}")
            types[name] = f"*{TYPES[value.dtype]}"
            if value.storage_offset() * value.element_size() % ALIGNED == 0:
                aligned.add(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            if value == 1 and not parameter.do_not_specialize:
                types[name], constants[name] = "constexpr", 1
                continue
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % ALIGNED == 0 and not parameter.do_not_specialize:
                aligned.add(name)
    programs = grid(arguments) if callable(grid) else grid
    if not all(0 < n <= limit for n, limit in zip(programs, MOST_PROGRAMS, strict=False)):
        raise Refused(f"{kernel.__name__}: {programs} programs")
    options = tuple(sorted((name, value) for name, value in kwargs.items() if name not in kernel.arg_names))
    return Launch(kernel, tuple(types.items()), tuple(constants.items()), frozenset(aligned), options)


def misfit_of(launch: Launch, arch: int = 90) -> str:
    """The error of `error_of` or of the GPU's own code; also if that spills, or needs too much shared memory."""
    types = " ".join(kind for _, kind in launch.types if kind != "constexpr")
    aligned = tuple(launch.aligned)
    configuration = Shipped(launch.kernel, types, dict(launch.constants), aligned=aligned, **dict(launch.options))
    build = compile_shipped("", configuration, arch)
    return "" if build.fits else build.error or f"{build.spilled} bytes spilled, {build.shared} bytes shared"


def error_of(launch: Launch, arch: int = 90) -> str:
    """Why Triton cannot turn the kernel into its intermediate code for such a launch; "" where it can.

    That is where arguments matter. What comes after is checked for the configurations that ship
    (`kernels.ahead_of_time`), and takes ten times as long.
    """
    from triton._C.libtriton import ir

    source = source_of(launch.kernel, dict(launch.types), dict(launch.constants), launch.aligned)
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options, context = backend.parse_options(dict(launch.options)), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except Exception as error:  # whatever the compiler raises
        return f"{type(error).__name__}: {error}"
    return ""
