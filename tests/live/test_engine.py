"""The engine gives what transformers gives, whatever the scheduler does to a request on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from live.engine import Engine
from live.generation import Generation, make_generation
from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.weights import load_weights
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.step_policies import StaticChunks

GREEDY = SamplingParams(temperature=0.0)
BLOCK = 4


@pytest.fixture
def models(checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Decoder, Any]:
    directory, peer = checkpoint("qwen3")
    config = read_config(directory)
    return Decoder(config, load_weights(directory, config, torch.float32, "cpu")), peer


def prompts() -> list[list[int]]:
    """Twelve, of which some begin alike."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(0, 199, (20,), generator=generator).tolist()
    sizes = [3, 17, 30, 8, 1, 25, 12, 40, 5, 21, 9, 33]
    texts = [torch.randint(0, 199, (size,), generator=generator).tolist() for size in sizes]
    return [common + text if i % 3 == 0 else text for i, text in enumerate(texts)]


def expected(peer: Any, prompt: list[int], max_tokens: int) -> list[int]:
    result = peer.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = result[0, len(prompt) :].tolist()
    return answer


def drain(engine: Engine) -> list[Generation]:
    finished: list[Generation] = []
    while (result := engine.step()) is not None:
        engine.core.check_integrity()
        finished.extend(result.finished)
    assert engine.core.kv_cache.num_free_blocks == engine.core.kv_cache.num_blocks
    return finished


CONFIGS = {
    "plenty": EngineConfig(num_gpu_blocks=400, block_size=BLOCK, prefix_id_tokens=BLOCK),
    "chunks of 7": EngineConfig(
        num_gpu_blocks=400, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_batched_tokens=7, max_num_seqs=6
    ),
    "few blocks": EngineConfig(num_gpu_blocks=24, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=8),
    "few blocks, nothing shared": EngineConfig(
        num_gpu_blocks=24, block_size=BLOCK, prefix_id_tokens=BLOCK, enable_prefix_caching=False
    ),
    "leaders": EngineConfig(
        num_gpu_blocks=200,
        block_size=BLOCK,
        prefix_id_tokens=BLOCK,
        cache_blocks_on="computed",
        in_batch_prefix_caching=True,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_transformers(name: str, models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    kinds: list[type[Batch]] = []
    engine = Engine(decoder, CONFIGS[name], StaticChunks(32), watch=lambda batch, begin, end: kinds.append(type(batch)))
    generations = [
        make_generation(i, prompt, 3 + 2 * i, sampling_params=GREEDY, block_size=BLOCK)
        for i, prompt in enumerate(prompts())
    ]
    for generation in generations[:8]:
        engine.submit(generation)
    for _ in range(4):
        engine.step()
    for generation in generations[8:]:
        engine.submit(generation)
    drain(engine)
    for i, (generation, prompt) in enumerate(zip(generations, prompts(), strict=True)):
        assert generation.output == expected(peer, prompt, 3 + 2 * i), f"request {i}"
        assert generation.finish_reason == "length"
    if name.startswith("few"):
        assert engine.core.preemptions > 0
    if name == "leaders":
        assert engine.core.cached_tokens > 0


def test_an_end_token_ends(models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    answer = expected(peer, prompts()[1], 12)
    end = answer[5]
    first = answer.index(end)
    engine = Engine(decoder, CONFIGS["plenty"])
    stopped = make_generation(
        0, prompts()[1], 12, sampling_params=GREEDY, end_tokens=frozenset({end}), block_size=BLOCK
    )
    patient = make_generation(
        1, prompts()[1], 12, sampling_params=GREEDY, end_tokens=frozenset({end}), min_tokens=first + 2, block_size=BLOCK
    )
    for generation in (stopped, patient):
        engine.submit(generation)
    drain(engine)
    assert (stopped.output, stopped.finish_reason) == (answer[: first + 1], "stop")
    assert len(patient.output) > first + 1


def test_what_a_seed_draws_does_not_depend_on_company(models: tuple[Decoder, Any]) -> None:
    decoder, _ = models
    params = SamplingParams(temperature=1.5, top_k=50, seed=9)

    def answer(company: int) -> list[int]:
        engine = Engine(decoder, CONFIGS["plenty"], StaticChunks(16))
        for i in range(company):
            engine.submit(
                make_generation(i + 1, prompts()[i], 9, sampling_params=SamplingParams(seed=i), block_size=BLOCK)
            )
        generation = make_generation(0, prompts()[10], 15, sampling_params=params, block_size=BLOCK)
        engine.submit(generation)
        drain(engine)
        return generation.output

    assert answer(0) == answer(7)


def test_an_embedding_is_the_last_state_and_holds_no_seat(models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    config = EngineConfig(
        num_gpu_blocks=40, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=1, one_shot=OneShotBudget(64, 8)
    )
    engine = Engine(decoder, config)
    generations = [
        make_generation(i, prompt, 0, task="embed", block_size=BLOCK) for i, prompt in enumerate(prompts()[:6])
    ]
    for generation in generations:
        engine.submit(generation)
    finished = drain(engine)
    assert len(finished) == 6
    for generation in generations:
        with torch.inference_mode():
            states = peer.model(torch.from_numpy(generation.prompt)[None]).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.from_numpy(generation.pooled_output), states, rtol=1e-4, atol=1e-4)
        assert generation.output == []


def test_an_abort_frees_everything(models: tuple[Decoder, Any]) -> None:
    decoder, _ = models
    engine = Engine(decoder, CONFIGS["chunks of 7"])
    for i, prompt in enumerate(prompts()):
        engine.submit(make_generation(i, prompt, 20, sampling_params=GREEDY, block_size=BLOCK))
    for i in range(len(prompts())):
        engine.step()
        engine.abort(i)
        engine.core.check_integrity()
    assert drain(engine) == []
