"""Prefill and decode apart, and shared decode pools: the tokens are those of one engine, or of its modules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.engine import Progress  # noqa: E402
from live.generation import Generation, make_generation  # noqa: E402
from live.models.decoder import Decoder, Inputs, PagedCache  # noqa: E402
from live.topologies.pools.layout import EnginePlace, PoolsLayout  # noqa: E402
from live.topologies.pools.local_pools import LocalPools  # noqa: E402
from schedulers.engine_config import EngineConfig, KVOffloading, OneShotBudget, TierConfig  # noqa: E402
from schedulers.routing import ROUTERS  # noqa: E402
from tests.live.topologies.answers import BLOCK, CONFIGS, colocated, make_decoder, requests, settings  # noqa: E402


def layout(
    prefill: int,
    decode: int,
    config: EngineConfig,
    decode_config: EngineConfig | None = None,
    routing: str = "least_loaded",
) -> PoolsLayout:
    """One model on so many prefill and decode engines; without decode engines on engines that do both."""
    role = "prefill" if decode else "both"
    engines = [EnginePlace(role, config)] * prefill + [EnginePlace("decode", decode_config or config)] * decode
    ranks = tuple(range(1, 1 + len(engines)))
    decoding = {"default": ranks[prefill:]} if decode else {}
    return PoolsLayout(tuple(engines), {"default": ranks[:prefill]}, decoding, routing)


def check_empty(pools: LocalPools) -> None:
    """No engine has requests or blocks left."""
    for worker in pools.workers:
        core = worker.engine.core
        core.check_integrity()
        assert not core.sequences
        assert not core.awaiting_transfer
        assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks
    assert all(engine.load == 0 and not engine.requests for engine in pools.frontend.engines.values())


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize(
    ("prefill", "decode", "graphs"),
    [(1, 1, False), (2, 1, False), (1, 3, False), (3, 0, False), (2, 1, True), (2, 0, True)],
)
def test_tokens_are_those_of_one_engine(model: str, prefill: int, decode: int, graphs: bool) -> None:
    decoder = make_decoder(model)
    pools = LocalPools(layout(prefill, decode, settings(4)), lambda module: decoder, graphs=graphs)
    generations = requests(30)
    for generation in generations[:20]:
        pools.submit(generation)
    pools.run()
    for generation in generations[20:]:
        pools.submit(generation)
    pools.run()
    assert [each.output for each in generations] == colocated(decoder, generations)
    assert {each.finish_reason for each in generations} == {"length"}
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
    pools = LocalPools(layout(2, 2, *TIGHT[case]), lambda module: decoder)
    generations = requests(40, seed=5)
    for generation in generations:
        pools.submit(generation)
    pools.run()
    assert [each.output for each in generations] == colocated(decoder, generations)
    check_empty(pools)
    cores = [worker.engine.core for worker in pools.workers]
    assert (sum(core.preemptions for core in cores) > 0) == (case == "preemption in decode")
    assert sum(core.cached_tokens for core in cores[:2]) > 0
    assert all(core.prefill_tokens == 0 for core in cores[2:]) == (case != "preemption in decode")


@pytest.mark.parametrize("routing", ROUTERS)
def test_every_router_uses_every_engine(routing: str) -> None:
    decoder = make_decoder("llama")
    pools = LocalPools(layout(2, 3, settings(4), routing=routing), lambda module: decoder)
    generations = requests(40, seed=2)
    for generation in generations:
        pools.submit(generation)
    pools.run()
    assert [each.output for each in generations] == colocated(decoder, generations)
    assert all(worker.engine.core.step_index > 0 for worker in pools.workers)
    check_empty(pools)


def conversations(count: int, turns: int) -> list[list[Generation]]:
    """The turns of `count` conversations: each prompt repeats the one before it and adds some tokens."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for session in range(count):
        prompt: list[int] = []
        each = []
        for turn in range(turns):
            prompt = prompt + torch.randint(50, (2 * BLOCK,), generator=generator).tolist()
            number = turn * count + session
            each.append(make_generation(number, prompt, max_tokens=3, block_size=BLOCK))
        found.append(each)
    return found


