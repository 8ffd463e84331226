"""Prefill and decode apart, and shared decode pools: the tokens are those of one engine, or of its modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from random import Random

import pytest
import torch

from latency_models.stages import MessageLink
from live.engine import Progress
from live.executor import AsyncModelRunnerOutput
from live.generation import Generation, make_generation
from live.models.decoder import Decoder, Inputs, PagedCache
from live.topologies.direct_time import DirectTime
from live.topologies.local import LocalTopology
from live.topologies.pools.layout import BLOCKS, FRONT, GIVEN_UP, LAST, MORE, EnginePlace, PoolsLayout
from live.topologies.transport import Message
from schedulers.batches import Batch
from schedulers.engine_config import KVOffloading, OneShotBudget, TierConfig
from schedulers.routing import ROUTERS
from tests.live.topologies.answers import (
    BLOCK,
    check_idle,
    check_logprobs,
    check_served,
    colocated,
    layout,
    local_pools,
    make_decoder,
    outputs,
    pools_of,
    requests,
    serve,
    settings,
)


def check_empty(pools: LocalTopology) -> None:
    """No engine has requests or blocks left, and none waits for a message about one."""
    for worker in pools.workers:
        core = worker.engine.core
        check_idle(core)
        assert not core.awaiting_transfer
        assert not worker.engine.core.reserved
        assert not worker._arrivals._coming
        assert not worker._departures._held
    assert all(engine.load == 0 and not engine.requests for engine in pools.front.engines.values())
    assert not pools.front._moving
    assert not pools.front._asked


def check_aborted(pools: LocalTopology, generations: list[Generation], expected: list[list[int]]) -> None:
    """Some requests were aborted, with the first tokens of their outputs; the other outputs are whole."""
    aborted = sum(generation.finish_reason == "abort" for generation in generations)
    assert 5 < aborted < min(55, len(generations))
    for generation, output in zip(generations, expected, strict=True):
        assert generation.output == output[: len(generation.output)]
        assert generation.finish_reason == "abort" or generation.output == output
    check_empty(pools)


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "graphs"),
    [
        ("llama", 1, 1, False), ("qwen3", 2, 1, False), ("qwen3-moe", 1, 3, False), ("llama", 3, 0, False),
        ("qwen3-moe", 2, 1, True), ("qwen3", 2, 0, True),
    ],
)  # fmt: skip
def test_tokens_are_those_of_one_engine(model: str, prefill: int, decode: int, graphs: bool) -> None:
    decoder = make_decoder(model)
    pools = local_pools(layout(prefill, decode, settings(4)), decoder, graphs=graphs)
    generations = requests(30)
    check_served(pools, decoder, generations[:20])
    check_served(pools, decoder, generations[20:])
    assert {generation.finish_reason for generation in generations} == {"length"}
    check_empty(pools)
    pools.stop()
    assert pools.network.ended


TIGHT = {
    "chunked prompts": (settings(4, max_num_batched_tokens=5), settings(4)),
    "preemption in decode": (settings(4), settings(4, num_gpu_blocks=16)),
    "one-shot work": (settings(4, one_shot=OneShotBudget(64, 4)), settings(4)),
    "prefixes kept when computed": (
        settings(4, cache_blocks_on="computed", in_batch_prefix_caching=True), settings(4, kv_reservation="max_tokens")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TIGHT)
def test_tokens_do_not_depend_on_the_engines_schedules(case: str) -> None:
    decoder = make_decoder("qwen3")
    pools = local_pools(layout(2, 2, *TIGHT[case]), decoder)
    check_served(pools, decoder, requests(24, seed=5))
    check_empty(pools)
    cores = [worker.engine.core for worker in pools.workers]
    assert (sum(core.preemptions for core in cores) > 0) == (case == "preemption in decode")
    assert sum(core.cached_tokens for core in cores[:2]) > 0
    assert all(core.prefill_tokens == 0 for core in cores[2:]) == (case != "preemption in decode")


@pytest.mark.parametrize("routing", ROUTERS)
def test_every_router_uses_every_engine(routing: str) -> None:
    decoder = make_decoder("llama")
    pools = local_pools(layout(2, 3, settings(4), routing=routing), decoder)
    check_served(pools, decoder, requests(20, seed=2))
    assert all(worker.engine.core.step_index > 0 for worker in pools.workers)
    check_empty(pools)


def conversations(count: int, turns: int) -> list[list[Generation]]:
    """The turns of `count` conversations: each prompt repeats the one before it and adds some tokens."""
    generator = torch.Generator().manual_seed(4)
    sessions = []
    for session in range(count):
        tokens = torch.randint(50, (turns, 2 * BLOCK), generator=generator).flatten().tolist()
        prompts = [tokens[: 2 * BLOCK * (turn + 1)] for turn in range(turns)]
        ids = enumerate(prompts, session * turns)
        sessions.append([make_generation(i, prompt, 3, block_size=BLOCK) for i, prompt in ids])
    return sessions


def test_a_router_sees_what_is_in_host_memory() -> None:
    """Devices that hold two conversations of five: the others come back from the host tiers of their engines."""
    decoder, tier = make_decoder("llama"), KVOffloading((TierConfig("host", 500),))
    config = settings(4, num_gpu_blocks=14, kv_offloading=tier)
    pools = local_pools(layout(2, 0, config, routing="prefix_aware"), decoder)
    sessions = conversations(5, turns=4)
    for turn in zip(*sessions, strict=True):
        for generation in turn:
            pools.submit(generation)
            pools.run()
    generations = [generation for turns in sessions for generation in turns]
    assert outputs(generations) == colocated(decoder, generations)
    check_empty(pools)
    cores = [worker.engine.core for worker in pools.workers]
    assert sum(core.cached_tokens for core in cores) == 5 * sum(2 * BLOCK * turn for turn in range(1, 4))
    assert sum(core.kv_tiers.tiers[0].loaded for core in cores if core.kv_tiers is not None) > 10
    for core, routed in zip(cores, pools.front.engines.values(), strict=True):
        for generation in generations:
            request = generation.request
            assert routed.cached_prefix_tokens(request) == core.cached_prefix_tokens(request)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 0), (2, 1)])
def test_prefix_aware_routing_keeps_conversations_where_their_caches_are(
    prefill: int, decode: int, packed: bool
) -> None:
    decoder, cached = make_decoder("llama"), {}
    for routing in ("round_robin", "prefix_aware"):
        config = settings(4, num_gpu_blocks=200)
        pools = local_pools(layout(prefill, decode, config, routing=routing), decoder, packed=packed)
        sessions = conversations(5, turns=4)  # an odd number, so that turns in turn change engines
        generations = [generation for turn in zip(*sessions, strict=True) for generation in turn]
        for turn in zip(*sessions, strict=True):
            serve(pools, turn)
        assert outputs(generations) == colocated(decoder, generations)
        check_empty(pools)
        workers = pools.workers[:prefill]
        cached[routing] = sum(worker.engine.core.cached_tokens for worker in workers)
        for worker, routed in zip(workers, pools.front.engines.values(), strict=False):
            cached_there = [worker.engine.core.cached_prefix_tokens(generation.request) for generation in generations]
            reported = [routed.cached_prefix_tokens(generation.request) for generation in generations]
            assert reported == (cached_there if routing == "prefix_aware" else [0] * len(generations))
            assert max(cached_there) > 0
    assert cached["prefix_aware"] == 5 * sum(2 * BLOCK * turn for turn in range(1, 4))
    assert cached["round_robin"] < 0.7 * cached["prefix_aware"]


def test_events_that_take_long_leave_the_router_ignorant() -> None:
    decoder = make_decoder("llama")
    stale = layout(2, 0, settings(4, num_gpu_blocks=200), routing="prefix_aware", kv_event_delay=1e9)
    pools = local_pools(stale, decoder)
    for turn in zip(*conversations(5, turns=2), strict=True):
        serve(pools, turn)
        assert all(routed.cached_prefix_tokens(turn[0].request) == 0 for routed in pools.front.engines.values())


def test_aborts_at_any_moment_free_everything() -> None:
    decoder = make_decoder("llama")
    generations = requests(40, seed=8)
    expected = colocated(decoder, generations)
    states: list[int] = []

    def note(progress: Progress) -> None:
        states.append(len(progress.advanced))
        if len(states) % 2:
            pools.front.abort(len(states) % 40)
        for generation in progress.advanced[:1]:
            if generation.request.id % 5 == 0:
                pools.front.abort(generation.request.id)

    pools = local_pools(layout(2, 2, settings(3)), decoder, on_progress=note)
    serve(pools, generations)
    check_aborted(pools, generations, expected)


def test_a_stop_check_ends_an_output_on_either_side() -> None:
    decoder = make_decoder("llama")
    generations = requests(10, seed=3)
    expected = colocated(decoder, generations)
    for i, (generation, output) in enumerate(zip(generations, expected, strict=True)):
        last = output[0] if i % 2 else output[len(output) // 2]
        generation.stop_check = lambda token, last=last: token == last  # type: ignore[misc]
        expected[i] = output[: output.index(last) + 1]
    pools = local_pools(layout(1, 1, settings(4)), decoder)
    serve(pools, generations)
    assert outputs(generations) == expected
    assert {generation.finish_reason for generation in generations} == {"stop"}
    check_empty(pools)


@pytest.mark.parametrize("packed", [False, True])
def test_log_probabilities_are_those_of_one_engine(packed: bool) -> None:
    decoder = make_decoder("qwen3")
    places = layout(2, 2, settings(4), settings(4, num_gpu_blocks=16))
    check_logprobs(local_pools(places, decoder, packed=packed), decoder)


# -- caches that leave with chunks -----------------------------------------------------------------------------------


class Ticking(LocalTopology):
    """Pools by direct execution in which a step takes a second for each token, and nothing else takes time.

    Attributes:
        states: by request id, the states (`MORE`, …) of messages with blocks, in the order of sending.
        steps: end of every step of each worker, seconds.
    """

    def __init__(self, places: PoolsLayout, decoder: Decoder, link: MessageLink, *, packed: bool = False) -> None:
        self._seconds = 0.0
        time = DirectTime(link, cpu=lambda: self._seconds, one_at_a_time=True)
        super().__init__(pools_of(places, decoder), timekeeper=time, packed=packed)
        self.states: dict[int, list[int]] = {}
        self._post = self.network.post
        self.network.post = self._counted  # type: ignore[method-assign]
        self.steps: list[list[float]] = []
        for worker in self.workers:
            executor, ends = worker.engine.executor, list[float]()
            executor.launch = partial(self._launched, executor.launch)  # type: ignore[method-assign]
            worker.engine.watch = lambda batch, begin, end, ends=ends: ends.append(end)  # type: ignore[misc]
            self.steps.append(ends)

    def _launched(self, launch: Callable[[Batch], AsyncModelRunnerOutput], batch: Batch) -> AsyncModelRunnerOutput:
        output = launch(batch)
        self._seconds += batch.tokens
        return output

    def _counted(self, source: int, destination: int, message: Message) -> None:
        if message.kind == BLOCKS:
            self.states.setdefault(message.fields[0], []).append(message.fields[1])
        self._post(source, destination, message)


BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 8 * 4
"""Bytes of a block of the tiny Llama."""


class BlockLink(MessageLink):
    """A link that only blocks take time on, besides its latency."""

    def __init__(self, seconds_a_block: float, latency: float = 0.0) -> None:
        super().__init__(latency, BLOCK_BYTES / seconds_a_block)

    def seconds(self, size: int) -> float:
        """See `MessageLink.seconds`."""
        return super().seconds(size // BLOCK_BYTES * BLOCK_BYTES)


LINK = BlockLink(2.0, latency=0.01)


WITH_CHUNKS = {
    "one to one": (1, 1, {}, {}),
    "two to two": (2, 2, {}, {}),
    "preemption in decode": (1, 1, {}, {"num_gpu_blocks": 16}),
    "few slots": (2, 1, {}, {"max_num_seqs": 2}),
    "whole outputs reserved": (2, 2, {}, {"kv_reservation": "max_tokens", "num_gpu_blocks": 20}),
    "prefixes kept when computed": (2, 1, {"cache_blocks_on": "computed", "in_batch_prefix_caching": True}, {}),
}


@pytest.mark.parametrize(("case", "packed"), [*((case, False) for case in WITH_CHUNKS), ("two to two", True)])
def test_caches_that_leave_with_chunks_give_the_same_tokens(case: str, packed: bool) -> None:
    prefill, decode, first, second = WITH_CHUNKS[case]
    decoder = make_decoder("qwen3")
    engines = settings(4, **{"max_num_batched_tokens": 6, **first}), settings(4, **second)
    places = layout(prefill, decode, *engines, with_chunks=True)
    pools = Ticking(places, decoder, LINK, packed=packed)
    check_served(pools, decoder, requests(40, seed=5))
    check_empty(pools)
    assert all(states == [MORE] * (len(states) - 1) + [LAST] for states in pools.states.values())
    assert sum(len(states) > 1 for states in pools.states.values()) > 3
    cores = [worker.engine.core for worker in pools.workers]
    assert any(core.preemptions for core in cores) == case.startswith("preemption")
    pools.stop()
    assert pools.network.ended


def test_without_a_slot_or_blocks_a_cache_leaves_when_it_is_complete() -> None:
    """A decode engine for one sequence: while it decodes, nothing is reserved there."""
    decoder = make_decoder("llama")
    places = layout(1, 1, settings(4, max_num_batched_tokens=4), settings(1), with_chunks=True)
    pools = Ticking(places, decoder, LINK)
    first, second = (make_generation(i, [7] * 16, tokens, block_size=BLOCK) for i, tokens in ((0, 100), (1, 3)))
    pools.submit(first)
    pools.network.wake(FRONT)
    while len(first.output) < 3:
        pools.network.run_some(1)
    pools.submit(second)
    pools.run()
    assert [pools.states[0], pools.states[1]] == [[MORE, MORE, MORE, LAST], [LAST]]
    check_empty(pools)


def test_a_prompt_that_is_preempted_half_sent_sends_the_rest() -> None:
    decoder = make_decoder("llama")
    places = layout(1, 1, settings(4, max_num_batched_tokens=4), with_chunks=True)
    pools = Ticking(places, decoder, LINK)
    generation = make_generation(0, list(range(24)), 5, block_size=BLOCK)
    pools.submit(generation)
    pools.network.wake(FRONT)
    core = pools.workers[0].engine.core
    while pools.states.get(0) != [MORE, MORE]:
        pools.network.run_some(1)
    core.preempt(core.sequences[0])
    pools.run()
    assert core.preemptions == 1
    assert pools.states[0] == [MORE] * 5 + [LAST]
    assert [generation.output] == colocated(decoder, [generation])
    check_empty(pools)


def test_a_question_that_comes_after_the_answer_reserves_nothing() -> None:
    """Between processes, blocks may come before the front's question whether there are some for them."""
    decoder = make_decoder("llama")
    pools = local_pools(layout(1, 1, settings(4), with_chunks=True), decoder)
    core, arrivals = pools.workers[1].engine.core, pools.workers[1]._arrivals
    generation = make_generation(0, [1, 2, 3], 2, block_size=BLOCK)
    arrivals.take(Message(BLOCKS, (0, LAST), (torch.zeros(1, 2, 2, BLOCK, 2, 8),)))
    assert not arrivals.reserve(generation)
    generation.output.append(5)
    arrivals.expect(generation)
    assert [sequence.num_output_tokens for sequence in core.waiting_for_remote_kv] == [1]
    assert not arrivals._coming


