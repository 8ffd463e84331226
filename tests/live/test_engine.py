"""The engine gives what transformers gives, whatever the scheduler does to a request on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from live.engine import Engine
from live.models.decoder import Decoder
from schedulers.batches import Batch
from schedulers.engine_config import OneShotBudget
from schedulers.step_policies import StaticChunks
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
