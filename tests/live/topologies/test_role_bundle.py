"""A live bundle beside the simulation of its roles: given the recorded work, times and decisions are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from latency_models.stages import MessageLink  # noqa: E402
from live.topologies.bundle.coordinator import BundleLayout  # noqa: E402
from live.topologies.direct_time import DirectTime  # noqa: E402
from live.validation.bundle import BundleRun, MeasuredBundle, run_in_turns  # noqa: E402
from schedulers.bundle_slots import REFILL_POLICIES  # noqa: E402
from tests.live.topologies.answers import BLOCK, CONFIGS, local_bundle, make_decoder, requests, settings  # noqa: E402
from twin.afd.bundle import Supply  # noqa: E402
from twin.afd.role_bundle import MessageSizes, RoleBundle, RoleBundleConfig  # noqa: E402
from twin.afd.role_times import RecordedWork  # noqa: E402

LINK = MessageLink(latency=1e-4, bandwidth=1e8, overhead=1e-5)


def supply(x: int, microbatches: int, completions: int, seed: int = 0) -> Supply:
    rng, slots = np.random.default_rng(seed), 2 * x * microbatches
    count = completions + slots
    return Supply(rng.integers(1, 30, count), rng.integers(1, 9, count), None, completions)


def measured(x: int, microbatches: int, load: Supply, refill: str = "fcfs") -> MeasuredBundle:
    layout = BundleLayout(x, 1, microbatches, settings(2))
    return MeasuredBundle(
        layout, make_decoder("llama"), load.prefill, load.decode, load.completions or 0,
        time=DirectTime(LINK), refill=refill, prefilled=True,
    )  # fmt: skip


def simulated(x: int, microbatches: int, load: Supply, run: BundleRun, refill: str = "fcfs") -> RoleBundle:
    shape = CONFIGS["llama"].shape
    config = RoleBundleConfig(
        x, 2, shape.layers, MessageSizes(4 * shape.hidden, BLOCK), BLOCK, microbatches, LINK,
        REFILL_POLICIES.select(refill),
    )  # fmt: skip
    return RoleBundle(config, load, RecordedWork(run.work))


@pytest.mark.parametrize(
    ("x", "microbatches", "refill"), [(1, 1, "fcfs"), (1, 2, "fcfs"), (3, 2, "least_loaded"), (4, 3, "fcfs")]
)
def test_recorded_work_gives_the_measured_times(x: int, microbatches: int, refill: str) -> None:
    load = supply(x, microbatches, completions=20)
    (run,) = run_in_turns([measured(x, microbatches, load, refill)])
    records = simulated(x, microbatches, load, run, refill).run()
    times = run.times
    assert records.finished[:20] == times.ids.tolist()
    np.testing.assert_allclose(np.array(records.finish)[times.ids], times.finish, rtol=1e-12)
    np.testing.assert_allclose(np.array(records.first_token)[times.ids], times.first_token, rtol=1e-12)
    assert [end for end, _ in records.steps] == pytest.approx(times.step_ends.tolist(), rel=1e-12)
    assert [tokens for _, tokens in records.steps] == times.step_tokens.tolist()
    assert times.tokens.tolist() == load.decode[times.ids].tolist()
    # The last turn may be counted on one side only.
    sent, recorded = times.attention_to_ffn, records.attention_to_ffn
    assert abs(sent.messages - recorded.messages) <= x * microbatches
    assert recorded.size / recorded.messages == pytest.approx(sent.size / sent.messages) == 2 * 4 * 16


def test_bundles_that_take_turns_do_the_same_as_alone() -> None:
    """The second ends with the first, in the middle of its own run."""
    loads = [supply(2, 2, 12), supply(2, 2, 60, seed=1)]
    runs = run_in_turns([measured(2, 2, load) for load in loads])
    ended = len(runs[1].times.ids)
    assert len(runs[0].times.ids) == 12
    assert 0 < ended < 60
    for load, run in zip(loads, runs, strict=True):
        (single,) = run_in_turns([measured(2, 2, load)])
        assert run.times.ids.tolist() == single.times.ids.tolist()[: len(run.times.ids)]
        records = simulated(2, 2, replace(load, completions=len(run.times.ids)), run).run()
        np.testing.assert_allclose(np.array(records.finish)[run.times.ids], run.times.finish, rtol=1e-12)


def test_too_few_requests_to_keep_slots_full() -> None:
    load = supply(1, 2, completions=20)
    (run,) = run_in_turns([measured(1, 2, load)])
    short = Supply(load.prefill[:3], load.decode[:3])
    with pytest.raises(ValueError, match="expected enough requests to keep all slots full, found 3"):
        simulated(1, 2, short, run).run()


def test_work_that_was_not_recorded() -> None:
    load = supply(1, 1, completions=8)
    with pytest.raises(ValueError, match=r"rank 1: attention\.begin was not recorded"):
        RoleBundle(RoleBundleConfig(1, 2, 2, MessageSizes(64)), load, RecordedWork({0: [1e-3] * 9, 1: [], 2: []})).run()


def test_a_large_bundle_stops_with_all_its_requests() -> None:
    """Ids to abort go to each worker, those of all instances together."""
    bundle = local_bundle(BundleLayout(8, 1, 1, settings(2)), make_decoder("llama"))
    generations = requests(16)
    for generation in generations:
        bundle.submit(generation)
    bundle.front.stop()
    bundle.run()
    assert bundle.network.ended
