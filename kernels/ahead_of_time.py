"""Compiles every shipped kernel for GPUs that need not be present, and reports the resources that each takes.

    python -m kernels.ahead_of_time [OPERATION ...] [--arch 80 90] [--json]

One line for each kernel: registers, bytes spilled, bytes of shared memory. Exit code 4 if a kernel does not compile,
spills, or does not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels
from kernels.shipping import Shipped

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one block may have, by compute capability (CUDA programming guide, table of technical limits)."""

FAILED = 4


@dataclass(frozen=True)
class Compiled:
    """The resources of a compiled kernel.

    Attributes:
        registers: of each thread. spilled: bytes of local memory of each thread. shared: bytes of each block.
        tensor_cores: the instruction that multiplies matrices, "wgmma" or "mma"; "" for none.
        error: why it did not compile.
    """

    operation: str
    name: str
    arch: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    tensor_cores: str = ""
    error: str = ""

    @property
    def fits(self) -> bool:
        """True if it compiled, spills nothing, and fits into the shared memory of one block."""
        return not self.error and not self.spilled and self.shared <= SHARED_BYTES[self.arch]


def operations() -> list[str]:
    """The operations that have kernels: packages with a module `triton`."""
    names = [module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg]
    return [name for name in sorted(names) if (Path(kernels.__path__[0]) / name / "triton.py").exists()]


def shipped(operation: str) -> list[Shipped]:
    """The configurations that one operation ships."""
    configurations: list[Shipped] = importlib.import_module(f"kernels.{operation}.triton").SHIPPED
    return configurations


def source_of(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], aligned: Collection[str]) -> Any:
    """The input of Triton's compiler: a kernel, the types of its arguments in order, constants, and multiples of 16."""
    from triton.compiler import ASTSource

    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in aligned}
    return ASTSource(kernel, dict(signature), dict(constants), divisible)


def compile_shipped(operation: str, configuration: Shipped, arch: int) -> Compiled:
    """Compile one configuration for one compute capability. Triton caches the result."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = configuration.kernel
    types = iter(configuration.types.split())
    constants = dict(configuration.constants)
    signature = {name: "constexpr" if name in constants else next(types) for name in kernel.arg_names}
    aligned = {name for name, kind in signature.items() if kind.startswith("*") or name in configuration.aligned}
    source = source_of(kernel, signature, constants, aligned)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    build = Compiled(operation, configuration.name, arch)
    try:
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # whatever the compiler raises: the report names the kernel
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dataclasses.replace(build, error=lines[-1])
    registers, spilled = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    cores = "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else ""
    return dataclasses.replace(
        build, registers=registers, spilled=spilled, shared=compiled.metadata.shared, tensor_cores=cores
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, as the CUDA toolkit that comes with Triton reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return int(match[1]), int(match[2])


def compile_all(names: list[str], archs: list[int]) -> Iterator[Compiled]:
    """Compile every configuration of the named operations for every compute capability that it supports."""
    for name in names:
        for configuration in shipped(name):
            for arch in archs:
                if arch >= configuration.least_arch:
                    yield compile_shipped(name, configuration, arch)


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    parser = argparse.ArgumentParser(prog="python -m kernels.ahead_of_time", description=__doc__.split("\n\n")[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="default: all")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_BYTES))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    names = operations()
    for name in options.operations:
        if name not in names:
            parser.error(f"unknown operation {name}; expected one of {', '.join(names)}")
    builds = []
    for compiled in compile_all(options.operations or names, options.arch):
        builds.append(compiled)
        if not options.json:
            print(_line(compiled), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(build) | {"fits": build.fits} for build in builds], indent=1))
    return 0 if all(build.fits for build in builds) else FAILED


def _line(build: Compiled) -> str:
    if build.error:
        return f"sm_{build.arch} {build.operation}: {build.name}: {build.error}"
    return (
        f"sm_{build.arch} {build.operation}: {build.name}: {build.registers} registers, {build.spilled} bytes spilled,"
        f" {build.shared} bytes shared {build.tensor_cores}{'' if build.fits else ' DOES NOT FIT'}"
    )


if __name__ == "__main__":
    sys.exit(main())