@pytest.mark.parametrize("seconds_a_block", [0.5, 4.0, 9.0])
@pytest.mark.parametrize("with_chunks", [False, True])
def test_a_decode_begins_as_a_pipeline_of_two_stages_says(with_chunks: bool, seconds_a_block: float) -> None:
    """Chunk k has been sent at c_k = max(its computation's end, c_k-1) + its transfer; otherwise all follow the last.

    The steps of prefill are of 4 tokens, which is a block, so that links are faster, as fast and slower.
    """
    decoder, prompt = make_decoder("llama"), 22
    places = layout(1, 1, settings(4, max_num_batched_tokens=4), with_chunks=with_chunks)
    pools = Ticking(places, decoder, BlockLink(seconds_a_block))
    pools.submit(make_generation(0, list(range(prompt)), 3, block_size=BLOCK))
    pools.run()
    computed = [*range(4, prompt, 4), prompt]
    sent = 0.0
    for end in computed:
        sent = max(end if with_chunks else prompt, sent) + seconds_a_block
    assert pools.steps == [computed, [sent + 1, sent + 2]]


@pytest.mark.parametrize("seed", range(2))
def test_aborts_in_the_middle_of_partial_transfers_free_everything(seed: int) -> None:
    """Aborts at random moments, of which some meet prompts that are half sent, reserved or asked for."""
    decoder, random = make_decoder("llama"), Random(seed)
    generations = requests(60, seed=8 + seed)
    expected = colocated(decoder, generations)
    config = settings(3, max_num_batched_tokens=4, num_gpu_blocks=24)
    link = BlockLink(random.uniform(0.1, 8.0), latency=random.random())
    pools = Ticking(layout(2, 2, config, with_chunks=True), decoder, link)
    for generation in generations[::4]:  # some end with their first token, of which their engine does not know
        generation.stop_check = lambda token: True
    for i, output in enumerate(expected):
        expected[i] = output[:1] if i % 4 == 0 else output
    for generation in generations[1::8]:  # and some, of which it does
        object.__setattr__(generation, "end_tokens", frozenset(expected[generation.request.id][:1]))
        expected[generation.request.id] = expected[generation.request.id][:1]
    for generation in generations:
        pools.submit(generation)
    pools.network.wake(FRONT)
    while not pools.network.run_some(random.randint(10, 60)):
        pools.front.abort(random.randrange(60))
    pools.run()
    check_aborted(pools, generations, expected)
    assert any(GIVEN_UP in states for states in pools.states.values())
    assert all(states[-1] != MORE for states in pools.states.values())


