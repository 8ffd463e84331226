"""Compiles every shipped kernel for GPUs that need not be there, and says what each takes of one.

    python -m kernels.ahead_of_time [OPERATION ...] [--arch 80 90] [--json]

One line a kernel: registers, bytes spilled, bytes of shared memory. Exit code 4 if one does not compile, spills, or
does not fit.
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
    """What a compiled kernel takes.

    Attributes:
        registers: a thread. spilled: bytes a thread keeps in local memory. shared: bytes a block.
        tensor_cores: the instruction it multiplies matrices with, "wgmma" or "mma"; "" if it does not.
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
        """Whether it compiled, spills nothing, and leaves shared memory for one block."""
        return not self.error and not self.spilled and self.shared <= SHARED_BYTES[self.arch]


def operations() -> list[str]:
    """The operations that have kernels: packages here with a module `triton`."""
    found = [module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg]
    return [name for name in sorted(found) if (Path(kernels.__path__[0]) / name / "triton.py").exists()]


def shipped(operation: str) -> list[Shipped]:
    """What one operation ships."""
    configurations: list[Shipped] = importlib.import_module(f"kernels.{operation}.triton").SHIPPED
    return configurations


def source_of(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], aligned: Collection[str]) -> Any:
    """What Triton compiles: a kernel, the types of its arguments in order, constants, and which are multiples of 16."""
    from triton.compiler import ASTSource

    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in aligned}
    return ASTSource(kernel, dict(signature), dict(constants), divisible)


def compile_shipped(operation: str, configuration: Shipped, arch: int) -> Compiled:
    """One configuration, compiled for one compute capability; Triton keeps what it compiled in its own cache."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = configuration.kernel
    types = iter(configuration.types.split())
    constants = dict(configuration.constants)
    signature = {name: "constexpr" if name in constants else next(types) for name in kernel.arg_names}
    aligned = {name for name, kind in signature.items() if kind.startswith("*") or name in configuration.aligned}
    source = source_of(kernel, signature, constants, aligned)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    made = Compiled(operation, configuration.name, arch)
    try:
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # whatever the compiler raises: the report names the kernel
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dataclasses.replace(made, error=lines[-1])
    registers, spilled = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    cores = "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else ""
    return dataclasses.replace(
        made, registers=registers, spilled=spilled, shared=compiled.metadata.shared, tensor_cores=cores
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, as the CUDA toolkit that comes with Triton reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def compile_all(names: list[str], archs: list[int]) -> Iterator[Compiled]:
    """Every configuration of the named operations, for every compute capability that it is meant for."""
    for name in names:
        for configuration in shipped(name):
            for arch in archs:
                if arch >= configuration.least_arch:
                    yield compile_shipped(name, configuration, arch)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.ahead_of_time", description=__doc__.split("\n\n")[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="default: all")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_BYTES))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    asked = parser.parse_args(arguments)
    known = operations()
    for name in asked.operations:
        if name not in known:
            parser.error(f"unknown operation {name}; expected one of {', '.join(known)}")
    made = []
    for compiled in compile_all(asked.operations or known, asked.arch):
        made.append(compiled)
        if not asked.json:
            print(_line(compiled), flush=True)
    if asked.json:
        print(json.dumps([dataclasses.asdict(each) | {"fits": each.fits} for each in made], indent=1))
    return 0 if all(each.fits for each in made) else FAILED


def _line(made: Compiled) -> str:
    if made.error:
        return f"sm_{made.arch} {made.operation}: {made.name}: {made.error}"
    return (
        f"sm_{made.arch} {made.operation}: {made.name}: {made.registers} registers, {made.spilled} bytes spilled,"
        f" {made.shared} bytes shared {made.tensor_cores}{'' if made.fits else ' DOES NOT FIT'}"
    )


if __name__ == "__main__":
    sys.exit(main())
