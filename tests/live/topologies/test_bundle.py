"""A bundle gives what one engine gives, and decides what the twin's bundle decides."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from kernels.sampling import SamplingParams  # noqa: E402
from latency_models.stages import PassLatency  # noqa: E402
from live.engine import Progress  # noqa: E402
from live.topologies.bundle.coordinator import ROWS, BundleLayout  # noqa: E402
from live.topologies.local import LocalNetwork  # noqa: E402
from live.topologies.transport import Message, TransportError  # noqa: E402
from schedulers.bundle_slots import REFILL_POLICIES, BundleSlots, Microbatch  # noqa: E402
from tests.live.topologies.answers import (  # noqa: E402
    GREEDY,
    check_logprobs,
    check_served,
    colocated,
    local_bundle,
    make_decoder,
    outputs,
    requests,
    serve,
    settings,
    wanting_logprobs,
)
from twin.afd.bundle import Bundle, BundleConfig, Supply  # noqa: E402

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
    bundle = local_bundle(BundleLayout(2, 1, 2, config), decoder, packed=packed)
    generations = requests(24, seed=6)
    wanting_logprobs(generations)
    serve(bundle, generations)
    check_logprobs(decoder, generations)


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
        core.check_integrity()
        assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks
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
        assert not engine.core.sequences
        assert engine.core.kv_cache.num_free_blocks == engine.core.kv_cache.num_blocks


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