def test_a_router_sees_what_is_in_host_memory() -> None:
    """Devices that hold two conversations of five: the others come back from the host tiers of their engines."""
    decoder, tier = make_decoder("llama"), KVOffloading((TierConfig("host", 500),))
    config = settings(4, num_gpu_blocks=14, kv_offloading=tier)
    pools = LocalPools(layout(2, 0, config, routing="prefix_aware"), lambda module: decoder)
    sessions = conversations(5, turns=4)
    for turn in zip(*sessions, strict=True):
        for generation in turn:
            pools.submit(generation)
            pools.run()
    generations = [each for turns in sessions for each in turns]
    assert [each.output for each in generations] == colocated(decoder, generations)
    check_empty(pools)
    cores = [worker.engine.core for worker in pools.workers]
    assert sum(core.cached_tokens for core in cores) == 5 * sum(2 * BLOCK * turn for turn in range(1, 4))
    assert sum(core.kv_tiers.tiers[0].loaded for core in cores if core.kv_tiers is not None) > 10
    for core, routed in zip(cores, pools.frontend.engines.values(), strict=True):
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
        pools = LocalPools(layout(prefill, decode, config, routing=routing), lambda module: decoder, packed=packed)
        sessions = conversations(5, turns=4)  # an odd number, so that turns in turn change engines
        generations = [each for turn in zip(*sessions, strict=True) for each in turn]
        for turn in zip(*sessions, strict=True):
            for generation in turn:
                pools.submit(generation)
            pools.run()
        assert [each.output for each in generations] == colocated(decoder, generations)
        check_empty(pools)
        workers = pools.workers[:prefill]
        cached[routing] = sum(worker.engine.core.cached_tokens for worker in workers)
        for worker, routed in zip(workers, pools.frontend.engines.values(), strict=False):
            own = [worker.engine.core.cached_prefix_tokens(each.request) for each in generations]
            told = [routed.cached_prefix_tokens(each.request) for each in generations]
            assert told == (own if routing == "prefix_aware" else [0] * len(own))
            assert max(own) > 0
    assert cached["prefix_aware"] == 5 * sum(2 * BLOCK * turn for turn in range(1, 4))
    assert cached["round_robin"] < 0.7 * cached["prefix_aware"]


def test_events_that_take_long_leave_the_router_ignorant() -> None:
    decoder = make_decoder("llama")
    stale = replace(layout(2, 0, settings(4, num_gpu_blocks=200), routing="prefix_aware"), kv_event_delay=1e9)
    pools = LocalPools(stale, lambda module: decoder)
    for turn in zip(*conversations(5, turns=2), strict=True):
        for generation in turn:
            pools.submit(generation)
        pools.run()
        assert all(routed.cached_prefix_tokens(turn[0].request) == 0 for routed in pools.frontend.engines.values())


def test_aborts_at_any_moment_free_everything() -> None:
    decoder = make_decoder("llama")
    generations = requests(40, seed=8)
    whole = colocated(decoder, generations)
    seen: list[int] = []

    def note(progress: Progress) -> None:
        seen.append(len(progress.advanced))
        if len(seen) % 2:
            pools.frontend.abort(len(seen) % 40)
        for generation in progress.advanced[:1]:
            if generation.request.id % 5 == 0:
                pools.frontend.abort(generation.request.id)

    pools = LocalPools(layout(2, 2, settings(3)), lambda module: decoder, on_progress=note)
    for generation in generations:
        pools.submit(generation)
    pools.run()
    aborted = [each for each in generations if each.finish_reason == "abort"]
    assert 5 < len(aborted) < 40
    for each, output in zip(generations, whole, strict=True):
        assert each.output == output[: len(each.output)]
        assert each.finish_reason == "abort" or each.output == output
    check_empty(pools)