# -- several models --------------------------------------------------------------------------------------------------

MODELS = ("math", "code", "tools")


@cache
def module(name: str | None) -> Decoder:
    """A prefill module for each model, and the shared decoder."""
    return make_decoder("qwen3", seed=1 if name is None else 10 + MODELS.index(name))


def pools_of_modules(decoders: list[EnginePlace], decoding: dict[str, tuple[int, ...]]) -> LocalTopology:
    """A prefill engine for each model, and these decode engines, of which each model has some."""
    engines = [EnginePlace("prefill", settings(4), name) for name in MODELS] + decoders
    places = PoolsLayout(tuple(engines), {name: (1 + i,) for i, name in enumerate(MODELS)}, decoding)
    return LocalTopology(pools_of(places, module(None), **{name: module(name) for name in MODELS}))


def of_models(count: int) -> list[Generation]:
    """Requests for all models in turn."""
    generations = requests(count, seed=4)
    for i, generation in enumerate(generations):
        object.__setattr__(generation.request, "model", MODELS[i % 3])
    return generations


@torch.inference_mode()
def by_modules(generation: Generation, prefill: Decoder, decode: Decoder) -> list[int]:
    """The greedy tokens of a prompt that one module reads and another continues, alone and without a scheduler (SUN
    eq. 2 and 3).
    """
    config, n = prefill.config, len(generation.prompt)
    table = torch.arange(config.max_position_embeddings // BLOCK, dtype=torch.int32)[None]
    cache = PagedCache.allocate(config, table.shape[1], BLOCK, torch.float32, "cpu")
    none, empty = torch.zeros(0, dtype=torch.int32), torch.zeros((0, 1), dtype=torch.int32)
    places, starts = torch.arange(n), torch.tensor([0, n], dtype=torch.int32)
    prompt = Inputs(torch.from_numpy(generation.prompt), places, places, empty, none, table, starts, none.new_zeros(1))
    state = prefill.forward(prompt, cache)[-1:]
    output = [int(prefill.logits(prefill.normed(state)).argmax())]
    while len(output) < generation.request.max_tokens:
        place = torch.tensor([n + len(output) - 1])
        step = Inputs(
            torch.tensor(output[-1:]), place, place, table, (place + 1).int(), empty, torch.zeros(1).int(), none
        )
        output.append(int(decode.logits(decode.normed(decode.forward(step, cache))).argmax()))
    return output


def test_one_decoder_continues_the_prompts_of_all_models_in_the_same_batches() -> None:
    pools = pools_of_modules([EnginePlace("decode", settings(4))] * 2, dict.fromkeys(MODELS, (4, 5)))
    generations = of_models(36)
    mixed: list[int] = []
    for worker in pools.workers[3:]:
        worker.engine.watch = lambda batch, begin, end: mixed.append(
            len({generations[sequence.request.id].request.model for sequence in batch.decodes})
        )
    serve(pools, generations)
    for generation in generations:
        assert generation.output == by_modules(generation, module(generation.request.model), module(None))
    assert max(mixed) == 3
    check_empty(pools)


def test_isolated_pools_give_what_each_model_gives_alone() -> None:
    decoders = [EnginePlace("decode", settings(4), name) for name in MODELS]
    pools = pools_of_modules(decoders, {name: (4 + i,) for i, name in enumerate(MODELS)})
    generations = of_models(30)
    serve(pools, generations)
    for name in MODELS:
        of_model = [generation for generation in generations if generation.request.model == name]
        assert outputs(of_model) == colocated(module(name), of_model)
    with pytest.raises(ValueError, match="expected one of the models, found poems"):
        pools.submit(replace(generations[0], request=type(generations[0].request)(99, 0.0, 3, 3, "poems")))
