"""Mixtures of experts against float64, and their parts against plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.expert_gemm import reference, triton

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of a result; bfloat16 has a whole unit in the last place, because the interpreter cuts where a GPU rounds."""


def sample(
    tokens: int, hidden: int, intermediate: int, experts: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    """x, the router's logits, gate_up, down."""
    generator = torch.Generator().manual_seed(tokens * 10007 + hidden * 101 + experts)
    x = torch.randn(tokens, hidden, generator=generator)
    logits = 2 * torch.randn(tokens, experts, generator=generator)
    gate_up = torch.randn(experts, 2 * intermediate, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(experts, hidden, intermediate, generator=generator) * intermediate**-0.5
    return tuple(tensor.to(device, dtype) for tensor in (x, logits, gate_up, down))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (1, 128, 8), (21, 60, 4), (5, 500, 3)])
def test_routing(tokens: int, experts: int, top_k: int, renormalise: bool, dtype: torch.dtype, device: str) -> None:
    _, logits, *_ = sample(tokens, 1, 1, experts, dtype, device)
    weights, numbers = triton.route(logits, top_k, renormalise)
    exact, exact_numbers = reference.route(logits.double(), top_k, renormalise)
    assert torch.equal(numbers, exact_numbers)
    # exp() is good to a few units of 2^-24, the sum over experts to the root of their number, and a quotient to one.
    torch.testing.assert_close(weights.double(), exact, rtol=(8 + experts**0.5) * 2**-24, atol=0.0)


def test_of_equal_experts_the_lower_number_comes_first(device: str) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]], device=device)
    assert triton.route(logits, 4)[1].tolist() == [[1, 2, 4, 0]]
    assert reference.route(logits, 4)[1].tolist() == [[1, 2, 4, 0]]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("assignments", "experts", "tile"),
    [(1, 1, 16), (8, 63, 16), (300, 7, 16), pytest.param(2100, 5, 128, marks=pytest.mark.slow)],
)
def test_assignments_sorted(assignments: int, experts: int, tile: int, device: str) -> None:
    generator = torch.Generator().manual_seed(assignments)
    numbers = torch.randint(0, experts, (assignments,), generator=generator, dtype=torch.int32).to(device)
    if experts > 2:
        numbers[numbers == 1] = 2  # an expert without any
    sorting = triton.sort_by_expert(numbers, experts, tile)
    assert torch.equal(sorting.order.long(), numbers.sort(stable=True).indices)
    expected = []
    first = 0
    for expert, count in enumerate(numbers.bincount(minlength=experts).tolist()):
        expected += [(expert, first + start, first + count) for start in range(0, count, tile)]
        first += count
    tables = torch.stack([sorting.tile_expert, sorting.tile_first, sorting.tile_end], dim=1)
    assert [tuple(row) for row in tables[: len(expected)].tolist()] == expected
    assert (sorting.tile_expert[len(expected) :] == -1).all()


