"""Every kernel that ships compiles for sm_80 and sm_90, spills nothing, fits, and overwrites no operand in flight.

In a process of its own: where the interpreter was asked for, there is nothing to compile.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernels.ahead_of_time import hazards, instructions, loops, operations
from tests.compiling import run_compiling


def compile_in_process(*arguments: str) -> list[dict[str, Any]]:
    """The report of `python -m kernels.ahead_of_time`, which must succeed."""
    process = run_compiling("-m", "kernels.ahead_of_time", *arguments, "--json")
    report: list[dict[str, Any]] = json.loads(process.stdout)
    assert [kernel for kernel in report if not kernel["fits"]] == []
    assert process.returncode == 0
    return report


def test_the_first_configuration_of_each_kernel_fits() -> None:
    report = compile_in_process("--first", "--arch", "90")
    assert {kernel["operation"] for kernel in report} == set(operations())


@pytest.mark.slow
@pytest.mark.parametrize("operation", operations())
def test_all_configurations_fit(operation: str) -> None:
    report = compile_in_process(operation)
    assert report, "an operation ships at least one configuration"
    assert {kernel["arch"] for kernel in report} >= {90}


CONVERTED_LEFT_FACTOR = """
import triton
import triton.language as tl
from kernels.ahead_of_time import compile_shipped
from kernels.shipping import Shipped

@triton.jit
def product_kernel(x_ptr, a_ptr, y_ptr, inputs, RANK: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr):
    rank, token = tl.arange(0, RANK), tl.arange(0, TOKENS)
    total = tl.zeros((RANK, TOKENS), tl.float32)
    for start in tl.range(0, inputs, 128, num_stages=STAGES):
        at = start + tl.arange(0, 128)
        a = tl.load(a_ptr + rank[:, None] * inputs + at[None, :])
        x = tl.load(x_ptr + token[None, :] * inputs + at[:, None])
        total = tl.dot(a.to(tl.bfloat16), x, total)
    tl.store(y_ptr + rank[:, None] * TOKENS + token[None, :], total)

for stages in (3, 1):
    constants = {"RANK": 64, "TOKENS": 64, "STAGES": stages}
    shipped = Shipped(product_kernel, "*bf16 *i8 *fp32 i32", constants, aligned=("inputs",))
    print(compile_shipped("", shipped, 90).hazard)
"""


def test_a_converted_left_factor_in_a_pipelined_loop_is_a_hazard(tmp_path: Any) -> None:
    """The loop that compensators of ranks 33 to 64 once had. Without a pipeline, it waits for each product."""
    program = tmp_path / "product.py"
    program.write_text(CONVERTED_LEFT_FACTOR, encoding="utf-8")
    process = run_compiling(str(program))
    assert process.returncode == 0, process.stderr[-3000:]
    pipelined, waiting = process.stdout.splitlines()
    assert "overwrites an operand of" in pipelined
    assert waiting == ""


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
