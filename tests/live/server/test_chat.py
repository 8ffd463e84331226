"""/v1/chat/completions, as OpenAI's own client sees it and on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from live.models.decoder import Decoder
from live.tokenizer import Tokenizer
from tests.live.server.conftest import Setting, answer_alone

openai = pytest.importorskip("openai", reason="the extra [test] has OpenAI's client")

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
RENDERED = "[system]Be brief.\n[user]Why?\n[assistant]"


@pytest.fixture
def client(server: Setting) -> Iterator[Any]:
    """OpenAI's."""
    with openai.OpenAI(base_url=f"{server.client.base}/v1", api_key="none", max_retries=0, timeout=20) as openai_client:
        yield openai_client


@pytest.fixture
def expected(decoder: Decoder, folder: Path) -> str:
    """The greedy answer to `MESSAGES`, of 20 tokens."""
    words = Tokenizer(folder)
    return words.decode(answer_alone(decoder, words.encode(RENDERED), 20).output)


def test_a_chat(client: Any, expected: str) -> None:
    result = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=20, temperature=0)
    assert result.choices[0].message.content == expected
    assert result.choices[0].message.role == "assistant"
    assert result.choices[0].finish_reason == "length"
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(RENDERED), 20)


def test_a_streamed_chat_with_usage(client: Any, expected: str) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(RENDERED), 20)


def test_logprobs_of_a_chat(client: Any, decoder: Decoder, folder: Path) -> None:
    parameters = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True}
    result = client.chat.completions.create(**parameters, top_logprobs=3).choices[0].logprobs.content
    words = Tokenizer(folder)
    direct = answer_alone(decoder, words.encode(RENDERED), 5, logprobs=3)
    assert [row.logprob for row in result] == pytest.approx(direct.token_logprobs, abs=1e-5)
    assert [row.token for row in result] == [words.token_text(token) for token in direct.output]
    assert [bytes(row.bytes) for row in result] == [words.token_bytes(token) for token in direct.output]
    for row, tops in zip(result, direct.top_logprobs, strict=True):
        assert [top.logprob for top in row.top_logprobs] == pytest.approx([value for _, value in tops], abs=1e-5)
    stream = client.chat.completions.create(**parameters, stream=True)
    result = [chunk.choices[0].logprobs for chunk in stream]
    pieces = [row for logprobs in result if logprobs is not None for row in logprobs.content]
    assert [row.logprob for row in pieces] == pytest.approx(direct.token_logprobs, abs=1e-5)
    assert all(row.top_logprobs == [] for row in pieces)


def test_content_in_parts_and_several_answers(server: Setting, expected: str) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    joined = server.client.post("/tokenize", messages=[{"role": "user", "content": parts}]).document
    plain = server.client.post("/tokenize", messages=[{"role": "user", "content": "Wh\ny?"}]).document
    assert joined["tokens"] == plain["tokens"]
    result = server.client.post("/v1/chat/completions", messages=MESSAGES, n=3, max_tokens=20, temperature=0).document
    assert [choice["message"]["content"] for choice in result["choices"]] == [expected] * 3
    assert result["usage"]["completion_tokens"] == 60


def test_without_a_limit_an_answer_fills_the_context(server: Setting) -> None:
    parameters = {
        "messages": MESSAGES,
        "temperature": 0,
        "ignore_eos": True,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }
    result = server.client.post("/v1/chat/completions", **parameters).document
    assert result["usage"]["total_tokens"] == 256
    assert len(result["prompt_logprobs"]) == len(result["prompt_token_ids"]) == len(RENDERED)


def test_the_clients_own_completions_models_and_embeddings(client: Any) -> None:
    result = client.completions.create(model="tiny", prompt="go on", max_tokens=3, seed=1)
    assert result.usage.completion_tokens == 3
    assert [model.id for model in client.models.list()] == ["tiny"]
    (vector,) = client.embeddings.create(model="tiny", input="a text").data  # the client asks for base64
    (floats,) = client.embeddings.create(model="tiny", input="a text", encoding_format="float").data
    assert vector.embedding == pytest.approx(floats.embedding, abs=1e-5)
    assert len(floats.embedding) == 32


def test_the_client_raises_its_own_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="expected tiny"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, frequency_penalty=1.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 240}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_served_is_refused_by_name(server: Setting, fields: dict[str, Any], param: str) -> None:
    answer = server.client.post("/v1/chat/completions", **{"messages": MESSAGES, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def called_with(arguments: str) -> list[dict[str, Any]]:
    """A chat in which the assistant has called a function with these arguments."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


DEEP = "expected arguments of tool calls that are nested less deeply"
SURROGATES = "expected text without lone surrogates"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("[" * 100_000 + "]" * 100_000, DEEP),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, DEEP),
        ('{"a":"\\ud800"}', SURROGATES),
        ('{"\\udfff":1}', SURROGATES),
        ('{"refuse":"why \\ud800"}', "expected messages that the chat template accepts (why ?)"),
    ],
    ids=["list", "object", "value", "key", "the template's own words"],
)
def test_arguments_that_no_template_can_print_are_refused(
    server: Setting, path: str, arguments: str, expected: str
) -> None:
    answer = server.client.post(path, messages=called_with(arguments))
    assert (answer.status, answer.error["message"], answer.error["param"]) == (400, f"messages: {expected}", "messages")


@pytest.mark.parametrize("arguments", ['{"a": [1]}', "not JSON", "[1, 2]", ""])
def test_arguments_reach_the_template(server: Setting, folder: Path, arguments: str) -> None:
    result = server.client.post("/tokenize", messages=called_with(arguments), add_generation_prompt=False).document
    printed = {"not JSON": '"not JSON"', "[1, 2]": '"[1, 2]"', "": "{}"}.get(arguments, arguments)
    assert Tokenizer(folder).decode(result["tokens"]) == f"[assistant]{printed}\n"


LONE = '"\\ud800"'
BODIES = {
    "/v1/completions": [
        '{"prompt":%s}',
        '{"prompt":[%s]}',
        '{"prompt":"a","stop":%s}',
        '{"prompt":"a","cache_salt":%s}',
    ],
    "/v1/chat/completions": [
        '{"messages":[{"role":"user","content":%s}]}',
        '{"messages":[{"role":"user","content":"a"}],"tools":[{"a":%s}]}',
    ],
    "/v1/embeddings": ['{"input":%s}', '{"input":[%s]}'],
    "/rerank": [
        '{"query":%s,"documents":["a"]}',
        '{"query":"a","documents":[%s]}',
        '{"query":"a","documents":[{"text":%s}]}',
    ],
    "/score": ['{"text_1":"a","text_2":%s}'],
    "/tokenize": ['{"prompt":%s}', '{"prompt":"a","model":%s}', '{"prompt":"a","nobody knows":%s}'],
    "/detokenize": ['{"tokens":%s}'],
}


@pytest.mark.parametrize("value", [LONE, "[" * 100_000 + "]" * 100_000, "9" * 5000], ids=["surrogate", "deep", "long"])
def test_what_json_cannot_hold_is_refused_wherever_it_is(server: Setting, value: str) -> None:
    for path, bodies in BODIES.items():
        for body in bodies:
            answer = server.client.send("POST", path, (body % value).encode(), {"content-type": "application/json"})
            assert (answer.status, answer.error["code"]) == (400, "invalid_body"), (path, body)
            assert answer.error["message"].count("\n") == 0
