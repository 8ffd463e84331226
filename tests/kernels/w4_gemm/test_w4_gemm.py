"""Products with packed weights against float64, and packing against plain loops."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.w4_gemm import PackedWeight, dequantise, from_codes, quantise, reference, triton
from kernels.w4_gemm.pack import pack, unpack
from kernels.w4_gemm.triton import codes_ptx

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of the result. bfloat16 has a whole unit in the last place, because the interpreter cuts where a GPU rounds."""


def sample(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 10007 + outputs * 101 + inputs)
    x = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return x.to(device, dtype), weight.to(device)


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: PackedWeight) -> None:
    """Against float64, within the rounding of y and that of a float32 sum, which is below (inputs · 2^-24) Σ|x·w|.

    The bound of a sum's rounding grows with its length; that of random signs with its root, and three times that is
    allowed here. Codes count from the middle: with zeros, two sums are taken from each other.
    """
    dense = dequantise(weight, torch.float64)
    exact = torch.nn.functional.linear(x.double(), dense)
    middle = dequantise(dataclasses.replace(weight, zeros=None), torch.float64)
    size = torch.nn.functional.linear(x.double().abs(), middle.abs() + (dense - middle).abs())
    allowed = ROUNDING[x.dtype] * exact.abs() + 3 * weight.inputs**0.5 * 2**-24 * size + 1e-30
    excess = ((y.double() - exact).abs() / allowed).max().item()
    assert excess <= 1, excess


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_lie_where_the_layout_says(bits: int) -> None:
    steps = {4: 4, 3: 8}[bits]
    codes = torch.randint(0, 2**bits, (3, 2 * 64 * steps), dtype=torch.int32)
    packed = pack(codes, bits)
    assert torch.equal(unpack(packed, bits), codes)
    low = {4: 4, 3: 2}[bits]
    for row, k in ((0, 0), (1, 63), (2, 64 * steps + 77), (0, 2 * 64 * steps - 1)):
        block, inside = divmod(k, 64 * steps)
        step, (word, half) = inside // 64, divmod(inside % 64, 2)
        code = int(packed[block, row, word]) >> (16 * half + low * step) & (2**low - 1)
        if bits == 3:
            high = int(packed[block, row, 32 + word // 2]) >> (16 * half + 8 * (word % 2) + step) & 1
            code += 4 * high
        assert code == codes[row, k]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_rounding_is_to_nearest(bits: int, group: int, symmetric: bool) -> None:
    _, weight = sample(1, 63, 500, torch.float32, "cpu")
    packed = quantise(weight, bits, group, symmetric)
    close = dequantise(packed)
    span = group or 500
    for first in range(0, 500, span):
        exact, rounded = weight[:, first : first + span], close[:, first : first + span]
        reach = exact.abs().amax(1) / (2 ** (bits - 1) - 1)
        if not symmetric:
            reach = (exact.amax(1).clamp(min=0) - exact.amin(1).clamp(max=0)) / (2**bits - 1)
        # Half a step; the float16 of the scale is off by 2^-11 of up to 2^bits steps, the rounded zero by half a step.
        steps = 0.5 + 2.0 ** (bits - 11) + (0 if symmetric else 0.5)
        assert ((exact - rounded).abs() <= steps * reach.unsqueeze(1) * (1 + 2**-10)).all()


def test_codes_of_another_quantiser() -> None:
    codes = torch.randint(0, 16, (5, 300))
    scales, zeros = torch.rand(5, 3).half(), torch.randint(0, 16, (5, 3))
    dense = dequantise(from_codes(codes, scales, zeros, bits=4, group=128))
    for row in range(5):
        for k in (0, 127, 128, 299):
            expected = float(scales[row, k // 128]) * (int(codes[row, k]) - int(zeros[row, k // 128]))
            assert dense[row, k].item() == pytest.approx(expected, rel=1e-6)


def test_a_width_that_is_not_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 3 or 4 bits"):
        quantise(torch.ones(1, 1), bits=5)


def test_reference_by_hand() -> None:
    weight = from_codes(torch.tensor([[9, 6], [8, 15]]), torch.tensor([[0.5], [2.0]]), None, bits=4, group=0)
    y = reference.w4_gemm(torch.tensor([[1.0, 3.0]]), weight)
    torch.testing.assert_close(y, torch.tensor([[0.5 * (1 - 6), 2.0 * (0 + 21)]]))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    [(1, 1, 1), (1, 63, 500), (1, 63, 2100), (3, 500, 63), (17, 100, 640), (70, 130, 300)],
)
def test_product_equals_float64(tokens: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> None:
    x, dense = sample(tokens, outputs, inputs, dtype, device)
    weight = quantise(dense)
    assert_product(triton.w4_gemm(x, weight), x, weight)
    assert weight.arrivals.count_nonzero() == 0


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "dtype"),
    [
        (3, 0, True, torch.bfloat16), (3, 128, False, torch.float16), (4, 0, False, torch.float16),
        (4, 128, True, torch.bfloat16),
    ],
)  # fmt: skip
def test_every_format(bits: int, group: int, symmetric: bool, dtype: torch.dtype, device: str) -> None:
    x, dense = sample(2, 40, 700, dtype, device)
    weight = quantise(dense, bits, group, symmetric)
    assert_product(triton.w4_gemm(x, weight), x, weight)
    tiling = triton.Tiling(rows=64, tokens=16, split=2, num_warps=4, num_stages=2)
    y = torch.empty(2, 40, dtype=dtype, device=device)
    for _ in range(2):  # the second launch counts from what the first left
        triton.launch(x, weight, y.fill_(float("nan")), tiling)
        assert_product(y, x, weight)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("bits", "group", "symmetric"), [(3, 0, False), (3, 128, True), (4, 0, True), (4, 128, False)])
def test_unpacked(bits: int, group: int, symmetric: bool, device: str) -> None:
    _, dense = sample(1, 70, 900, torch.float32, device)
    weight = quantise(dense, bits, group, symmetric)
    assert torch.equal(triton.unpack(weight, torch.float32), dequantise(weight))


def test_many_tokens_go_to_the_library(device: str) -> None:
    x, dense = sample(triton.UNPACK_TOKENS, 40, 64, torch.float32, device)
    weight = quantise(dense)
    exact = torch.nn.functional.linear(x.double(), dequantise(weight, torch.float64))
    torch.testing.assert_close(triton.w4_gemm(x, weight).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 511])
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (4096, 16), (22016, 16), (4096, 43), (8192, 32)])
def test_selection(tokens: int, outputs: int, blocks: int) -> None:
    tiling = triton.select(tokens, outputs, blocks)
    tiles = -(-outputs // tiling.rows) * -(-tokens // tiling.tokens)
    assert 1 <= tiling.split <= blocks
    assert tiling.split == 1 or tiles <= triton.MOST_TILES_SPLIT
    assert tiling.split == 1 or tiles * tiling.split <= 4 * triton.PROCESSORS, "all are there at once"
    if tokens == 1 and outputs >= 4096:
        assert tiles * tiling.split >= 2 * triton.PROCESSORS - 8, "each multiprocessor has work"


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of a word, the lower half first."""
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(dtype)


def run_ptx(ptx: str, low: int, high: int, dtype: torch.dtype) -> list[float]:
    """The results of a program of lop3, mov and fma on words with two numbers each."""
    registers = {"$2": low, "$3": high}

    def value(operand: str) -> int:
        return int(operand, 16) if operand.startswith("0x") else registers[operand]

    for statement in ptx.strip("{ }").split(";"):
        operation, _, rest = statement.strip().partition(" ")
        target, *operands = [operand.strip() for operand in rest.split(",")]
        if operation == "lop3.b32":
            a, b, c, table = map(value, operands)
            places = [(a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) for i in range(32)]
            registers[target] = sum((table >> place & 1) << i for i, place in enumerate(places))
        elif operation.startswith("fma.rn."):
            a, b, c = (halves(value(operand), dtype) for operand in operands)
            first, second = (a * b + c).view(torch.uint16).tolist()
            registers[target] = second << 16 | first
        elif operation == "mov.b32" and not target.startswith("{"):
            registers[target] = value(operands[0])
    assert ptx.endswith("mov.b32 {$0, $1}, t; }")
    numbers: list[float] = halves(registers["t"], dtype).tolist()
    return numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 3])
def test_the_instructions_that_unpack_codes(bits: int, dtype: torch.dtype) -> None:
    """On a GPU they are PTX, which the interpreter does not run. Other bits of the words are those of other steps."""
    others = 0xFFF0FFF0 if bits == 4 else 0xFFFCFFFC
    for first in range(2**bits):
        for second in range(2**bits):
            word = second << 16 | first
            low = others | (word if bits == 4 else word & 0x00030003)
            high = 0 if bits == 4 else 0xFFFBFFFB | (word & 0x00040004)
            numbers = run_ptx(codes_ptx(bits, dtype).value, low, high, dtype)
            assert numbers == [first - 2 ** (bits - 1), second - 2 ** (bits - 1)]