def allowed(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *both: torch.Tensor) -> torch.Tensor:
    """The largest error that rounding may add up to.

    It has y's own; that of each expert's result and of what lies between its two products, all of which are stored in
    x's type; and that of float32 sums, 3 · 2^-24 times the root of their length.
    """
    gate_up, down = (weights_.double() for weights_ in both)
    wide, rounding = x.double(), ROUNDING[x.dtype]
    error = torch.zeros_like(wide)
    sums = 3 * 2**-24
    for token in range(x.shape[0]):
        for place in range(experts.shape[1]):
            expert, weight = int(experts[token, place]), float(weights[token, place])
            gate, up = (gate_up[expert] @ wide[token]).chunk(2)
            gate_size, up_size = (gate_up[expert].abs() @ wide[token].abs()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            slope = 1.1  # of silu, at most
            inner_error = rounding * inner.abs()
            inner_error += sums * x.shape[1] ** 0.5 * (slope * gate_size * up.abs() + gate.abs() * up_size)
            output = down[expert] @ inner
            length = sums * inner.shape[0] ** 0.5
            made_error = down[expert].abs() @ (inner_error + length * inner.abs()) + rounding * output.abs()
            error[token] += weight * (made_error + 2**-21 * output.abs())
    exact = reference.expert_mlp(wide, weights.double(), experts, gate_up, down)
    return error + rounding * exact.abs()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "experts", "top_k"),
    [(1, 64, 63, 1, 1), (1, 100, 63, 16, 4), (40, 70, 50, 3, 2)],
)
def test_experts_equal_float64(
    tokens: int, hidden: int, intermediate: int, experts: int, top_k: int, dtype: torch.dtype, device: str
) -> None:
    x, logits, gate_up, down = sample(tokens, hidden, intermediate, experts, dtype, device)
    weights, numbers = triton.route(logits, top_k)
    y = triton.expert_mlp(x, weights, numbers, gate_up, down)
    exact = reference.expert_mlp(x.double(), weights.double(), numbers, gate_up.double(), down.double())
    excess = ((y.double() - exact).abs() / allowed(x, weights, numbers, gate_up, down)).max().item()
    assert excess <= 1, excess


@pytest.mark.usefixtures("poisoned")
def test_long_rows(device: str) -> None:
    x, logits, gate_up, down = sample(2, 500, 70, 3, torch.bfloat16, device)
    weights, numbers = triton.route(logits, 1)
    y = triton.expert_mlp(x, weights, numbers, gate_up, down)
    exact = reference.expert_mlp(x.double(), weights.double(), numbers, gate_up.double(), down.double())
    assert ((y.double() - exact).abs() <= allowed(x, weights, numbers, gate_up, down)).all()


@pytest.mark.usefixtures("poisoned")
def test_one_expert_for_all(device: str) -> None:
    """Tiles of one expert only, although tokens are launched for as if spread over many."""
    x, _, gate_up, down = sample(40, 64, 64, 8, torch.float32, device)
    numbers = torch.full((40, 1), 6, dtype=torch.int32, device=device)
    weights = torch.full((40, 1), 0.5, device=device)
    gate, up = (x.double() @ gate_up[6].double().T).chunk(2, dim=1)
    exact = 0.5 * (torch.nn.functional.silu(gate) * up) @ down[6].double().T
    y = triton.expert_mlp(x, weights, numbers, gate_up, down)
    assert ((y.double() - exact).abs() <= allowed(x, weights, numbers, gate_up, down)).all()


def test_reference_by_loops() -> None:
    x, logits, gate_up, down = sample(3, 4, 2, 5, torch.float64, "cpu")
    weights, numbers = reference.route(logits, 2)
    y = reference.expert_mlp(x, weights, numbers, gate_up, down)
    for token in range(3):
        powers = [math.exp(logit) for logit in logits[token].tolist()]
        best = sorted(range(5), key=lambda logit: -powers[logit])[:2]
        assert numbers[token].tolist() == best
        total = sum(powers[logit] for logit in best)
        for n in range(4):
            value = 0.0
            for logit in best:
                inner = []
                for i in range(2):
                    gate = float(gate_up[logit, i] @ x[token])
                    inner.append(gate / (1 + math.exp(-gate)) * float(gate_up[logit, 2 + i] @ x[token]))
                value += powers[logit] / total * sum(float(down[logit, n, i]) * inner[i] for i in range(2))
            assert y[token, n].item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(("assignments", "experts"), [(1, 1), (8, 128), (65536, 128), (300, 7)])
def test_no_more_tiles_than_launched(assignments: int, experts: int) -> None:
    tile = triton.select(assignments, experts).tokens
    max_tiles = triton.most_tiles(assignments, experts, tile)
    one_each = [1] * (min(experts, assignments) - 1)
    worst = sum(-(-count // tile) for count in [*one_each, assignments - len(one_each)])
    assert worst <= max_tiles
    assert 16 <= tile <= 128
