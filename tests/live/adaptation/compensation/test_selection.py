"""SPEAR's Algorithm 1, by hand: entropy, how many modules, which, and their rank; and the bytes they take."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from kernels.error_compensator import compensator, to_int8
from latency_models.io.config_io import write_yaml
from latency_models.sources.ec_tables import read_layer_tables
from live.adaptation.compensators import initial_gate
from live.adaptation.placement import (
    LLAMA_2_7B,
    MEASURED,
    NOISE,
    Rule,
    affordable_rank,
    compensator_bytes,
    deployment_costs,
    normalised_entropy,
    select,
    share_of,
    support,
    total_bytes,
)


def names(*values: float) -> dict[str, float]:
    return {f"layers.{i}.o": value for i, value in enumerate(values)}


def test_entropy_of_uniform_and_of_one_sided_damage() -> None:
    assert normalised_entropy(names(*[0.5] * 7)) == pytest.approx(1)
    assert normalised_entropy(names(1, 0, 0, 0)) == 0
    expected = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)) / math.log(3)
    assert normalised_entropy(names(2, 1, 1)) == pytest.approx(expected)


def test_concentrated_damage_is_covered_by_the_fewest_modules() -> None:
    damage = names(60, 25, 5, 4, 3, 2, 1, 0, 0, 0)
    assert normalised_entropy(damage) < 0.9
    assert support(damage, Rule(threshold=0.8)) == 2  # 60 + 25 of 100
    assert support(damage, Rule(threshold=0.6)) == 1
    assert support(damage, Rule(threshold=0.95)) == 5  # 60 + 25 + 5 + 4 are 94


def test_diffuse_damage_selects_half_of_the_threshold() -> None:
    """Table 16 at 3B: τ of 0.6 to 0.9 selects 30.1, 34.7, 39.8 and 44.9 % of 196 modules; ours are within a module."""
    damage = names(*[1.0] * 196)
    counts = [support(damage, Rule(threshold=tau)) for tau in (0.6, 0.7, 0.8, 0.9)]
    assert counts == [59, 69, 78, 88]
    assert [round(share * 196) for share in (0.301, 0.347, 0.398, 0.449)] == [59, 68, 78, 88]


def test_the_number_of_modules_is_bounded() -> None:
    """Table 8's note: floor(0.15 · 112) = 16 modules, 14.3 %."""
    assert support(names(1, *[0.0] * 111), Rule()) == 16
    assert support({**names(*[1.0] * 10)}, Rule(threshold=1.9)) == 6
    assert support(names(1, 0, 0), Rule()) == 1


SIZES = dict.fromkeys(names(*[0.0] * 10), (64, 64))


def test_the_most_damaged_are_protected_and_cost_decides_among_the_rest() -> None:
    damage = names(1.0, 0.9, 0.8, 0.7, 0.69, 0.68, 0.6, 0.6, 0.6, 0.6)
    cost = names(9, 9, 9, 1, 1, 1, 1, 1, 1, 1)
    free = select(damage, cost, SIZES, 10_000, Rule(cost_weight=0))
    assert free.modules == tuple(f"layers.{i}.o" for i in (0, 1, 2, 3))
    assert free.protected == 2
    costly = select(damage, cost, SIZES, 10_000, Rule(cost_weight=1))
    assert costly.modules == tuple(f"layers.{i}.o" for i in (0, 1, 3, 4))  # 2 costs more than it is worth


def test_round_off_is_no_damage() -> None:
    damage = names(1.0, *[NOISE / 2] * 9)
    assert select(damage, names(*[1.0] * 10), SIZES, 10_000, Rule()).entropy == 0


def test_the_rank_is_the_largest_that_fits() -> None:
    damage, cost = names(1.0, *[0.0] * 9), names(*[1.0] * 10)
    budget = compensator_bytes((64, 64), 3)
    assert select(damage, cost, SIZES, budget, Rule()).rank == 3
    assert select(damage, cost, SIZES, budget - 1, Rule()).rank == 2
    assert select(damage, cost, SIZES, 10, Rule()).rank == 0
    assert affordable_rank([(64, 64)] * 2, 2 * budget) == 3
    assert affordable_rank([(64, 64)], 10**9) == 64  # no rank beyond the module's


@pytest.mark.parametrize("rank", [1, 5, 8])
def test_bytes_are_those_of_what_is_stored(rank: int) -> None:
    parts = initial_gate(rank, 0)
    quantised = compensator(torch.randn(rank, 40), torch.randn(72, rank), *parts.values())
    stored = to_int8(quantised, rank)
    assert compensator_bytes((72, 40), rank) == sum(tensor.nbytes for tensor in stored.values())
    gate = sum(stored[name].nbytes for name in ("first", "first_bias", "second", "second_bias"))
    assert compensator_bytes((72, 40), rank, gate=False) == sum(tensor.nbytes for tensor in stored.values()) - gate


def test_memory_of_the_paper_s_choice_at_llama_2_7b() -> None:
    """Table 8: 39 % of the modules at rank 24. Table 2: 24.9 MB; below 1 % of a model in 4 bits."""
    sizes = LLAMA_2_7B.linear()
    modules = [f"layers.{i}.{kind}" for i in range(12) for kind in sizes] + ["layers.12.o", "layers.13.o"]
    share = share_of(LLAMA_2_7B, modules, 32, 24, 4)
    model_bytes = LLAMA_2_7B.layers * sum(outputs * inputs for outputs, inputs in sizes.values()) / 2
    assert share * model_bytes == pytest.approx(total_bytes([sizes[name.split(".")[2]] for name in modules], 24))
    assert 15e6 < share * model_bytes < 30e6
    assert share < 0.01


def test_costs_are_what_a_compensator_adds_to_one_token(tmp_path: Path) -> None:
    tables = read_layer_tables(MEASURED)
    cost = deployment_costs(["layers.0.qkv", "layers.1.down"])
    assert cost["layers.0.qkv"] == pytest.approx(tables.ec["qkv"][0] - tables.w4["qkv"][0])
    assert cost["layers.1.down"] > 0
    slower = tables.model_copy(update={"ec": {**tables.ec, "down": [second + 1 for second in tables.ec["down"]]}})
    (tmp_path / "other.yaml").write_text(write_yaml(slower.document()))
    moved = deployment_costs(cost, tmp_path / "other.yaml")
    assert moved["layers.1.down"] == pytest.approx(cost["layers.1.down"] + 1)
    assert moved["layers.0.qkv"] == cost["layers.0.qkv"]
