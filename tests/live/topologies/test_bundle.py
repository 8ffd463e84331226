"""A bundle gives what one engine gives, and decides what the twin's bundle decides."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.sampling import SamplingParams
from latency_models.stages import MessageLink, PassLatency
from live.engine import Progress
from live.topologies.bundle.coordinator import ROWS, BundleLayout
from live.topologies.direct_time import DirectTime
from live.topologies.local import LocalNetwork
from live.topologies.transport import Message, TransportError
from live.validation.bundle import BundleRun, MeasuredBundle, run_in_turns
from schedulers.bundle_slots import REFILL_POLICIES, BundleSlots, Microbatch
from tests.live.topologies.answers import (
    BLOCK,
    CONFIGS,
    GREEDY,
    check_idle,
    check_logprobs,
    check_served,
    colocated,
    local_bundle,
    make_decoder,
    outputs,
    requests,
    serve,
    settings,
)
from twin.afd.bundle import Bundle, BundleConfig, Supply
from twin.afd.role_bundle import MessageSizes, RoleBundle, RoleBundleConfig
from twin.afd.role_times import RecordedWork

Decision = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


DRAWN = SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 9)


@pytest.mark.parametrize(("model", "instances", "graphs", "sampling"), [
    ("qwen3", (1, 1, 1), False, GREEDY), ("llama", (1, 1, 2), False, GREEDY), ("qwen3", (8, 1, 2), False, GREEDY),
    ("llama", (3, 1, 3), False, GREEDY), ("qwen3-moe", (2, 3, 3), False, GREEDY), ("llama", (3, 1, 2), False, DRAWN),
    ("llama", (1, 1, 2), True, GREEDY), ("qwen3", (3, 1, 2), True, GREEDY), ("qwen3-moe", (2, 3, 2), True, GREEDY),
])  # fmt: skip
def test_tokens_are_those_of_one_engine(
    model: str, instances: tuple[int, int, int], graphs: bool, sampling: SamplingParams
) -> None:
    """Stages that become CUDA graphs on a GPU run padded and kernel by kernel here."""
    decoder, config = make_decoder(model), settings(11, num_gpu_blocks=300) if graphs else settings(2)
    bundle = local_bundle(BundleLayout(*instances, config), decoder, graphs=graphs)
    generations = requests(30, sampling=sampling)
    check_served(bundle, decoder, generations[:20])
    check_served(bundle, decoder, generations[20:])
    assert {generation.finish_reason for generation in generations} == {"length"}
    bundle.stop()
    assert bundle.network.ended


@pytest.mark.parametrize("packed", [False, True])
def test_log_probabilities_are_those_of_one_engine(packed: bool) -> None:
    decoder = make_decoder("qwen3")
    config = settings(4, num_gpu_blocks=16, max_num_batched_tokens=5)
    check_logprobs(local_bundle(BundleLayout(2, 1, 2, config), decoder, packed=packed), decoder)


TIGHT = {
    "preemption": settings(4, num_gpu_blocks=16),
    "chunked prompts": settings(4, max_num_batched_tokens=5),
    "nothing shared": settings(4, enable_prefix_caching=False),
}


@pytest.mark.parametrize("case", TIGHT)
def test_tokens_do_not_depend_on_how_a_microbatch_is_scheduled(case: str) -> None:
    decoder = make_decoder("qwen3")
    bundle = local_bundle(BundleLayout(2, 1, 2, TIGHT[case]), decoder)
    check_served(bundle, decoder, requests(40, seed=5))
    cores = [engine.core for worker in bundle.workers[:2] for engine in worker.engines]
    for core in cores:
        check_idle(core)
    assert (sum(core.preemptions for core in cores) > 0) == (case == "preemption")
    assert sum(bundle.front.preemptions.values()) == sum(core.preemptions for core in cores)
    assert (sum(core.cached_tokens for core in cores) > 0) == (case != "nothing shared")


def test_aborts_and_stop_checks_free_their_slots() -> None:
    decoder = make_decoder("llama")
    generations = requests(24, seed=8)
    expected = colocated(decoder, generations)
    finished: list[int] = []

    def note(progress: Progress) -> None:
        finished.extend(generation.request.id for generation in progress.finished)
        for request_id in (3, 22):  # one that runs from the start, and one that waits
            bundle.front.abort(request_id)

    bundle = local_bundle(BundleLayout(2, 1, 2, settings(2)), decoder, on_progress=note)
    last = expected[5][3]
    generations[5].stop_check = lambda token: token == last
    expected[5] = expected[5][: expected[5].index(last) + 1]
    serve(bundle, generations)
    assert generations[5].finish_reason == "stop"
    for i in (3, 22):
        assert generations[i].finish_reason == "abort"
        assert len(generations[i].output) < len(expected[i])
        expected[i] = expected[i][: len(generations[i].output)]
    assert outputs(generations) == expected
    assert sorted([*finished, 3, 22]) == list(range(24))
    bundle.front.slots.check_integrity()
    assert bundle.front.state()[:3] == (0, 0, 0.0)
    for engine in (engine for worker in bundle.workers[:2] for engine in worker.engines):
        check_idle(engine.core)


def test_a_stop_ends_a_bundle_that_runs_and_another_changes_nothing() -> None:
    stopped: list[int] = []

    def stop(progress: Progress) -> None:
        stopped.append(1)
        bundle.front.stop()

    bundle = local_bundle(BundleLayout(2, 2, 2, settings(2)), make_decoder("llama"), on_progress=stop)
    generations = requests(12)
    serve(bundle, generations)
    assert len(stopped) <= 4
    assert bundle.network.ended
    bundle.stop()
    assert all(generation.finish_reason for generation in generations)


def test_messages_have_their_form() -> None:
    layout = BundleLayout(1, 1, 1, settings(2))
    decoder = make_decoder("llama")
    network = LocalNetwork(layout.forms(decoder.config, torch.float32))
    rows = torch.zeros(65, 16)
    for message, line in (
        (Message(99), "expected one of"),
        (Message(ROWS, (0,), (rows[:1],)), "expected (2, 1) fields and tensors"),
        (Message(ROWS, (0, 0), (rows,)), "expected up to 64 rows of [16] torch.float32, found [65, 16]"),
        (Message(ROWS, (0, 0), (rows[:1].double(),)), "found [1, 16] torch.float64"),
    ):
        with pytest.raises(TransportError, match=re.escape(line)):
            network.transport(1).send(2, message)


@pytest.mark.parametrize("policy", REFILL_POLICIES)
def test_slots_are_given_as_in_the_twin(policy: str) -> None:
    """Requests that are all there from the start, each with as many tokens as the live bundle generated for it."""
    generations = requests(40, seed=11)
    refill = REFILL_POLICIES[policy]
    bundle = local_bundle(BundleLayout(3, 1, 2, settings(2)), make_decoder("llama"), refill=policy)
    live: list[Decision] = []
    bundle.front.slots = NotedSlots(bundle.front.slots, live)  # type: ignore[assignment]
    serve(bundle, generations)

    latency = PassLatency((0.001, 1.0), (0.001, 1.0), (0.0, 0.01))
    prompts = [len(generation.prompt) for generation in generations]
    answers = [len(generation.output) for generation in generations]
    simulated = Bundle(BundleConfig(3, 1, 2, latency, microbatches=2, refill=refill), Supply.of(prompts, answers))
    predicted: list[Decision] = []
    simulated.slots = NotedSlots(simulated.slots, predicted)  # type: ignore[assignment]
    simulated.run()
    assert len(live) > 20
    assert live[: len(predicted)] == predicted


class NotedSlots:
    """Slots that note each step that begins: microbatch, step, admitted ids, their instances, all loads."""

    def __init__(self, slots: BundleSlots, decisions: list[Decision]) -> None:
        self._slots = slots
        self._decisions = decisions

    def begin_step(self, index: int) -> Microbatch | None:
        microbatch = self._slots.begin_step(index)
        if microbatch is not None:
            admitted, resident = tuple(microbatch.admitted), microbatch.resident
            instances = tuple(resident[request_id][0] for request_id in admitted)
            self._decisions.append((index, microbatch.step, admitted, instances, tuple(microbatch.loads)))
        return microbatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)


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
