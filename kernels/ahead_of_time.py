"""Compiles every shipped kernel for GPUs that need not be present, and reports the resources that each takes.

    python -m kernels.ahead_of_time [OPERATION ...] [--arch 80 90] [--first] [--json]

One line for each kernel: registers, bytes spilled, bytes of shared memory, instructions. Exit code 4 if a kernel does
not compile, spills, does not fit, or writes registers that a product in flight still reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
from kernels import sass
from kernels.shipping import Shipped

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one block may have, by compute capability (CUDA programming guide, table of technical limits)."""

FAILED = 4


@dataclass(frozen=True)
class Compiled:
    """The resources of a compiled kernel.

    Attributes:
        registers: of each thread. spilled: bytes of local memory of each thread. shared: bytes of each block.
        instructions: of the kernel. loop: of its longest loop; 0 without loops.
        tensor_cores: the instruction that multiplies matrices, "wgmma" or "mma"; "" for none.
        hazard: the first register that is overwritten while a WGMMA may still read it; "" for none (`kernels.sass`).
        error: why it did not compile.
    """

    operation: str
    name: str
    arch: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    instructions: int = 0
    loop: int = 0
    tensor_cores: str = ""
    hazard: str = ""
    error: str = ""

    @property
    def fits(self) -> bool:
        """True if it compiled without hazards, spills nothing, and fits into the shared memory of one block."""
        return not (self.error or self.hazard or self.spilled) and self.shared <= SHARED_BYTES[self.arch]


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
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in aligned}
    return ASTSource(kernel, dict(signature), dict(constants), divisible)


def compile_shipped(operation: str, configuration: Shipped, arch: int) -> Compiled:
    """Compile one configuration for one compute capability. Triton caches the result."""
    kernel = configuration.kernel
    types = iter(configuration.types.split())
    constants = dict(configuration.constants)
    signature = {name: "constexpr" if name in constants else next(types) for name in kernel.arg_names}
    aligned = {name for name, kind in signature.items() if kind.startswith("*") or name in configuration.aligned}
    source = source_of(kernel, signature, constants, aligned)
    options = {name: getattr(configuration, name) for name in ("num_warps", "num_stages", "maxnreg")}
    build = Compiled(operation, configuration.name, arch)
    try:
        compiled: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # whatever the compiler raises: the report names the kernel
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return dataclasses.replace(build, error=lines[-1])
    cubin = compiled.asm["cubin"]
    ptx = compiled.asm["ptx"]
    registers, spilled = _resources(cubin)
    cores = "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else ""
    code = sass.instructions(sass.listing(cubin))
    hazards = sass.hazards(code) if cores == "wgmma" else []
    return dataclasses.replace(
        build,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        instructions=len(code),
        loop=max(map(len, sass.loops(code)), default=0),
        tensor_cores=cores,
        hazard=str(hazards[0]) if hazards else "",
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, as the CUDA toolkit that comes with Triton reports them."""
    usage = sass.tool("cuobjdump", "-res-usage", cubin)
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return int(match[1]), int(match[2])


def compile_all(names: list[str], archs: list[int], *, first: bool = False) -> Iterator[Compiled]:
    """Compile every configuration of the named operations for every compute capability that it supports.

    `first`: only the first configuration of each kernel.
    """
    for name in names:
        configurations = shipped(name)
        if first:
            configurations = list(
                {configuration.kernel.__name__: configuration for configuration in reversed(configurations)}.values()
            )
        for configuration in configurations:
            for arch in archs:
                if arch >= configuration.least_arch:
                    yield compile_shipped(name, configuration, arch)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.ahead_of_time", description=__doc__.split("\n\n")[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="default: all")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_BYTES))
    parser.add_argument("--first", action="store_true", help="only the first configuration of each kernel")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    names = operations()
    for name in options.operations:
        if name not in names:
            parser.error(f"unknown operation {name}; expected one of {', '.join(names)}")
    builds = []
    for compiled in compile_all(options.operations or names, options.arch, first=options.first):
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
        f" {build.shared} bytes shared, {build.instructions} instructions, {build.loop} in the longest loop"
        f" {build.tensor_cores}{build.hazard and ' ' + build.hazard}{'' if build.fits else ' DOES NOT FIT'}"
    )


if __name__ == "__main__":
    sys.exit(main())
