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
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
from kernels.shipping import Shipped

COMPARISONS = ("ISETP", "FSETP", "DSETP", "HSETP2", "HFMA2.BF16_V2.SETP", "PLOP3", "R2P")
"""Instructions that write predicates only."""

READERS = ("WARPSYNC", "BRX", "RET", "CALL", "JMX", "NANOSLEEP", "BREAK", "BMOV", "ERRBAR", "CCTL", "RED", "ST")
"""Instructions whose first register is read."""

PAIRS = (".64", "WIDE", ".M88.2", ".MT88.2", "DADD", "DMUL", "DFMA", "I2F.F64", "F2F.F64")
QUADS = (".128", ".M88.4", ".MT88.4")
"""Parts of the names of instructions that write two, or four, registers."""

LEFT_REGISTERS = 4
"""Registers of each thread that the left factor of a WGMMA takes: 64 × 16 halves, by 128 threads."""


@dataclass(frozen=True)
class Instruction:
    """One line of a listing.

    Attributes:
        address: in bytes from the kernel's beginning.
        operation: such as "HGMMA.64x16x16.F32.BF16". operands: as they are written.
    """

    address: int
    operation: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.address:#x} {self.operation} {', '.join(self.operands)}"

    @property
    def destinations(self) -> range:
        """Numbers of the registers that it writes; an HGMMA's sums are left out, since WGMMAs run in order."""
        name = self.operation
        if name.startswith((*COMPARISONS, *READERS, "HGMMA")):
            return range(0)
        places = [operand for operand in self.operands if not re.fullmatch(r"!?U?P(T|\d)", operand)]
        match = re.fullmatch(r"R(\d+)", places[0]) if places else None
        if match is None:
            return range(0)
        count = 4 if any(part in name for part in QUADS) else 2 if any(part in name for part in PAIRS) else 1
        return range(int(match[1]), int(match[1]) + count)


@dataclass(frozen=True)
class Hazard:
    """An instruction that writes a register which a WGMMA in flight may still read."""

    product: Instruction
    overwrite: Instruction

    def __str__(self) -> str:
        return f"{self.overwrite} overwrites an operand of {self.product}"


def listing(cubin: bytes) -> str:
    return tool("cuobjdump", "-sass", cubin)


def tool(name: str, option: str, cubin: bytes) -> str:
    """Print a kernel with one of the CUDA tools that come with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> list[Instruction]:
    """The instructions of a listing, without their predicates."""
    result = []
    for match in re.finditer(r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*) *([^;]*);", text):
        operands = tuple(part.strip() for part in match[3].split(",") if part.strip())
        result.append(Instruction(int(match[1], 16), match[2], operands))
    return result


def loops(code: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """The body of each loop: what lies between a branch backwards and its target."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    bodies = []
    for i, instruction in enumerate(code):
        if instruction.operation.startswith("BRA") and (match := re.search(r"0x([0-9a-f]+)", instruction.operands[-1])):
            target = index.get(int(match[1], 16), i + 1)
            if target < i:
                bodies.append(code[target : i + 1])
    return bodies


def hazards(code: Sequence[Instruction]) -> list[Hazard]:
    """The hazards of a kernel, in the order of its code, and of each loop also from one iteration to the next.

    A WGMMA runs asynchronously. Where its left factor is in registers, these must keep their values until the kernel
    has waited for it (`WARPGROUP.DEPBAR`). ptxas up to 12.9 can give such registers to the next iteration of a
    pipelined loop while the product still reads them (Triton's issue 9433), which makes wrong numbers without any
    error.
    """
    hazard_set: dict[Hazard, None] = {}
    for body in [code, *([*body, *body, *body] for body in loops(code))]:
        hazard_set |= dict.fromkeys(_hazards(body))
    return list(hazard_set)


def _hazards(code: Sequence[Instruction]) -> list[Hazard]:
    """The hazards of a straight run of instructions. "gsb0" closes a group; a wait leaves that many in flight."""
    result = []
    in_flight: list[tuple[int, range, Instruction]] = []
    groups = 0
    for instruction in code:
        if instruction.operation.startswith("HGMMA"):
            if match := re.match(r"R(\d+)", instruction.operands[1]):
                first = int(match[1])
                in_flight.append((groups, range(first, first + LEFT_REGISTERS), instruction))
            groups += "gsb0" in instruction.operands
        elif instruction.operation.startswith("WARPGROUP.DEPBAR"):
            allowed = int(instruction.operands[-1], 16)
            in_flight = [entry for entry in in_flight if entry[0] >= groups - allowed]
        elif in_flight and (destinations := instruction.destinations):
            result += [
                Hazard(product, instruction)
                for _, registers, product in in_flight
                if set(registers) & set(destinations)
            ]
    return result


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
        hazard: the first register that is overwritten while a WGMMA may still read it; "" for none.
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
    code = instructions(listing(cubin))
    overwrites = hazards(code) if cores == "wgmma" else []
    return dataclasses.replace(
        build,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        instructions=len(code),
        loop=max(map(len, loops(code)), default=0),
        tensor_cores=cores,
        hazard=str(overwrites[0]) if overwrites else "",
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory, as the CUDA toolkit that comes with Triton reports them."""
    usage = tool("cuobjdump", "-res-usage", cubin)
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
