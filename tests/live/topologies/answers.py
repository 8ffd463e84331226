"""Requests for bundles and engines, and the answers of one colocated engine to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from kernels.sampling import SamplingParams
from kernels.shapes import Shape
from live.engine import Engine
from live.generation import Generation, make_generation
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from schedulers.engine_config import EngineConfig

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


def make_decoder(name: str, seed: int = 3) -> Decoder:
    """A tiny model with random weights."""
    torch.set_num_threads(1)
    return Decoder(CONFIGS[name], random_weights(CONFIGS[name], torch.float32, "cpu", seed))


def settings(batch_size: int = 4, **changes: object) -> EngineConfig:
    """An engine's settings with room for all tests, unless said otherwise."""
    base = {"num_gpu_blocks": 100, "block_size": BLOCK, "prefix_id_tokens": BLOCK, "max_num_batched_tokens": 64}
    return EngineConfig(**{**base, "max_num_seqs": batch_size, **changes})  # type: ignore[arg-type]


def requests(count: int, seed: int = 1, sampling: SamplingParams = GREEDY) -> list[Generation]:
    """Uneven prompts, of which every third begins alike, and uneven answers."""
    random = Random(seed)
    common = [random.randrange(50) for _ in range(3 * BLOCK)]
    made = []
    for i in range(count):
        prompt = (common if i % 3 == 0 else []) + [random.randrange(50) for _ in range(random.randint(1, 20))]
        made.append(make_generation(i, prompt, random.randint(1, 12), sampling_params=sampling, block_size=BLOCK))
    return made


def colocated(decoder: Decoder, generations: Sequence[Generation]) -> list[list[int]]:
    """The outputs of one engine for the same requests."""
    engine = Engine(decoder, settings(8, num_gpu_blocks=400))
    copies = [
        make_generation(
            each.request.id, each.prompt, each.request.max_tokens, sampling_params=each.sampling_params,
            end_tokens=each.end_tokens, min_tokens=each.min_tokens, block_size=BLOCK,
        )
        for each in generations
    ]  # fmt: skip
    for each in copies:
        engine.submit(each)
    while engine.step() is not None:
        pass
    return [each.output for each in copies]
