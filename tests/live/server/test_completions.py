"""/v1/completions: the answers are the engine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sampling import SamplingParams
from live.models.decoder import Decoder
from live.server import request_state
from live.tokenizer import Tokenizer
from tests.live.server.conftest import VOCABULARY, Setting, answer_alone, running

PROMPT = [72, 5, 33, 120, 7, 61, 200, 4, 18]
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ids(answer: Any) -> list[list[int]]:
    """Token ids of the choices."""
    assert answer.status == 200, answer.body
    return [choice["token_ids"] for choice in answer.document["choices"]]


def test_an_answer_is_the_engines_and_so_is_a_streams(server: Setting, decoder: Decoder) -> None:
    expected = answer_alone(decoder, PROMPT, 24).output
    assert len(set(expected)) > 3, "too dull to tell answers apart"
    full = server.client.post("/v1/completions", prompt=PROMPT, max_tokens=24, **GREEDY)
    assert ids(full) == [expected]
    choice = full.document["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert full.document["usage"] == {"prompt_tokens": 9, "completion_tokens": 24, "total_tokens": 33}
    pieces = list(server.client.events("/v1/completions", prompt=PROMPT, max_tokens=24, **GREEDY))
    assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == expected
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == choice["text"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert len({piece["id"] for piece in pieces}) == 1
    middle, last = pieces[1], pieces[-1]
    assert [list(middle), list(middle["choices"][0])] == [list(last), list(last["choices"][0])]


def test_a_stream_counts_tokens_where_asked(server: Setting) -> None:
    body = {"prompt": "abc", "max_tokens": 5, **GREEDY, "stream_options": {"include_usage": True}}
    *pieces, last = server.client.events("/v1/completions", **body)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert all(piece["usage"] is None and piece["choices"] for piece in pieces)


def test_the_defaults_are_openais(server: Setting) -> None:
    answer = server.client.post("/v1/completions", prompt="hello", ignore_eos=True, temperature=None, n=None)
    assert answer.document["usage"]["completion_tokens"] == 16
    assert answer.document["model"] == "tiny"


def test_batches_of_texts_and_of_ids(server: Setting, decoder: Decoder, folder: Path) -> None:
    texts = ["one", "and another", "é"]
    tokens = [Tokenizer(folder).encode(text) for text in texts]
    expected = [answer_alone(decoder, prompt, 6).output for prompt in tokens]
    for prompt in (texts, tokens):
        answer = server.client.post("/v1/completions", prompt=prompt, max_tokens=6, **GREEDY)
        assert ids(answer) == expected
        assert [choice["index"] for choice in answer.document["choices"]] == [0, 1, 2]
        assert answer.document["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_seeds_and_n(server: Setting, decoder: Decoder) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    sampling = {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11}
    expected = [
        answer_alone(
            decoder, PROMPT, 12, sampling_params=SamplingParams(1.3, top_k=40, top_p=0.9, min_p=0.01, seed=11 + i)
        ).output
        for i in range(3)
    ]
    assert ids(server.client.post("/v1/completions", n=3, **body, **sampling)) == expected
    pieces = server.client.events("/v1/completions", n=3, **body, **sampling)
    streamed: list[list[int]] = [[], [], []]
    for piece in pieces:
        for choice in piece["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
    assert streamed == expected
    unseeded = {tuple(ids(server.client.post("/v1/completions", **body))[0]) for _ in range(3)}
    assert len(unseeded) > 1
    negative = server.client.post("/v1/completions", **body, seed=-5)
    assert ids(negative) == [answer_alone(decoder, PROMPT, 12, sampling_params=SamplingParams(seed=-5 % 2**64)).output]


def stop_in(text: str, tokens: list[int], words: Tokenizer) -> tuple[str, int]:
    """Two letters that stand in a text once, each a token of its own, and the tokens up to their end."""
    for i in range(3, len(tokens) - 3):
        letters = words.decode(tokens[i : i + 2])
        if len(letters) == 2 and letters.isascii() and letters.isprintable() and text.count(letters) == 1:
            return letters, i + 2
    raise AssertionError("another seed, please")


def test_stop_strings_end_an_answer_and_are_not_in_it(server: Setting, folder: Path) -> None:
    body = {"prompt": "A tale", "max_tokens": 60, "ignore_eos": True, "seed": 5, "return_token_ids": True}
    full = server.client.post("/v1/completions", **body).document["choices"][0]
    text = full["text"]
    stop, count = stop_in(text, full["token_ids"], Tokenizer(folder))
    end = text.index(stop)
    for stops in (stop, ["\x00never", stop]):
        answer = server.client.post("/v1/completions", **body, stop=stops).document
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:end], "stop", stop)
        assert answer["usage"]["completion_tokens"] == count
        pieces = [piece["choices"][0] for piece in server.client.events("/v1/completions", **body, stop=stops)]
        assert "".join(piece["text"] for piece in pieces) == text[:end]
        assert pieces[-1]["stop_reason"] == stop
    with_stop = server.client.post("/v1/completions", **body, stop=stop, include_stop_str_in_output=True).document
    assert with_stop["choices"][0]["text"] == text[: end + 2]
    # One that is whole too early does not count, and is text like any other.
    patient = server.client.post("/v1/completions", **body, stop=stop, min_tokens=count + 1).document
    assert text.startswith(patient["choices"][0]["text"])
    assert len(patient["choices"][0]["text"]) >= end + 2
    assert patient["usage"]["completion_tokens"] > count


def test_end_tokens_end_an_answer_unless_told_otherwise(server: Setting, decoder: Decoder) -> None:
    expected = answer_alone(decoder, PROMPT, 24).output
    end = expected[5]
    first = expected.index(end)
    body = {"prompt": PROMPT, "max_tokens": 24, **GREEDY, "stop_token_ids": [end]}
    answer = server.client.post("/v1/completions", **body)
    assert ids(answer) == [expected[: first + 1]]
    choice = answer.document["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", end)
    patient = ids(server.client.post("/v1/completions", **body, min_tokens=first + 2))[0]
    assert patient == expected[: len(patient)]
    assert len(patient) > first + 1


def test_the_models_own_end_token(decoder: Decoder, folder: Path, server: Setting) -> None:
    eos = Tokenizer(folder).eos
    assert eos is not None
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 2.0, "return_token_ids": True}
    sampling = [output for first in (0, 100) for output in ids(
        server.client.post("/v1/completions", **body, n=100, seed=first, ignore_eos=True)
    )]  # fmt: skip
    seed = next(i for i, output in enumerate(sampling) if eos in output[:8])
    output = sampling[seed]
    assert (
        output == answer_alone(decoder, PROMPT, 12, sampling_params=SamplingParams(temperature=2.0, seed=seed)).output
    )
    body["seed"] = seed
    answer = server.client.post("/v1/completions", **body)
    assert ids(answer) == [output[: output.index(eos) + 1]]
    choice = answer.document["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert "<eos>" not in choice["text"]
    assert (
        "<eos>"
        in server.client.post("/v1/completions", **body, skip_special_tokens=False).document["choices"][0]["text"]
    )
    assert ids(server.client.post("/v1/completions", **body, ignore_eos=True)) == [output]


def direct_logprobs(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocabulary): of each position by what stands before it, without cache, scheduler or sampler."""
    from live.models.decoder import Inputs, PagedCache

    count = len(tokens)
    cache = PagedCache.allocate(decoder.config, count, 1, torch.float32, "cpu")
    places = torch.arange(count)
    full = torch.tensor([0, count], dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.int32)
    inputs = Inputs(
        torch.tensor(tokens), places, places, torch.zeros((0, 0), dtype=torch.int32), empty,
        places.int()[None], full, torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    with torch.inference_mode():
        return decoder.logits(decoder.normed(decoder.forward(inputs, cache))).log_softmax(dim=-1)


def test_logprobs_and_echo_are_those_of_a_forward_pass(server: Setting, decoder: Decoder) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, **GREEDY, "logprobs": 3}
    output = answer_alone(decoder, PROMPT, 6).output
    table = direct_logprobs(decoder, PROMPT + output)
    expected_logprobs = [float(table[i, token]) for i, token in enumerate((PROMPT + output)[1:])]
    plain = server.client.post("/v1/completions", **body).document["choices"][0]["logprobs"]
    assert plain["token_logprobs"] == pytest.approx(expected_logprobs[len(PROMPT) - 1 :], abs=1e-4)
    echoed = server.client.post("/v1/completions", **body, echo=True).document["choices"][0]
    result = echoed["logprobs"]
    assert result["token_logprobs"][0] is None
    assert result["top_logprobs"][0] is None
    assert result["token_logprobs"][1:] == pytest.approx(expected_logprobs, abs=1e-4)
    assert result["tokens"][-6:] == plain["tokens"]
    for row, by_text, token in zip(table, result["top_logprobs"][1:], result["tokens"][1:], strict=False):
        assert max(by_text.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert token in by_text
        assert 1 <= len(by_text) <= 4
    assert result["text_offset"][:3] == [0, len(result["tokens"][0]), len(result["tokens"][0] + result["tokens"][1])]
    pieces = [piece["choices"][0] for piece in server.client.events("/v1/completions", **body, echo=True)]
    assert "".join(piece["text"] for piece in pieces) == echoed["text"]
    for name in result:
        assert [entry for piece in pieces for entry in piece["logprobs"][name]] == result[name], name


def test_a_prompt_alone_is_told_its_logprobs(server: Setting, decoder: Decoder) -> None:
    table = direct_logprobs(decoder, PROMPT)
    expected_logprobs = [float(table[i, token]) for i, token in enumerate(PROMPT[1:])]
    answer = server.client.post("/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0).document
    result = answer["choices"][0]["logprobs"]
    assert result["token_logprobs"][1:] == pytest.approx(expected_logprobs, abs=1e-4)
    assert all(len(entry) == 1 for entry in result["top_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompt_logprobs_as_vllm_tells_them(server: Setting, decoder: Decoder) -> None:
    table = direct_logprobs(decoder, PROMPT)
    answer = server.client.post("/v1/completions", prompt=PROMPT, max_tokens=2, prompt_logprobs=2).document
    first, *tail = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for row, token, result in zip(table, PROMPT[1:], tail, strict=False):
        assert result[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        best = str(int(row.argmax()))
        assert result[best]["rank"] == 1
        assert result[best]["decoded_token"]


def test_a_salt_keeps_caches_apart_and_changes_no_answer(server: Setting) -> None:
    core = server.engine.core
    body = {"prompt": list(range(90, 130)), "max_tokens": 4, **GREEDY}
    first = ids(server.client.post("/v1/completions", **body))
    before = core.cached_tokens
    assert ids(server.client.post("/v1/completions", **body)) == first
    assert core.cached_tokens > before
    before = core.cached_tokens
    assert ids(server.client.post("/v1/completions", **body, cache_salt="mine")) == first
    assert core.cached_tokens == before


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stop_tables_are_built_once_for_all_answers(
    server: Setting, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[str] = []
    real = request_state._borders

    def counted(text: str) -> list[int]:
        tables.append(text)
        return real(text)

    monkeypatch.setattr(request_state, "_borders", counted)
    strings = [f"{i:02}" * 512 for i in range(16)]
    body = {"prompt": ["a", "b"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    answer = server.client.post(path, **body, max_tokens=2, n=8, stop=strings)
    assert (answer.status, len(answer.document["choices"])) == (200, 8 * len(body.get("prompt", "a")))
    assert tables == strings


def test_without_a_tokenizer_ids_go_in_and_come_out(decoder: Decoder) -> None:
    with running(decoder, None) as setting:
        client = setting.client
        answer = client.post("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=1)
        choice = answer.document["choices"][0]
        assert choice["token_ids"] == answer_alone(decoder, PROMPT, 5).output
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"
        pieces = list(client.events("/v1/completions", prompt=PROMPT, max_tokens=5, temperature=0))
        assert [token for piece in pieces for token in piece["choices"][0]["token_ids"]] == choice["token_ids"]
        for path, fields in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": [1], "stop": "x"}),
            ("/tokenize", {"prompt": "text"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ):
            refused = client.post(path, **fields)
            assert refused.status == 400
            assert "no tokenizer" in refused.error["message"]
        assert client.post("/v1/embeddings", input=[1, 2]).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [VOCABULARY]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1] * 257}, "prompt"),
        ({"prompt": [1] * 250, "max_tokens": 7}, "max_tokens"),
        ({"prompt": [1], "max_tokens": "5"}, "max_tokens"),
        ({"prompt": [1], "max_tokens": -1}, "max_tokens"),
        ({"prompt": [1], "temperature": -0.1}, "temperature"),
        ({"prompt": [1], "top_p": 0}, "top_p"),
        ({"prompt": [1], "n": 0}, "n"),
        ({"prompt": [1], "logprobs": 21}, "logprobs"),
        ({"prompt": [1], "stop": ""}, "stop"),
        ({"prompt": [1], "stop": [1]}, "stop"),
        ({"prompt": [1], "stop": "a" * 1025}, "stop"),
        ({"prompt": [1], "stop": ["a", "a" * 1025]}, "stop"),
        ({"prompt": [1], "stop": ["a"] * 17}, "stop"),
        ({"prompt": [1], "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"prompt": [1], "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"prompt": [1], "presence_penalty": 1}, "presence_penalty"),
        ({"prompt": [1], "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"prompt": [1], "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": [1], "best_of": 2}, "best_of"),
        ({"prompt": [1], "suffix": "end"}, "suffix"),
        ({"prompt": [1], "guided_json": {}}, "guided_json"),
        ({"prompt": [1], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": [1], "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_served_is_refused_by_name(server: Setting, fields: dict[str, Any], param: str) -> None:
    answer = server.client.post("/v1/completions", **fields)
    assert (answer.status, answer.error["param"], answer.error["type"]) == (400, param, "invalid_request_error")
    assert param in answer.error["message"]
    assert "\n" not in answer.error["message"]


def test_neutral_values_of_what_is_not_served_are_taken(server: Setting) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "best_of": 1,
    }
    body = {"prompt": [1], "max_tokens": 1, "suffix": None, "guided_json": None, "never_heard_of": [1], "user": "me"}
    assert server.client.post("/v1/completions", **body, **neutral).status == 200
