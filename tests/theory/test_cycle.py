"""The ring's period, against rings that are simulated; the barrier, against integrals done another way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.stages import PassLatency
from twin.afd.bundle import Bundle, BundleConfig, Supply
from twin.theory.cycle import CycleModel, LoadLaw, constant_load

times = st.one_of(st.just(0.0), st.floats(0.01, 20))


@given(times, times, times, st.integers(1, 5), st.integers(1, 3))
def test_constant_times_repeat_with_the_predicted_period(
    attention: float, ffn: float, link: float, microbatches: int, layers: int
) -> None:
    step = PassLatency((0.0, attention), (0.0, ffn), (0.0, link))
    if attention + ffn + link == 0:
        return
    model = CycleModel(step, 1, microbatches, [constant_load(0.0)])
    once = PassLatency((0.0, attention / layers), (0.0, ffn / layers), (0.0, link / layers))
    config = BundleConfig(1, 1, 1, once, microbatches, layers)
    length = 40
    records = Bundle(config, Supply.of([0] * microbatches, [length] * microbatches)).run()
    ends = np.array([row[2] for row in records.steps if row[0] == 0])
    period = (ends[-1] - ends[length // 2 - 1]) / (length - length // 2)
    assert period / microbatches == pytest.approx(model.step_time(1.0), rel=1e-9)


def test_one_instance_attention_bound_is_the_mean_load() -> None:
    law = LoadLaw(np.array([0.0, 1000.0]), np.array([0.0, 1.0]), 500.0)
    model = CycleModel(PassLatency((0.1, 7.0), (0.0, 1.0), (0.0, 0.0)), 1, 2, [law])
    assert model.step_time(1.0) == pytest.approx(0.1 * 500 + 7, rel=2e-3)


def test_barrier_waits_for_the_expected_maximum() -> None:
    law = LoadLaw(np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0.5)
    for instances in (1, 2, 5, 31):
        model = CycleModel(PassLatency((1.0, 0.0), (0.0, 0.0), (0.0, 0.0)), 1, 1, [law])
        # The largest of n uniform draws has mean n/(n + 1).
        assert model.step_time(1.0, instances) == pytest.approx(instances / (instances + 1), rel=1e-4)


@pytest.mark.parametrize(("attention", "ffn"), [(1, 1), (1, 32), (4, 1), (2, 2)])
def test_best_ratio_per_card_is_a_maximum(attention: int, ffn: int) -> None:
    law = LoadLaw(np.array([130_000.0, 170_000.0]), np.array([0.0, 1.0]), 150_000.0)
    model = CycleModel(PassLatency((0.00165, 50), (0.083, 100), (0.022, 20)), 256, 2, [law])
    best = model.best_ratio(attention_cards=attention, ffn_cards=ffn)
    around = [model.throughput_per_card(best * factor, attention, ffn) for factor in (0.5, 0.9, 0.95, 1.05, 1.1, 2.0)]
    assert model.throughput_per_card(best, attention, ffn) > max(around)
    assert model.throughput_per_card(best, attention, ffn) == pytest.approx(
        model.throughput(best) * (best + 1) / (best * attention + ffn), rel=1e-12
    )


def test_more_cards_in_an_ffn_instance_ask_for_more_attention_instances() -> None:
    model = CycleModel(PassLatency((0.0, 1.0), (0.25, 100.0), (0.0, 1.0)), 16, 2, [constant_load(0.0)])
    assert model.best_ratio() == pytest.approx(5, rel=2e-3)  # r_peak = sqrt(100 / (0.25 * 16)), the published optimum
    assert model.best_ratio(attention_cards=4, ffn_cards=36) == pytest.approx(15, rel=2e-3)
    assert (model.best_ratio(high=3.0), model.best_ratio(low=8.0)) == (3.0, 8.0)  # where the search begins and ends


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_quadrature_converges(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    values = np.sort(rng.gamma(30.0, 5000.0, 4000))
    law = LoadLaw(values, (np.arange(4000) + 0.5) / 4000, float(values.mean()))
    step = PassLatency((0.00165, 50), (0.083, 100), (0.022, 20))
    coarse = CycleModel(step, 256, microbatches, [law]).step_time(9.0)
    monkeypatch.setattr("twin.theory.cycle.NODES", 200_000)
    fine = CycleModel(step, 256, microbatches, [law]).step_time(9.0)
    assert coarse == pytest.approx(fine, rel=3e-4)
