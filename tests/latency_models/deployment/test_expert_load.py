"""Experts of unequal popularity: the fullest rank, EPLB, and what they do to steps and to AFD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.deployment.hardware import Deployment, derive, load_hardware
from latency_models.deployment.layers import (
    ExpertBalancer,
    ExpertLoad,
    fullest_rank,
    packed,
    power_law,
    replicated,
)
from latency_models.deployment.models import load_model
from latency_models.sources.roofline.spec import RooflineSpec
from workloads.errors import BadInput

POWER: dict[str, Any] = {"popularity": "power_law", "exponent": 1.2}


def test_even_experts_leave_ranks_even() -> None:
    assert ExpertLoad().fullest(256, 32) == pytest.approx(1.0)
    assert ExpertLoad(eplb=ExpertBalancer(replicas=32, period=60)).fullest(256, 32) == pytest.approx(1.0, abs=0.15)


def test_a_power_law_has_the_quantiles_of_its_density() -> None:
    """By hand: of density 1/x on 1 to 100, half lie below 10; of x^-2, half lie below 1 / (1 - 0.5 · 0.99)."""
    assert np.median(power_law(1.0, 100.0, 1001)) == pytest.approx(10.0)
    assert np.median(power_law(2.0, 100.0, 1001)) == pytest.approx(1 / (1 - 0.5 * 0.99))
    assert np.median(power_law(0.0, 100.0, 1001)) == pytest.approx(50.5)


def test_one_popular_expert_decides_by_hand() -> None:
    """One expert has half of all tokens, seven share the rest; on two ranks of four experts."""
    shares = np.array([0.5, *[0.5 / 7] * 7])
    fullest = 2 * (0.5 + 3 * 0.5 / 7)  # its rank, in any order
    assert fullest_rank(shares, 2) == pytest.approx(fullest)
    assert sorted(replicated(shares, 2)) == pytest.approx([0.5 / 7] * 7 + [0.5 / 3] * 3)
    balanced = fullest_rank(shares, 2, ExpertBalancer(replicas=2, period=1))
    assert balanced == pytest.approx(2 * (2 * 0.5 / 3 + 3 * 0.5 / 7))


@pytest.mark.parametrize("replicas", [0, 16, 64])
def test_eplb_loses_no_tokens_and_is_never_worse(replicas: int) -> None:
    shares = ExpertLoad(**POWER).shares(256)
    loads = packed(replicated(shares, replicas), 16)
    assert len(loads) == 16
    assert sum(loads) == pytest.approx(1.0)
    assert 1.0 <= 16 * max(loads) < fullest_rank(shares, 16)


def test_measured_popularity_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "load.csv").write_text("tokens\n30\n10\n10\n50\n")
    load = ExpertLoad(popularity="measured", path="load.csv")
    assert load.shares(4, tmp_path) == pytest.approx([0.5, 0.3, 0.1, 0.1])
    assert load.fullest(4, 4, tmp_path) == pytest.approx(2.0)
    with pytest.raises(BadInput, match=r"load\.csv: got 4, expected a row for each of the 8 experts"):
        load.shares(8, tmp_path)


def seconds(load: dict[str, Any] | None, expert_parallel: bool = True) -> float:
    section = {"source": "roofline", "model": "deepseek-v3", "hardware": "h200", "data_parallel": 32}
    section |= {"expert_parallel": expert_parallel, "expert_load": load}
    return RooflineSpec.model_validate(section).build(Path()).decode_seconds(256, 256 * 2000, 2000, 1)[0]


def test_the_fullest_rank_sets_the_pace_of_a_step() -> None:
    even, skewed = seconds(None), seconds(POWER)
    balanced = seconds(POWER | {"eplb": {"replicas": 32, "period": 600}})
    assert even < balanced < skewed
    assert seconds({"popularity": "uniform"}) == pytest.approx(even)
    costly = seconds(POWER | {"eplb": {"replicas": 32, "period": 600, "cost": 6}})
    assert costly == pytest.approx(1.01 * balanced)  # six seconds in 600


def test_experts_that_are_split_over_all_devices_stay_even() -> None:
    """Popular experts are read more often, and unpopular ones less: a step is no slower."""
    assert seconds(POWER, expert_parallel=False) <= seconds(None, expert_parallel=False)


def test_a_dense_model_has_no_popularity() -> None:
    section = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h200", "expert_load": POWER}
    with pytest.raises(BadInput, match=r"^step_time.expert_load: got 'power_law', expected none, since llama-3.1-8b"):
        RooflineSpec.model_validate(section).build(Path())
    with pytest.raises(BadInput, match="expert_load: got 'power_law', expected none"):
        derive(load_hardware("h200"), load_model("llama-3.1-8b"), Deployment(expert_load=ExpertLoad(**POWER)))


def test_the_ffn_side_of_afd_slows_with_its_fullest_card() -> None:
    """α_F and α_C grow by as much as the fullest card has more rows; attention stays, so that r* falls."""
    model, hardware = load_model("deepseek-v3"), load_hardware("h200")
    load = ExpertLoad(**POWER)
    even = derive(hardware, model, Deployment(ffn_cards=32, precision="fp8"))
    skewed = derive(hardware, model, Deployment(ffn_cards=32, precision="fp8", expert_load=load))
    factor = load.fullest(256, 32)
    assert factor > 1.5
    assert skewed.ffn.alpha == pytest.approx(factor * even.ffn.alpha)
    assert skewed.communication.alpha == pytest.approx(factor * even.communication.alpha)
    assert (skewed.ffn.beta, skewed.attention) == (even.ffn.beta, even.attention)
