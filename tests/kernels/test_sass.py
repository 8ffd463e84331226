"""Listings of machine code, and the check for registers that a WGMMA in flight still reads."""

from __future__ import annotations

import pytest

from kernels.sass import hazards, instructions, loops


def listing(*lines: str) -> str:
    """Lines as the disassembler prints them, 16 bytes apart, with their encoding behind."""
    return "\n".join(f"        /*{16 * i:04x}*/    {line} ;    /* 0x000000 */" for i, line in enumerate(lines))


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR16], R24, gsb0"
FROM_SHARED = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
WAIT, WAIT_FOR_ALL_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
BACK = "@P1 BRA 0x0"


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ([PRODUCT, "LDS.U16 R57, [R143+UR18+0xc000]"], 1),
        ([PRODUCT, WAIT, "LDS.U16 R57, [R143]"], 0),
        ([PRODUCT, "LDS.U16 R60, [R143]"], 0),  # the four registers of the factor end before
        ([PRODUCT, "LDS.128 R52, [R143]"], 0),
        ([PRODUCT, "LDS.128 R53, [R143]"], 1),
        ([PRODUCT, "LDSM.16.M88.4 R56, [R143]"], 1),
        ([PRODUCT, "@!P2 IMAD.WIDE R54, R1, R2, R4"], 0),
        ([PRODUCT, "@!P2 IMAD.WIDE R55, R1, R2, R4"], 1),
        ([PRODUCT, "STS [R56], R57"], 0),
        ([PRODUCT, "ISETP.GE.AND P0, PT, R56, R57, PT"], 0),
        ([PRODUCT, "SHFL.IDX PT, R58, R3, R4, 0x1f"], 1),
        ([PRODUCT, FROM_SHARED, WAIT_FOR_ALL_BUT_ONE, "MOV R56, R1"], 0),
        ([FROM_SHARED, PRODUCT, WAIT_FOR_ALL_BUT_ONE, "MOV R56, R1"], 1),
        ([FROM_SHARED, "MOV R24, R1"], 0),
        (["MOV R56, R1", PRODUCT, BACK], 1),  # by the next iteration
        (["MOV R56, R1", PRODUCT, WAIT, BACK], 0),
        (["MOV R56, R1", WAIT, PRODUCT, BACK], 1),
    ],
)
def test_an_operand_in_flight_must_not_be_written(lines: list[str], count: int) -> None:
    assert len(hazards(instructions(listing(*lines)))) == count


def test_a_listing_has_its_loops() -> None:
    code = instructions(listing("MOV R0, R1", "IADD3 R1, R1, 0x1, RZ", "@P0 BRA 0x10", "BRA 0x40", "EXIT", "BRA 0x50"))
    assert [instruction.operation for instruction in code] == ["MOV", "IADD3", "BRA", "BRA", "EXIT", "BRA"]
    assert [[instruction.address for instruction in loop] for loop in loops(code)] == [[0x10, 0x20]]
