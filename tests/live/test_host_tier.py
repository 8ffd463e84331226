"""The host tier of the live engine: blocks go to host memory and back, and answers stay what they were."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.engine import Engine  # noqa: E402
from live.generation import Generation, make_generation  # noqa: E402
from live.models.decoder import Decoder  # noqa: E402
from schedulers.engine_config import EngineConfig, KVOffloading, OneShotBudget, TierConfig  # noqa: E402
from schedulers.kv_cache import block_hash  # noqa: E402
from tests.live.topologies.answers import BLOCK, make_decoder, settings  # noqa: E402


def offloading(policy: str = "write_through", capacity: int = 500) -> KVOffloading:
    return KVOffloading((TierConfig("host", capacity),), policy)  # type: ignore[arg-type]


def conversations(count: int = 6, turns: int = 4) -> list[Generation]:
    """Turn after turn of several conversations, so that each has lost its blocks when its next turn comes."""
    generator = torch.Generator().manual_seed(7)
    history: list[list[int]] = [[] for _ in range(count)]
    generations = []
    for turn in range(turns):
        for session in range(count):
            history[session] += torch.randint(50, (BLOCK * 2 + 1,), generator=generator).tolist()
            number = turn * count + session
            generations.append(make_generation(number, list(history[session]), max_tokens=5, block_size=BLOCK))
    return generations


def answers(decoder: Decoder, config: EngineConfig, depth: int = 1, at_once: int = 2) -> tuple[list[list[int]], Engine]:
    """The outputs of conversations of which `at_once` turns run at a time."""
    engine, generations = Engine(decoder, config, depth=depth), conversations()
    for first in range(0, len(generations), at_once):
        for generation in generations[first : first + at_once]:
            engine.submit(generation)
        while engine.step() is not None:
            engine.core.check_integrity()
    assert engine.core.kv_cache.num_free_blocks == engine.core.kv_cache.num_blocks
    return [generation.output for generation in generations], engine


CASES = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7},
    "cached when computed": {"cache_blocks_on": "computed"},
    "ids of two blocks": {"prefix_id_tokens": 2 * BLOCK},
    "one-shot class": {"one_shot": OneShotBudget(64, 4)},
}


@pytest.fixture(scope="module")
def without_reuse() -> tuple[Decoder, list[list[int]]]:
    """A model, and its answers with room for everything and nothing reused."""
    decoder = make_decoder("llama")
    return decoder, answers(decoder, settings(4, num_gpu_blocks=400, enable_prefix_caching=False))[0]


@pytest.mark.parametrize(("policy", "depth"), [("write_through", 1), ("write_back", 2)])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_without_a_tier(
    policy: str, depth: int, case: str, without_reuse: tuple[Decoder, list[list[int]]]
) -> None:
    (decoder, plenty), changes = without_reuse, CASES[case]
    tight = settings(4, num_gpu_blocks=24, kv_offloading=offloading(policy), **changes)
    result, engine = answers(decoder, tight, depth)
    assert result == plenty
    (host,) = engine.core.kv_tiers.tiers
    assert host.loaded > 10


def test_a_tier_that_is_too_small_does_no_harm() -> None:
    decoder = make_decoder("qwen3")
    plenty, _ = answers(decoder, settings(4, num_gpu_blocks=400))
    for capacity in (1, 3, 9, 20):
        result, engine = answers(decoder, settings(4, num_gpu_blocks=24, kv_offloading=offloading(capacity=capacity)))
        assert result == plenty
        assert engine.core.kv_tiers.tiers[0].evicted > 0


def test_what_is_loaded_is_what_was_computed() -> None:
    """Other bytes in the tier make other answers: what the engine reads comes from there."""
    decoder = make_decoder("llama")
    plenty, _ = answers(decoder, settings(4, num_gpu_blocks=400))
    engine = Engine(decoder, settings(4, num_gpu_blocks=24, kv_offloading=offloading()))
    outputs = []
    for generation in conversations():
        engine.submit(generation)
        while engine.step() is not None:
            pass
        engine.host_tier.content.fill_(float("nan"))
        outputs.append(generation.output)
    assert outputs != plenty


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_blocks_that_went_through_the_tier_are_those_that_were_computed(policy: str) -> None:
    """Bit for bit between tier and device, and within rounding those of an engine that has lost none."""
    decoder = make_decoder("llama")
    _, roomy = answers(decoder, settings(4, num_gpu_blocks=400))
    _, engine = answers(decoder, settings(4, num_gpu_blocks=24, kv_offloading=offloading(policy)))
    tiers, host, cache = engine.core.kv_tiers, engine.host_tier, engine.executor.cache
    on_both = in_tier = 0
    for generation in conversations():
        ids, tokens = generation.request.prefix_blocks, generation.request.prompt_tokens
        here = engine.core.kv_cache.match_prefix(ids, tokens)
        path = 0
        for depth, node in enumerate(roomy.core.kv_cache.match_prefix(ids, tokens)):
            path = block_hash(path, ids[depth])
            block = tiers.tiers[0].blocks.get(path)
            if block is None:
                continue
            keys, values = host.content[block.slot]
            in_tier += 1
            roomy_cache = roomy.executor.cache
            torch.testing.assert_close(keys, roomy_cache.keys[:, node.payload], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(values, roomy_cache.values[:, node.payload], rtol=1e-4, atol=1e-5)
            if depth < len(here):
                on_both += 1
                assert torch.equal(keys, cache.keys[:, here[depth].payload])
                assert torch.equal(values, cache.values[:, here[depth].payload])
    assert on_both > 5
    assert in_tier > 20
