"""Fast-forwarded runs equal step-by-step runs in every record, to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.stages import PassLatency
from schedulers.bundle_slots import REFILL_POLICIES, Advance
from twin.afd.bundle import Bundle, BundleConfig, BundleRecords, Supply

BASELINE = PassLatency((0.00165, 50), (0.083, 100), (0.022, 20))

lines = st.tuples(st.floats(0, 1), st.floats(0.01, 10))
configs = st.builds(
    BundleConfig, attention_instances=st.integers(1, 4), ffn_instances=st.integers(1, 3), batch_size=st.integers(1, 4),
    latency=st.builds(PassLatency, lines, lines, lines), microbatches=st.integers(1, 4), layers=st.integers(1, 3),
    refill=st.sampled_from(list(REFILL_POLICIES.values())), advance=st.sampled_from(["lockstep", "independent"]),
)  # fmt: skip


def both(config: BundleConfig, supply: Supply) -> tuple[BundleRecords, BundleRecords]:
    fast = Bundle(replace(config, fast_forward=True), supply).run()
    walked = Bundle(replace(config, fast_forward=False), supply).run()
    return fast, walked


@given(
    configs,
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=50),
    st.booleans(),
    st.data(),
)
def test_equal_records(
    config: BundleConfig, requests: list[tuple[int, int]], closed: bool, data: st.DataObject
) -> None:
    prefill, decode = [list(column) for column in zip(*requests, strict=True)]
    gaps = [0.0] * len(requests)
    if not closed:
        gaps = data.draw(st.lists(st.floats(0, 30), min_size=len(requests), max_size=len(requests)))
    completions = data.draw(st.integers(1, len(requests)))
    supply = Supply.of(prefill, decode, None if closed else np.cumsum(gaps).tolist(), completions)
    fast, walked = both(config, supply)
    assert fast.steps == walked.steps
    assert fast.seated == walked.seated
    assert fast.full_until == walked.full_until


@pytest.mark.parametrize("advance", ["lockstep", "independent"])
@pytest.mark.parametrize("layers", [1, 4])
def test_equal_records_at_the_paper_s_scale(layers: int, advance: Advance) -> None:
    rng = np.random.default_rng(3)
    supply = Supply.of(rng.geometric(0.05, 1500).tolist(), rng.geometric(0.02, 1500).tolist())
    config = BundleConfig(5, 2, 32, BASELINE, microbatches=3, layers=layers, advance=advance)
    fast, walked = both(config, supply)
    assert fast == walked
    assert len(fast.steps) > 300
