"""Log-probabilities, stops, and classes, as an engine tells them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from live.engine import Engine
from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.weights import load_weights, random_weights
from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.step_policies import StaticChunks
from tests.live.conftest import COMMON
from tests.live.engines import CONFIGS, config, drain, prompts, request, requests, served
from tests.live.test_engine import expected
from workloads.errors import BadInput

SOME = CONFIGS["few blocks"]


def expected_logprobs(peer: Any, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocabulary): row i is about token i + 1."""
    with torch.inference_mode():
        return peer(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


@pytest.mark.parametrize("settings", [CONFIGS["plenty"], CONFIGS["chunks of 7"], SOME], ids=["whole", "chunks", "few"])
def test_log_probabilities_are_those_of_transformers(settings: EngineConfig, models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    engine = Engine(decoder, settings, StaticChunks(16))
    generations = [
        request(i, prompt, 6, logprobs=i % 4 - 1, prompt_logprobs=(i + 1) % 4 - 1) for i, prompt in enumerate(prompts())
    ]
    served(engine, generations)
    assert settings is not SOME or engine.core.preemptions > 0
    for generation, prompt in zip(generations, prompts(), strict=True):
        exact = expected_logprobs(peer, [*prompt, *generation.output])
        answered = exact[len(prompt) - 1 : -1]
        if generation.logprobs < 0:
            assert generation.token_logprobs == generation.top_logprobs == []
        else:
            expected = answered.gather(1, torch.tensor(generation.output)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(generation.token_logprobs), expected, rtol=1e-4, atol=1e-4)
            same_tops(generation.top_logprobs, answered, generation.logprobs)
        if generation.prompt_logprobs < 0:
            assert generation.prompt_token_logprobs == generation.prompt_top_logprobs == []
        else:
            assert generation.prompt_token_logprobs[0] is None
            assert generation.prompt_top_logprobs[0] == []
            rows = exact[: len(prompt) - 1]
            expected = rows.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(generation.prompt_token_logprobs[1:]), expected, rtol=1e-4, atol=1e-4
            )
            same_tops(generation.prompt_top_logprobs[1:], rows, generation.prompt_logprobs)


def same_tops(tops: list[list[tuple[int, float]]], exact: torch.Tensor, n: int) -> None:
    values, tokens = exact.topk(n, dim=-1)
    for row, ids, logprobs in zip(tops, tokens.tolist(), values.tolist(), strict=True):
        assert [token for token, _ in row] == ids
        assert [value for _, value in row] == pytest.approx(logprobs, abs=1e-4)


def test_prompts_alone_are_told_of_under_the_one_shot_contract(models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    engine = Engine(decoder, config(40, max_num_seqs=1, one_shot=OneShotBudget(16, 8)))
    generations = requests(prompts()[:6], 0, task="prompt_logprobs", prompt_logprobs=0)
    for generation in generations:
        engine.submit(generation)
    assert len(drain(engine)) == 6
    for generation, prompt in zip(generations, prompts(), strict=False):
        following = torch.tensor(prompt[1:], dtype=torch.int64)[:, None]
        exact = expected_logprobs(peer, prompt)[:-1].gather(1, following)[:, 0]
        torch.testing.assert_close(torch.tensor(generation.prompt_token_logprobs[1:]), exact, rtol=1e-4, atol=1e-4)
        assert generation.output == []


def test_who_is_told_every_token_may_end_an_answer(models: tuple[Decoder, Any]) -> None:
    decoder, peer = models
    answer = expected(peer, prompts()[1], 12)
    heard: list[int] = []

    def third(token: int) -> bool:
        heard.append(token)
        return len(heard) >= 3

    engine = Engine(decoder, CONFIGS["plenty"])
    stopped = request(0, prompts()[1], 12, stop_check=third)
    served(engine, [stopped])
    assert (stopped.output, stopped.finish_reason, heard) == (answer[:3], "stop", answer[:3])

    heard.clear()
    patient = request(1, prompts()[1], 12, stop_check=third, min_tokens=5)
    served(engine, [patient])
    assert (patient.output, patient.finish_reason, heard) == (answer[:5], "stop", answer[:5])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    labels = {0: "bad", 1: "good", 2: "odd"}
    model = transformers.Qwen3ForSequenceClassification(
        transformers.Qwen3Config(**COMMON, id2label=labels, pad_token_id=0)
    ).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
    directory = tmp_path_factory.mktemp("classifier")
    model.save_pretrained(directory)
    return directory, model


@pytest.mark.parametrize("one_shot", [None, OneShotBudget(64, 8)], ids=["decode-shaped", "one-shot"])
def test_classes_are_those_of_transformers(one_shot: OneShotBudget | None, classifier: tuple[Path, Any]) -> None:
    directory, peer = classifier
    model = read_config(directory)
    assert model.labels == ("bad", "good", "odd")
    decoder = Decoder(model, load_weights(directory, model, torch.float32, "cpu"))
    tasks = ["classify", "embed", "rerank"]
    generations = [request(i, prompt, 0, task=tasks[i % 3]) for i, prompt in enumerate(prompts())]
    served(Engine(decoder, config(80, one_shot=one_shot)), generations)
    for generation, prompt in zip(generations, prompts(), strict=True):
        with torch.inference_mode():
            if generation.request.task == "embed":
                exact = peer.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            else:
                exact = peer(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.from_numpy(generation.pooled_output), exact, rtol=1e-4, atol=1e-4)


def test_a_classifier_gives_no_tokens(classifier: tuple[Path, Any]) -> None:
    model = read_config(classifier[0])
    engine = Engine(Decoder(model, random_weights(model, torch.float32, "cpu")), CONFIGS["plenty"])
    with pytest.raises(ValueError, match="request 7: expected a pooling task"):
        engine.submit(request(7, [1, 2], 3))
    with pytest.raises(ValueError, match="request 8: expected a pooling task"):
        engine.submit(request(8, [1, 2], 0, task="prompt_logprobs", prompt_logprobs=0))
    assert not engine.core.sequences


def test_label_names_have_numbers_from_0(classifier: tuple[Path, Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text((classifier[0] / "config.json").read_text().replace('"1": "good"', '"4": "good"'))
    with pytest.raises(BadInput, match="id2label"):
        read_config(file)
