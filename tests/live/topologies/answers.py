"""Requests for bundles and engines, and the answers of one colocated engine to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from kernels.shapes import Shape
from live.engine import Engine
from live.generation import Generation, make_generation
from live.loaded_model import LoadedSource
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.local import LocalTopology
from live.topologies.pools.layout import EnginePlace, PoolsLayout
from live.topologies.processes import BundleDeployment, PoolsDeployment
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0)

CONFIGS = {
    "llama": ModelConfig("llama", Shape(2, 16, 24, 4, 2, 8, 50), max_position_embeddings=128, tied=True),
    "qwen3": ModelConfig("qwen3", Shape(3, 16, 24, 4, 2, 8, 50, qk_norm=True), max_position_embeddings=128, tied=False),
    "qwen3-moe": ModelConfig(
        "qwen3_moe",
        Shape(2, 16, 24, 4, 2, 8, 50, experts=6, experts_per_token=2, expert_intermediate=12, qk_norm=True),
        max_position_embeddings=128,
        tied=True,
    ),
}


def make_decoder(name: str, seed: int = 3, device: str = "cpu") -> Decoder:
    """A tiny model with random weights."""
    return Decoder(CONFIGS[name], random_weights(CONFIGS[name], torch.float32, device, seed))


def local_bundle(layout: BundleLayout, decoder: Decoder, *, graphs: bool = False, refill: str = "fcfs", **options: Any):
    """A bundle in this process; its `front` is the coordinator."""
    return LocalTopology(BundleDeployment(LoadedSource.of(decoder), layout, refill, graphs=graphs), **options)


def pools_of(layout: PoolsLayout, decoder: Decoder, *, graphs: bool = False, **modules: Decoder) -> PoolsDeployment:
    """Pools with one decoder, or with a module for each model."""
    sources = {name: LoadedSource.of(module) for name, module in modules.items()}
    return PoolsDeployment(LoadedSource.of(decoder), layout, sources, graphs=graphs)


def layout(
    prefill: int, decode: int, config: EngineConfig, decode_config: EngineConfig | None = None, **options: Any
) -> PoolsLayout:
    """One model on so many prefill and decode engines; without decode engines on engines that do both."""
    role = "prefill" if decode else "both"
    engines = [EnginePlace(role, config)] * prefill + [EnginePlace("decode", decode_config or config)] * decode
    ranks = tuple(range(1, 1 + len(engines)))
    decoding = {"default": ranks[prefill:]} if decode else {}
    return PoolsLayout(tuple(engines), {"default": ranks[:prefill]}, decoding, **options)


def local_pools(places: PoolsLayout, decoder: Decoder, *, graphs: bool = False, **options: Any) -> LocalTopology:
    """Pools in this process; their `front` is the frontend."""
    return LocalTopology(pools_of(places, decoder, graphs=graphs), **options)


def settings(batch_size: int = 4, **changes: object) -> EngineConfig:
    """An engine's settings with room for all tests, unless said otherwise."""
    base = {"num_gpu_blocks": 100, "block_size": BLOCK, "prefix_id_tokens": BLOCK, "max_num_batched_tokens": 64}
    return EngineConfig(**{**base, "max_num_seqs": batch_size, **changes})  # type: ignore[arg-type]


def requests(count: int, seed: int = 1, sampling: SamplingParams = GREEDY) -> list[Generation]:
    """Uneven prompts, of which every third begins alike, and uneven answers."""
    random = Random(seed)
    common = [random.randrange(50) for _ in range(3 * BLOCK)]
    generations = []
    for i in range(count):
        prompt = (common if i % 3 == 0 else []) + [random.randrange(50) for _ in range(random.randint(1, 20))]
        generations.append(
            make_generation(i, prompt, random.randint(1, 12), sampling_params=sampling, block_size=BLOCK)
        )
    return generations


def check_logprobs(topology: LocalTopology, decoder: Decoder) -> None:
    """Tokens and log-probabilities are those of one engine: none, the sampled token's, and those of up to 20 others."""
    generations = requests(24, seed=6)
    for i, generation in enumerate(generations):
        generation.logprobs = (-1, 0, 3, 20)[i % 4]
    serve(topology, generations)
    for generation, expected in zip(generations, colocated_generations(decoder, generations), strict=True):
        assert generation.output == expected.output
        assert len(generation.token_logprobs) == (0 if generation.logprobs < 0 else len(generation.output))
        assert generation.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
        assert len(generation.top_logprobs) == len(expected.top_logprobs)
        for top, expected_top in zip(generation.top_logprobs, expected.top_logprobs, strict=True):
            assert [token for token, _ in top] == [token for token, _ in expected_top]
            assert [value for _, value in top] == pytest.approx([value for _, value in expected_top], abs=1e-5)
    assert {len(top) for generation in generations for top in generation.top_logprobs} == {0, 3, 20}


def check_idle(core: EngineCore) -> None:
    """No sequence and no block is left."""
    core.check_integrity()
    assert not core.sequences
    assert core.kv_cache.num_free_blocks == core.kv_cache.num_blocks


def outputs(generations: Sequence[Generation]) -> list[list[int]]:
    """The tokens of requests."""
    return [generation.output for generation in generations]


def serve(topology: LocalTopology, generations: Sequence[Generation]) -> None:
    """Submit requests together, and run until all are finished."""
    for generation in generations:
        topology.submit(generation)
    topology.run()


def check_served(topology: LocalTopology, decoder: Decoder, generations: Sequence[Generation]) -> None:
    """Serve requests, whose tokens are those of one engine."""
    serve(topology, generations)
    assert outputs(generations) == colocated(decoder, generations)


def colocated(decoder: Decoder, generations: Sequence[Generation]) -> list[list[int]]:
    """The outputs of one engine for the same requests."""
    return outputs(colocated_generations(decoder, generations))


def colocated_generations(decoder: Decoder, generations: Sequence[Generation]) -> list[Generation]:
    """Copies of requests, run by one engine."""
    engine = Engine(decoder, settings(8, num_gpu_blocks=400))
    copies = [
        make_generation(
            original.request.id, original.prompt, original.request.max_tokens, sampling_params=original.sampling_params,
            end_tokens=original.end_tokens, min_tokens=original.min_tokens, block_size=BLOCK,
            logprobs=original.logprobs,
        )
        for original in generations
    ]  # fmt: skip
    for copy in copies:
        engine.submit(copy)
    while engine.step() is not None:
        pass
    return copies
