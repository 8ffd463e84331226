"""Embeddings, scores, rankings and classes, beside what the engine gives when it is called directly."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.tokenizer import Tokenizer
from tests.live.server.conftest import Setting, answer_alone, running, write_model

TEXTS = ["a text", "another", "the third of them"]


@pytest.fixture(params=[1, 3], scope="module")
def labelled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Setting, Decoder]]:
    """A model with this many labels, served."""
    folder = write_model(tmp_path_factory.mktemp("labels") / "tiny", labels=request.param)
    config = read_config(folder)
    decoder = Decoder(config, random_weights(config, torch.float32, "cpu", seed=5))
    with running(decoder, folder) as setting:
        yield setting, decoder


def pooled(decoder: Decoder, words: Tokenizer, text: str, task: str = "embed") -> np.ndarray:
    """The pooled output of a text, computed alone."""
    values = answer_alone(decoder, words.encode(text), 0, task=task).pooled_output
    assert values is not None
    return values


def test_embeddings_have_length_one(server: Setting, decoder: Decoder, folder: Path) -> None:
    words = Tokenizer(folder)
    result = server.client.post("/v1/embeddings", input=TEXTS).document
    assert result["usage"]["prompt_tokens"] == sum(len(words.encode(text)) for text in TEXTS)
    for i, text in enumerate(TEXTS):
        state = pooled(decoder, words, text)
        assert result["data"][i]["index"] == i
        assert result["data"][i]["embedding"] == pytest.approx(list(state / np.linalg.norm(state)), abs=1e-5)
    packed = server.client.post("/v1/embeddings", input=TEXTS, encoding_format="base64", dimensions=32).document
    for plain, second in zip(result["data"], packed["data"], strict=True):
        numbers = np.frombuffer(base64.b64decode(second["embedding"]), dtype="<f4")
        assert list(numbers) == pytest.approx(plain["embedding"], abs=1e-6)
    ids = [words.encode(text) for text in TEXTS]
    again = server.client.post("/v1/embeddings", input=ids).document
    assert again["data"][1]["embedding"] == pytest.approx(result["data"][1]["embedding"], abs=1e-5)


def test_pooling_gives_the_state_as_it_is(server: Setting, decoder: Decoder, folder: Path) -> None:
    result = server.client.post("/pooling", input=TEXTS[0]).document
    assert result["data"][0]["data"] == pytest.approx(list(pooled(decoder, Tokenizer(folder), TEXTS[0])), abs=1e-5)


def cosine(first: np.ndarray, right: np.ndarray) -> float:
    """The cosine of two vectors."""
    return float(first @ right / np.linalg.norm(first) / np.linalg.norm(right))


def test_scores_without_a_head_are_cosines(server: Setting, decoder: Decoder, folder: Path) -> None:
    words = Tokenizer(folder)
    states = [pooled(decoder, words, text) for text in TEXTS]
    expected = [cosine(states[0], second) for second in states]
    for path in ("/score", "/v1/score"):
        result = server.client.post(path, text_1=TEXTS[0], text_2=TEXTS).document
        assert [entry["score"] for entry in result["data"]] == pytest.approx(expected, abs=1e-5)
    pairs = server.client.post("/score", text_1=TEXTS, text_2=TEXTS[::-1]).document
    assert pairs["data"][0]["score"] == pytest.approx(expected[2], abs=1e-5)
    for path in ("/rerank", "/v1/rerank"):
        documents = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0]]
        result = server.client.post(path, query=TEXTS[0], documents=documents, top_n=2).document
        assert [entry["index"] for entry in result["results"]] == [2, 0 if expected[1] > expected[2] else 1]
        assert result["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
        assert result["results"][0]["document"]["text"] == TEXTS[0]


def test_a_head_tells_classes_and_scores(labelled: tuple[Setting, Decoder]) -> None:
    setting, decoder = labelled
    words, client = setting.service.inputs.tokenizer, setting.client
    assert words is not None
    logits = [pooled(decoder, words, text, "classify") for text in TEXTS]
    result = client.post("/classify", input=TEXTS).document
    for entry, row in zip(result["data"], logits, strict=True):
        powers = np.exp(row - row.max())
        expected = powers / powers.sum() if len(row) > 1 else 1 / (1 + np.exp(-row))
        assert entry["probs"] == pytest.approx(list(expected), abs=1e-5)
        assert entry["label"] == f"label {int(np.argmax(row))}"
        assert entry["num_classes"] == len(row)
    assert client.post("/pooling", input=TEXTS[0]).document["data"][0]["data"] == pytest.approx(
        list(logits[0]), abs=1e-5
    )
    scored = client.post("/score", text_1=TEXTS[0], text_2=TEXTS[1])
    if len(logits[0]) == 1:
        logit = pooled(decoder, words, TEXTS[0] + TEXTS[1], "score")[0]
        assert scored.document["data"][0]["score"] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
        ranked = client.post("/rerank", query=TEXTS[0], documents=TEXTS).document["results"]
        scores = [entry["relevance_score"] for entry in ranked]
        assert scores == sorted(scores, reverse=True)
    else:
        assert (scored.status, scored.error["param"]) == (400, "model")
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        refused = client.post(path, **fields)
        assert refused.status == 400
        assert "classification model" in refused.error["message"]


def test_what_cannot_be_pooled_is_refused(server: Setting) -> None:
    for path, fields, param in (
        ("/classify", {"input": "a"}, "model"),
        ("/v1/embeddings", {"input": "a", "dimensions": 16}, "dimensions"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["x" * 300]}, "documents"),
    ):
        answer = server.client.post(path, **fields)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
