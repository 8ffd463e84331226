"""The machine code of a compiled kernel: its instructions, its loops, and operands that are overwritten too early.

A WGMMA runs asynchronously. Where its left factor is in registers, these must keep their values until the kernel has
waited for it (`WARPGROUP.DEPBAR`). ptxas up to 12.9 can give such registers to the next iteration of a pipelined loop
while the product still reads them (Triton's issue 9433), which makes wrong numbers without any error.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    import triton

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
    """The hazards of a kernel, in the order of its code, and of each loop also from one iteration to the next."""
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
