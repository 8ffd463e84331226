"""A bundle gives what one engine gives, and decides what the twin's bundle decides."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from kernels.sampling import SamplingParams  # noqa: E402
from latency_models.pass_latency import PassLatency  # noqa: E402
from live.engine import Progress  # noqa: E402
from live.topologies.bundle.layout import ROWS, BundleLayout  # noqa: E402
from live.topologies.bundle.local_bundle import LocalBundle  # noqa: E402
from live.topologies.local import LocalNetwork  # noqa: E402
from live.topologies.transport import Message, TransportError  # noqa: E402
from schedulers.bundle_slots import REFILL_POLICIES, BundleSlots, Microbatch  # noqa: E402
from tests.live.topologies.answers import (  # noqa: E402
    CONFIGS,
    check_logprobs,
    colocated,
    make_decoder,
    requests,
    settings,
    wanting_logprobs,
)
from twin.afd.bundle import Bundle, BundleConfig, Supply  # noqa: E402

Decision = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]

SHAPES = [(1, 1, 1), (1, 1, 2), (2, 1, 2), (3, 1, 3), (8, 1, 2), (5, 2, 2), (2, 3, 3)]


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(("attention", "ffn", "microbatches"), SHAPES)
def test_tokens_are_those_of_one_engine(model: str, attention: int, ffn: int, microbatches: int) -> None:
    decoder = make_decoder(model)
    bundle = LocalBundle(BundleLayout(attention, ffn, microbatches, settings(2)), decoder)
    generations = requests(30)
    for generation in generations[:20]:
        bundle.submit(generation)
    bundle.run()
    for generation in generations[20:]:
        bundle.submit(generation)
    bundle.run()
    assert [each.output for each in generations] == colocated(decoder, generations)
    assert {each.finish_reason for each in generations} == {"length"}
    bundle.stop()
    assert bundle.network.ended


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(("attention", "ffn"), [(1, 1), (3, 1), (2, 3)])
def test_padded_stages_give_the_same_tokens(model: str, attention: int, ffn: int) -> None:
    """The stages that become CUDA graphs on a GPU run kernel by kernel here."""
    decoder = make_decoder(model)
    layout = BundleLayout(attention, ffn, 2, settings(11, num_gpu_blocks=300))
    bundle = LocalBundle(layout, decoder, graphs=True)
    generations = requests(40)
    for generation in generations:
        bundle.submit(generation)
    bundle.run()
    assert [each.output for each in generations] == colocated(decoder, generations)


@pytest.mark.parametrize("packed", [False, True])
def test_log_probabilities_are_those_of_one_engine(packed: bool) -> None:
    decoder = make_decoder("qwen3")
    config = settings(4, num_gpu_blocks=16, max_num_batched_tokens=5)
    bundle = LocalBundle(BundleLayout(2, 1, 2, config), decoder, packed=packed)
    generations = requests(24, seed=6)
    wanting_logprobs(generations)
    for generation in generations:
        bundle.submit(generation)
    bundle.run()
    check_logprobs(decoder, generations)


TIGHT = {
    "preemption": settings(4, num_gpu_blocks=16),
    "chunked prompts": settings(4, max_num_batched_tokens=5),
    "nothing shared": settings(4, enable_prefix_caching=False),
}


@pytest.mark.parametrize("case", TIGHT)
def test_tokens_do_not_depend_on_how_a_microbatch_is_scheduled(case: str) -> None:
    decoder = make_decoder("qwen3")
    bundle = LocalBundle(BundleLayout(2, 1, 2, TIGHT[case]), decoder)
    generations = requests(40, seed=5)
    for generation in generations:
        bundle.submit(generation)
    bundle.run()
    assert [each.output for each in generations] == colocated(decoder, generations)
    cores = [engine.core for worker in bundle.attention for engine in worker.engines]
    for core in cores:
        core.check_integrity()
        assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks
    assert (sum(core.preemptions for core in cores) > 0) == (case == "preemption")
    assert sum(bundle.coordinator.preemptions.values()) == sum(core.preemptions for core in cores)
    assert (sum(core.cached_tokens for core in cores) > 0) == (case != "nothing shared")


def test_what_a_seed_draws_does_not_depend_on_the_bundle() -> None:
    decoder = make_decoder("llama")
    bundle = LocalBundle(BundleLayout(3, 1, 2, settings(2)), decoder)
    generations = requests(
        20, sampling=SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 9)
    )
    for generation in generations:
        bundle.submit(generation)
    bundle.run()
    assert [each.output for each in generations] == colocated(decoder, generations)


def test_aborts_and_stop_checks_free_their_slots() -> None:
    decoder = make_decoder("llama")
    generations = requests(24, seed=8)
    whole = colocated(decoder, generations)
    ended: list[int] = []

    def note(progress: Progress) -> None:
        ended.extend(each.request.id for each in progress.finished)
        for request_id in (3, 22):  # one that runs from the start, and one that waits
            bundle.coordinator.abort(request_id)

    bundle = LocalBundle(BundleLayout(2, 1, 2, settings(2)), decoder, on_progress=note)
    for each, output in zip(generations, whole, strict=True):
        if each.request.id == 5:
            each.stop_check = lambda token, last=output[3]: token == last  # type: ignore[misc]
        bundle.submit(each)
    bundle.run()
    for each, output in zip(generations, whole, strict=True):
        if each.request.id in (3, 22):
            assert each.finish_reason == "abort"
            assert each.output == output[: len(each.output)]
            assert len(each.output) < len(output)
        elif each.request.id == 5:
            assert (each.output, each.finish_reason) == (output[: output.index(output[3]) + 1], "stop")
        else:
            assert each.output == output
    assert sorted([*ended, 3, 22]) == list(range(24))
    bundle.coordinator.slots.check_integrity()
    assert bundle.coordinator.state()[:3] == (0, 0, 0.0)
    for engine in (engine for worker in bundle.attention for engine in worker.engines):
        assert not engine.core.sequences
        assert engine.core.kv_cache.num_free_blocks == engine.core.kv_cache.num_blocks


def test_a_stop_ends_a_bundle_that_runs_and_another_changes_nothing() -> None:
    stopped: list[int] = []

    def stop(progress: Progress) -> None:
        stopped.append(1)
        bundle.coordinator.stop()

    bundle = LocalBundle(BundleLayout(2, 2, 2, settings(2)), make_decoder("llama"), on_progress=stop)
    generations = requests(12)
    for generation in generations:
        bundle.submit(generation)
    bundle.run()
    assert len(stopped) <= 4
    assert bundle.network.ended
    bundle.stop()
    assert all(each.finish_reason for each in generations)


def test_messages_have_their_form() -> None:
    layout = BundleLayout(1, 1, 1, settings(2))
    decoder = make_decoder("llama")
    network = LocalNetwork(layout.forms(decoder.config, torch.float32))
    rows = torch.zeros(65, 16)
    for message, said in (
        (Message(99), "expected one of"),
        (Message(ROWS, (0,), (rows[:1],)), "expected (2, 1) fields and tensors"),
        (Message(ROWS, (0, 0), (rows,)), "expected up to 64 rows of [16] torch.float32, found [65, 16]"),
        (Message(ROWS, (0, 0), (rows[:1].double(),)), "found [1, 16] torch.float64"),
    ):
        with pytest.raises(TransportError, match=re.escape(said)):
            network.transport(1).send(2, message)


@pytest.mark.parametrize("policy", REFILL_POLICIES)
def test_slots_are_given_as_in_the_twin(policy: str) -> None:
    """Requests that are all there from the start, each with as many tokens as the live bundle generated for it."""
    generations = requests(40, seed=11)
    refill = REFILL_POLICIES[policy]
    bundle = LocalBundle(BundleLayout(3, 1, 2, settings(2)), make_decoder("llama"), refill=refill)
    live: list[Decision] = []
    bundle.coordinator.slots = NotedSlots(bundle.coordinator.slots, live)  # type: ignore[assignment]
    for generation in generations:
        bundle.submit(generation)
    bundle.run()

    latency = PassLatency((0.001, 1.0), (0.001, 1.0), (0.0, 0.01))
    prompts, answers = (
        [each.request.prompt_tokens for each in generations],
        [len(each.output) for each in generations],
    )
    simulated = Bundle(BundleConfig(3, 1, 2, latency, microbatches=2, refill=refill), Supply.of(prompts, answers))
    predicted: list[Decision] = []
    simulated.slots = NotedSlots(simulated.slots, predicted)  # type: ignore[assignment]
    simulated.run()
    assert len(live) > 20
    assert live[: len(predicted)] == predicted


class NotedSlots:
    """Slots that note each step that begins: microbatch, step, admitted ids, their instances, all loads."""

    def __init__(self, slots: BundleSlots, found: list[Decision]) -> None:
        self._slots, self._found = slots, found

    def begin_step(self, index: int) -> Microbatch | None:
        microbatch = self._slots.begin_step(index)
        if microbatch is not None:
            admitted, resident = tuple(microbatch.admitted), microbatch.resident
            instances = tuple(resident[each][0] for each in admitted)
            self._found.append((index, microbatch.step, admitted, instances, tuple(microbatch.loads)))
        return microbatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)
