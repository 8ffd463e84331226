"""An engine that speculates answers as one that does not, token by token, greedy and sampled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kernels.sampling import SamplingParams
from kernels.shapes import Shape
from live.engine import Engine
from live.generation import Generation
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.speculation import NgramLookup, SpeculativeEngine
from schedulers.engine_config import EngineConfig
from schedulers.kv_cache import KVCache
from schedulers.speculation import SpeculativeEngineCore
from schedulers.step_policies import FixedDrafts
from tests.live.engines import CONFIGS, config, drain, request, served
from tests.live.test_graphs import replayed_steps

CONFIG = ModelConfig("llama", Shape(2, 32, 48, 4, 2, 8, 23), max_position_embeddings=256, tied=False)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(CONFIG, random_weights(CONFIG, torch.float64, "cpu"))


def speculating(decoder: Decoder, config: EngineConfig, drafts: int, lookup: int = 1) -> SpeculativeEngine:
    def make_core(make_cache: type[KVCache]) -> SpeculativeEngineCore:
        return SpeculativeEngineCore(config, FixedDrafts(drafts), drafts, make_cache=make_cache)

    return SpeculativeEngine(decoder, config, make_core, lookup, lookup + 2)


def generations(sampling: SamplingParams, **settings: Any) -> list[Generation]:
    """Prompts that repeat themselves, so that n-grams are found."""
    rng = np.random.default_rng(3)
    requests = []
    for number in range(9):
        phrase = rng.integers(0, 23, 5).tolist()
        prompt = [*phrase, *rng.integers(0, 23, number).tolist(), *phrase, *phrase[: number % 4]]
        params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed=number)
        requests.append(request(number, prompt, 3 + 6 * number, sampling_params=params, **settings))
    return requests


def answered(engine: Engine, requests: list[Generation], abort: int | None = None) -> list[tuple[list[int], str]]:
    for generation in requests:
        engine.submit(generation)
    drain(engine, lambda number: engine.abort(abort) if abort is not None and number == 4 else None)
    return [(generation.output, generation.finish_reason) for generation in requests]


SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=0.7, top_k=7, top_p=0.9),
}


@pytest.mark.parametrize(
    ("name", "sampling", "drafts"),
    [
        ("plenty", "greedy", 4), ("plenty", "sampled", 1), ("chunks of 7", "sampled", 4),
        ("chunks of 7", "filtered", 1), ("few blocks", "filtered", 4), ("few blocks", "greedy", 1),
    ],
)  # fmt: skip
def test_answers_are_those_without_speculation(decoder: Decoder, name: str, sampling: str, drafts: int) -> None:
    settings, params = CONFIGS[name], SAMPLING[sampling]
    engine = speculating(decoder, settings, drafts)
    plain = answered(Engine(decoder, settings), generations(params))
    assert answered(engine, generations(params)) == plain
    stats = engine.core.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("name", "sampling"), [("plenty", "greedy"), ("chunks of 7", "filtered"), ("few blocks", "greedy")]
)
def test_padded_steps_and_their_graphs_give_the_same_answers(decoder: Decoder, name: str, sampling: str) -> None:
    config, params = CONFIGS[name], SAMPLING[sampling]
    engine = speculating(decoder, config, 4)
    memory = replayed_steps(engine)
    wanted: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 1} if name == "plenty" else {}
    assert answered(engine, generations(params, **wanted)) == answered(Engine(decoder, config), generations(params))
    assert memory.replays > 10
    assert engine.core.stats.num_accepted_tokens > 0


def test_an_aborted_request_leaves_the_others_as_they_are(decoder: Decoder) -> None:
    config, params = CONFIGS["few blocks"], SAMPLING["greedy"]
    plain = answered(Engine(decoder, config), generations(params))
    answers = answered(speculating(decoder, config, 3), generations(params), abort=8)
    assert answers[:8] == plain[:8]
    assert answers[8][1] == "abort"


def test_end_tokens_stop_checks_and_logprobs_are_those_without_speculation(decoder: Decoder) -> None:
    """An answer may end within a draft: what follows is dropped, its log-probabilities as well."""
    config, params = CONFIGS["plenty"], SAMPLING["greedy"]

    def requests_to_compare() -> list[Generation]:
        requests = generations(params, end_tokens=frozenset({11, 5}), min_tokens=2, logprobs=2, prompt_logprobs=1)
        requests[4].stop_check = lambda token: token == 7
        return requests

    plain, drafted = requests_to_compare(), requests_to_compare()
    assert answered(speculating(decoder, config, 4), drafted) == answered(Engine(decoder, config), plain)
    assert {generation.finish_reason for generation in plain} == {"stop", "length"}
    for one, second in zip(plain, drafted, strict=True):
        assert second.token_logprobs == pytest.approx(one.token_logprobs, abs=1e-5)
        assert [[token for token, _ in top] for top in second.top_logprobs] == [
            [token for token, _ in top] for top in one.top_logprobs
        ]
        assert second.prompt_token_logprobs[1:] == pytest.approx(one.prompt_token_logprobs[1:], abs=1e-5)


def test_sampled_tokens_have_the_distribution_of_the_model(decoder: Decoder) -> None:
    """The second token over 3,000 seeds, against the model's own probabilities.

    The prompt has every token, so that whatever is sampled first has a draft behind it.
    """
    prompt = np.random.default_rng(1).permutation(23).tolist()
    engine = speculating(decoder, config(4000, max_num_batched_tokens=2048), 3)
    generations = [
        request(seed, prompt, 3, sampling_params=SamplingParams(1.0, seed=seed * 7919)) for seed in range(3000)
    ]
    answered(engine, generations)
    assert engine.core.stats.num_drafts > 2500
    assert engine.core.stats.num_accepted_tokens > 80
    expected = np.zeros(23)
    probabilities = _probabilities(decoder, prompt)
    for first in range(23):
        after = _probabilities(decoder, [*prompt, first])
        expected += probabilities[first] * after
    counts = Counter(generation.output[1] for generation in generations)
    observed = np.array([counts[token] for token in range(23)])
    assert stats.chisquare(observed, 3000 * expected).pvalue > 1e-3


def _probabilities(decoder: Decoder, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The model's distribution of the next token, from the log-probabilities that an engine tells."""
    generation = request(0, tokens, 1, logprobs=23)
    served(Engine(decoder, config(40)), [generation])
    probabilities = np.zeros(23)
    for token, logprob in generation.top_logprobs[0]:
        probabilities[token] = np.exp(logprob)
    return probabilities / probabilities.sum()


def proposed(tokens: list[int], shortest: int, longest: int, max_tokens: int) -> list[int]:
    """The tokens after the first earlier occurrence of the longest n-gram at the end, found by looking everywhere."""
    for size in range(longest, shortest - 1, -1):
        end = tokens[len(tokens) - size :]
        for begin in range(len(tokens) - size):
            if len(end) == size and tokens[begin : begin + size] == end:
                return tokens[begin + size : begin + size + max_tokens]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6), st.data())
def test_lookup_finds_what_a_search_finds(
    tokens: list[int], shortest: int, more: int, max_tokens: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    lookup = NgramLookup(shortest, shortest + more)
    lookup.extend(tokens[:cut])
    lookup.extend(tokens[cut:])
    assert lookup.propose(max_tokens) == proposed(tokens, shortest, shortest + more, max_tokens)
