"""Every kernel that ships compiles for sm_80 and sm_90, spills nothing, fits, and overwrites no operand in flight.

In a process of its own: where the interpreter was asked for, there is nothing to compile.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernels.ahead_of_time import operations
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
