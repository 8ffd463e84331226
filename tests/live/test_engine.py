"""The engine gives what transformers gives, whatever the scheduler does to a request on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from live.engine import Engine
from live.models.config import read_config
from live.models.decoder import Decoder, Inputs, PagedCache
from live.models.weights import load_weights
from schedulers.batches import Batch
from schedulers.engine_config import OneShotBudget
from schedulers.step_policies import StaticChunks
from tests.live.conftest import MODELS
from tests.live.engines import CONFIGS, config, drain, prompts, request, requests, served


def expected(peer: Any, prompt: list[int], max_tokens: int) -> list[int]:
    result = peer.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = result[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("name", list(CONFIGS)[:5])
def test_answers_are_those_of_transformers(name: str, models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    kinds: list[type[Batch]] = []
    engine = Engine(decoder, CONFIGS[name], StaticChunks(32), watch=lambda batch, begin, end: kinds.append(type(batch)))
    generations = requests(prompts(), 3, 2)
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
    stopped = request(0, prompts()[1], 12, end_tokens=frozenset({end}))
    patient = request(1, prompts()[1], 12, end_tokens=frozenset({end}), min_tokens=first + 2)
    served(engine, [stopped, patient])
    assert (stopped.output, stopped.finish_reason) == (answer[: first + 1], "stop")
    assert len(patient.output) > first + 1


def test_what_a_seed_draws_does_not_depend_on_company(models: tuple[Decoder, Any]) -> None:
    decoder, _ = models
    params = SamplingParams(temperature=1.5, top_k=50, seed=9)

    def answer(company: int) -> list[int]:
        engine = Engine(decoder, CONFIGS["plenty"], StaticChunks(16))
        others = [request(i + 1, prompts()[i], 9, sampling_params=SamplingParams(seed=i)) for i in range(company)]
        return served(engine, [*others, request(0, prompts()[10], 15, sampling_params=params)])[-1]

    assert answer(0) == answer(7)


def test_an_embedding_is_the_last_state_and_holds_no_seat(models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    engine = Engine(decoder, config(40, max_num_seqs=1, one_shot=OneShotBudget(64, 8)))
    generations = requests(prompts()[:6], 0, task="embed")
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
    for generation in requests(prompts(), 20):
        engine.submit(generation)
    for i in range(len(prompts())):
        engine.step()
        engine.abort(i)
        engine.core.check_integrity()
    assert drain(engine) == []


BLOCK = 4
TABLES = torch.randperm(64, generator=torch.Generator().manual_seed(3)).reshape(4, 16).int()
"""Blocks of four sequences, in no order."""


def slots(sequence: int, begin: int, end: int) -> torch.Tensor:
    positions = torch.arange(begin, end)
    return TABLES[sequence, positions // BLOCK].long() * BLOCK + positions % BLOCK


def inputs(decodes: list[tuple[int, int, int]], chunks: list[tuple[int, int, list[int]]]) -> Inputs:
    """Decodes are (sequence, position, token), chunks (sequence, context, tokens)."""
    tokens = [token for _, _, token in decodes] + [token for _, _, part in chunks for token in part]
    places = [(s, p, p + 1) for s, p, _ in decodes] + [(s, c, c + len(part)) for s, c, part in chunks]
    sizes = [len(part) for _, _, part in chunks]
    return Inputs(
        tokens=torch.tensor(tokens),
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in places]),
        slots=torch.cat([slots(*place) for place in places]),
        decode_tables=TABLES[[s for s, _, _ in decodes]],
        decode_lengths=torch.tensor([p + 1 for _, p, _ in decodes], dtype=torch.int32),
        chunk_tables=TABLES[[s for s, _, _ in chunks]],
        chunk_starts=torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()] if sizes else [0], dtype=torch.int32),
        chunk_contexts=torch.tensor([c for _, c, _ in chunks], dtype=torch.int32),
    )


@pytest.fixture(params=MODELS)
def models(request: pytest.FixtureRequest, checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Decoder, Any]:
    directory, peer = checkpoint(request.param)
    config = read_config(directory)
    return Decoder(config, load_weights(directory, config, torch.float32, "cpu")), peer


def test_logits_agree_with_transformers(models: tuple[Decoder, Any]) -> None:
    assert_logits_agree(*models)


@torch.inference_mode()
def assert_logits_agree(decoder: Decoder, peer: Any) -> None:
    """Prompts whole and in chunks, decodes beside them and alone."""
    cache = PagedCache.allocate(decoder.config, 64, BLOCK, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(11)
    texts = [torch.randint(0, 199, (size,), generator=generator).tolist() for size in (23, 9, 41, 2)]
    exact = [peer(torch.tensor([text])).logits[0] for text in texts]

    def close(rows: torch.Tensor, expected: list[torch.Tensor]) -> None:
        logits = decoder.logits(decoder.normed(rows))
        torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)

    # A whole prompt and the first chunks of two others, in one step.
    first = inputs([], [(0, 0, texts[0][:-1]), (1, 0, texts[1][:5]), (2, 0, texts[2][:17])])
    close(decoder.forward(first, cache), [*exact[0][:-1], *exact[1][:5], *exact[2][:17]])
    # A decode beside later chunks and a new prompt.
    second = inputs([(0, 22, texts[0][22])], [(1, 5, texts[1][5:8]), (2, 17, texts[2][17:40]), (3, 0, texts[3][:1])])
    close(decoder.forward(second, cache), [exact[0][22], *exact[1][5:8], *exact[2][17:40], exact[3][0]])
    # Decodes only, of unequal lengths.
    third = inputs([(1, 8, texts[1][8]), (2, 40, texts[2][40]), (3, 1, texts[3][1])], [])
    close(decoder.forward(third, cache), [exact[1][8], exact[2][40], exact[3][1]])
