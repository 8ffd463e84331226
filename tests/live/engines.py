"""Prompts, settings of engines, and engines that run until all of their requests have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.sampling import SamplingParams
from live.engine import Engine
from live.generation import Generation, make_generation
from schedulers.engine_config import EngineConfig, OneShotBudget

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4


def config(num_gpu_blocks: int, **settings: Any) -> EngineConfig:
    """Settings with small blocks."""
    return EngineConfig(num_gpu_blocks=num_gpu_blocks, **{"block_size": BLOCK, "prefix_id_tokens": BLOCK, **settings})


CONFIGS = {
    "plenty": config(400),
    "chunks of 7": config(400, max_num_batched_tokens=7, max_num_seqs=6),
    "few blocks": config(24, max_num_seqs=8),
    "few blocks, nothing shared": config(24, enable_prefix_caching=False),
    "leaders": config(200, cache_blocks_on="computed", in_batch_prefix_caching=True),
    "one-shot": config(40, max_num_seqs=5, one_shot=OneShotBudget(64, 8)),
    "whole answers reserved": config(60, max_num_seqs=8, kv_reservation="max_tokens"),
}


def prompts() -> list[list[int]]:
    """Twelve, of which some begin alike."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(0, 199, (20,), generator=generator).tolist()
    sizes = [3, 17, 30, 8, 1, 25, 12, 40, 5, 21, 9, 33]
    texts = [torch.randint(0, 199, (size,), generator=generator).tolist() for size in sizes]
    return [common + text if i % 3 == 0 else text for i, text in enumerate(texts)]


def request(number: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Generation:
    """A greedy request, unless the fields say otherwise."""
    return make_generation(number, prompt, max_tokens, **{"sampling_params": GREEDY, "block_size": BLOCK, **fields})


def requests(texts: Sequence[Sequence[int]], first: int, more: int = 0, **fields: Any) -> list[Generation]:
    """Requests for `first` tokens, and `more` for each after the first request."""
    return [request(i, prompt, first + more * i, **fields) for i, prompt in enumerate(texts)]


def drain(engine: Engine, each_step: Callable[[int], None] = lambda number: None) -> list[Generation]:
    """Run all steps; returns the finished generations."""
    finished: list[Generation] = []
    number = 0
    while (result := engine.step()) is not None:
        engine.core.check_integrity()
        finished.extend(result.finished)
        each_step(number)
        number += 1
    assert engine.core.kv_cache.num_free_blocks == engine.core.kv_cache.num_blocks
    return finished


def served(engine: Engine, generations: Sequence[Generation]) -> list[list[int]]:
    """The outputs of requests that come together."""
    for generation in generations:
        engine.submit(generation)
    drain(engine)
    return [generation.output for generation in generations]
