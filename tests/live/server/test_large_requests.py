"""Requests that take long to read and to encode: bounded, and out of the way of others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.server.app import LARGE
from live.server.endpoints import MAX_TOKENS
from live.server.protocol import MAX_CONTAINERS, has_too_many_containers
from tests.live.server.conftest import Setting, config, running, write_model
from tests.live.server.test_life import eventually
from tests.live.server.wire import Answer

LONG = "a" * LARGE


@pytest.fixture(scope="module")
def small(decoder: Decoder, folder: Path) -> Iterator[Setting]:
    """A server with room for three generations."""
    engine = config(max_num_seqs=2)
    with running(decoder, folder, engine=engine, max_queue=1) as setting:
        yield setting
        assert setting.settled()


class Held:
    """A method of the server's tokenizer that waits until it is let go."""

    def __init__(self, setting: Setting, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = setting.service.inputs.tokenizer
        self.client = setting.client
        self.real = getattr(tokenizer, method)
        self.begun = threading.Event()
        self.go = threading.Event()
        monkeypatch.setattr(tokenizer, method, self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.begun.set()
        assert self.go.wait(10)
        return self.real(*args, **keywords)

    def answer(self, path: str, fields: dict[str, Any]) -> Answer:
        """The answer to a request, while which the server answers others."""
        with ThreadPoolExecutor() as pool:
            held = pool.submit(self.client.post, path, **fields)
            assert self.begun.wait(10)
            assert self.client.get("/health").status == 200
            self.go.set()
            return held.result(10)


@pytest.mark.parametrize(
    ("path", "fields", "method"),
    [
        ("/tokenize", {"prompt": LONG, "return_token_strs": True}, "encode"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "encode"),
        ("/detokenize", {"tokens": [1] * LARGE}, "decode"),
        ("/v1/completions", {"prompt": LONG}, "encode"),
        ("/v1/completions", {"prompt": [LONG, "a"]}, "encode"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "encode"),
        ("/v1/embeddings", {"input": LONG}, "encode"),
        ("/pooling", {"input": [LONG]}, "encode"),
        ("/score", {"text_1": LONG, "text_2": "a"}, "encode"),
        ("/rerank", {"query": "a", "documents": [LONG]}, "encode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_others_are_served_while_a_large_request_is_encoded(
    server: Setting, path: str, fields: dict[str, Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Held(server, method, monkeypatch).answer(path, fields)
    assert answer.status == (200 if path.endswith("tokenize") and "messages" not in fields else 400)


def test_pairs_for_a_classification_head_are_encoded_in_a_thread_too(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(write_model(tmp_path / "judge", labels=1))
    judge = Decoder(config, random_weights(config, decoder.weights.embedding.dtype, "cpu", seed=3))
    with running(judge, tmp_path / "judge") as setting:
        fields = {"query": "q", "documents": ["a"] * 5, "unknown": LONG}
        answer = Held(setting, "encode", monkeypatch).answer("/rerank", fields)
        assert [row["document"]["text"] for row in answer.document["results"]] == ["a"] * 5


def test_room_is_looked_for_again_after_encoding(small: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    holding = Held(small, "encode", monkeypatch)
    fields = {"prompt": "a", "n": 2, "max_tokens": 200, "ignore_eos": True, "unknown": LONG}
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(small.client.post, "/v1/completions", **fields) for _ in range(2)]
        assert eventually(lambda: small.stopping.app.in_flight == 2)
        holding.go.set()
        assert sorted(answer.result(20).status for answer in answers) == [200, 503]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_too_many_prompts_are_refused_before_they_are_encoded(
    small: Setting, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small.service.inputs.tokenizer, "encode", None)
    answer = small.client.post(path, **{"prompt" if "completions" in path else "input": ["a"] * 4})
    assert (answer.status, answer.error["message"]) == (400, "expected at most 3 prompts times n, found 4")


def test_a_text_of_too_many_tokens(server: Setting) -> None:
    for path, fields in (
        ("/tokenize", {"prompt": "a" * (MAX_TOKENS + 1)}),
        ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}),
    ):
        answer = server.client.post(path, **fields)
        name = next(iter(fields))
        expected = f"{name}: expected at most {MAX_TOKENS} tokens, found {MAX_TOKENS + 1}"
        assert (answer.status, answer.error["message"]) == (400, expected)
    result = server.client.post("/tokenize", prompt="a" * MAX_TOKENS, return_token_strs=True)
    assert (result.status, result.document["count"]) == (200, MAX_TOKENS)
    assert len(result.document["token_strs"]) == MAX_TOKENS


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": ["a"] * 16385}, "prompt"),
        ("/v1/completions", {"prompt": [[1]] * 16385}, "prompt"),
        ("/v1/completions", {"prompt": [1] * (2**20 + 1)}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 4097}, "messages"),
        ("/rerank", {"query": "a", "documents": ["a"] * 16385}, "documents"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 16385}, "text_2"),
    ],
    ids=["texts", "batch", "ids", "messages", "documents", "pairs"],
)
def test_lists_have_bounds(server: Setting, path: str, fields: dict[str, Any], param: str) -> None:
    answer = server.client.post(path, **fields)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "invalid_body")
    assert "item" in answer.error["message"]


def test_a_body_of_too_many_lists_and_objects(server: Setting) -> None:
    body = b'{"prompt": "a", "unknown": [%s[]]}' % (b"[]," * MAX_CONTAINERS)
    answer = server.client.send("POST", "/tokenize", body, {"content-type": "application/json"})
    message = f"expected at most {MAX_CONTAINERS} lists and objects in the body"
    assert (answer.status, answer.error["message"], answer.error["code"]) == (400, message, "invalid_body")
    assert server.client.post("/tokenize", prompt='[{"\\' * MAX_CONTAINERS).status == 200


@pytest.mark.parametrize("text", ["[", "{[", '"[', '\\"[', '\\\\"[{', "é[\n"])
def test_brackets_in_strings_are_text(text: str) -> None:
    inside = json.dumps({"a": text * (2 * MAX_CONTAINERS)}).encode()
    assert not has_too_many_containers(inside)
    assert has_too_many_containers(b"[%s]" % b",".join([json.dumps([text]).encode()] * MAX_CONTAINERS))
    assert not has_too_many_containers(b"[%s]" % b",".join([json.dumps([text]).encode()] * (MAX_CONTAINERS - 1)))