def test_a_stop_check_ends_an_output_on_either_side() -> None:
    decoder = make_decoder("llama")
    generations = requests(10, seed=3)
    whole = colocated(decoder, generations)
    for i, (generation, output) in enumerate(zip(generations, whole, strict=True)):
        last = output[0] if i % 2 else output[len(output) // 2]
        generation.stop_check = lambda token, last=last: token == last  # type: ignore[misc]
        whole[i] = output[: output.index(last) + 1]
    pools = LocalPools(layout(1, 1, settings(4)), lambda module: decoder)
    for generation in generations:
        pools.submit(generation)
    pools.run()
    assert [each.output for each in generations] == whole
    assert {each.finish_reason for each in generations} == {"stop"}
    check_empty(pools)


# -- several models --------------------------------------------------------------------------------------------------

MODELS = ("math", "code", "tools")


@cache
def module(name: str | None) -> Decoder:
    """A prefill module for each model, and the shared decoder."""
    return make_decoder("qwen3", seed=1 if name is None else 10 + MODELS.index(name))


def of_models(count: int) -> list[Generation]:
    """Requests for all models in turn."""
    generations = requests(count, seed=4)
    for i, each in enumerate(generations):
        object.__setattr__(each.request, "model", MODELS[i % 3])
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
    whole = Inputs(torch.from_numpy(generation.prompt), places, places, empty, none, table, starts, none.new_zeros(1))
    state = prefill.forward(whole, cache)[-1:]
    output = [int(prefill.logits(prefill.normed(state)).argmax())]
    while len(output) < generation.request.max_tokens:
        place = torch.tensor([n + len(output) - 1])
        step = Inputs(
            torch.tensor(output[-1:]), place, place, table, (place + 1).int(), empty, torch.zeros(1).int(), none
        )
        output.append(int(decode.logits(decode.normed(decode.forward(step, cache))).argmax()))
    return output


def test_one_decoder_continues_the_prompts_of_all_models_in_the_same_batches() -> None:
    config = settings(4)
    engines = [EnginePlace("prefill", config, name) for name in MODELS] + [EnginePlace("decode", config)] * 2
    pools = LocalPools(
        PoolsLayout(tuple(engines), {name: (1 + i,) for i, name in enumerate(MODELS)}, dict.fromkeys(MODELS, (4, 5))),
        module,
    )
    generations = of_models(36)
    mixed: list[int] = []
    for worker in pools.workers[3:]:
        worker.engine.watch = lambda batch, begin, end: mixed.append(
            len({by_id[each.request.id].request.model for each in batch.decodes})
        )
    by_id = {each.request.id: each for each in generations}
    for generation in generations:
        pools.submit(generation)
    pools.run()
    assert [g.output for g in generations] == [
        by_modules(g, module(g.request.model), module(None)) for g in generations
    ]
    assert max(mixed) == 3
    check_empty(pools)


def test_isolated_pools_give_what_each_model_gives_alone() -> None:
    config = settings(4)
    engines = [EnginePlace(role, config, name) for role in ("prefill", "decode") for name in MODELS]  # type: ignore[arg-type]
    ranks = range(len(MODELS))
    pools = LocalPools(
        PoolsLayout(tuple(engines), {MODELS[i]: (1 + i,) for i in ranks}, {MODELS[i]: (4 + i,) for i in ranks}),
        module,
    )
    generations = of_models(30)
    for generation in generations:
        pools.submit(generation)
    pools.run()
    for name in MODELS:
        own = [each for each in generations if each.request.model == name]
        assert [each.output for each in own] == colocated(module(name), own)
    with pytest.raises(ValueError, match="expected one of the models, found poems"):
        pools.submit(replace(generations[0], request=type(generations[0].request)(99, 0.0, 3, 3, "poems")))
