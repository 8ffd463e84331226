"""Streamed text against the whole answer's, decoded at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from live.server.request_state import StopStrings, TextStream
from live.tokenizer import Tokenizer
from tests.live.text.making import write_byte_fallback


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("fallback")
    write_byte_fallback(directory)
    return {"byte-level": Tokenizer(tokenizer_folder), "byte-fallback": Tokenizer(directory)}


def stream_of(tokenizer: Tokenizer, stops: list[str], **params: Any) -> TextStream:
    return TextStream(tokenizer, StopStrings(stops) if stops else None, **params)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the shortest beginning of the text that ends with a stop, and of several the longest stop."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@given(data=st.data(), include=st.booleans(), skip=st.booleans())
def test_pushes_add_up_to_the_whole_answer_cut_at_its_first_stop(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject, include: bool, skip: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 2), max_size=60))
    full = tokenizer.decode(ids, skip_special=skip)
    parts = st.integers(0, max(len(full) - 1, 0)).flatmap(
        lambda start: st.integers(start + 1, start + 6).map(lambda end: full[start:end])
    )
    stops = data.draw(st.lists((st.text("ab é", max_size=3) | parts).filter(bool), max_size=3))
    stream = stream_of(tokenizer, stops, include_stop_str_in_output=include, skip_special_tokens=skip)
    expected, stop = cut(full, stops, include)
    text_so_far = ""
    for token in ids:
        text_so_far += stream.push(token)
        assert expected.startswith(text_so_far)
    assert text_so_far + stream.finish() == expected
    assert stream.stopped == stop
    if stop is not None:
        assert (stream.push(ids[0]), stream.finish()) == ("", "")


@given(text=st.text("ab", max_size=40), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_exactly_what_may_become_a_stop_is_held(text: str, stops: list[str]) -> None:
    search = StopStrings(stops).search()
    for i, character in enumerate(text, start=1):
        if search.feed(character) is not None:
            break
        begun = [size for stop in stops for size in range(len(stop)) if text[:i].endswith(stop[:size])]
        assert search.pending == max(begun)


@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3),
    part=st.integers(1, 9),
)
def test_a_stop_does_not_depend_on_how_the_text_comes(text: str, stops: list[str], part: int) -> None:
    search = StopStrings(stops).search()
    for start in range(0, len(text), part):
        if (match := search.feed(text[start : start + part])) is not None:
            assert (text[: start + match[0]], match[1]) == cut(text, stops, include=True)
            return
    assert cut(text, stops, include=True) == (text, None)


@given(
    parts=st.lists(st.tuples(st.text("ab", max_size=4), st.booleans()), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_what_is_whole_where_it_does_not_count_is_passed_over(parts: list[tuple[str, bool]], stops: list[str]) -> None:
    search, text = StopStrings(stops).search(), ""
    for part, counts in parts:
        ends = range(len(text) + 1, len(text) + len(part) + 1)
        text += part
        match = search.feed(part, counts)
        expected = [end for end in ends if counts and any(text[:end].endswith(stop) for stop in stops)]
        assert (match is None) == (not expected)
        if match is not None:
            end = expected[0]
            assert len(text) - len(part) + match[0] == end
            assert match[1] == max((stop for stop in stops if text[:end].endswith(stop)), key=len)
            return
        assert search.pending == max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


def test_a_stop_counts_from_the_min_tokens_on(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = [tokenizer.encode(character)[0] for character in "ENDxENDy"]
    for min_tokens, text in ((0, ""), (3, ""), (4, "ENDx"), (7, "ENDx"), (8, "ENDxENDy")):
        stream = stream_of(tokenizer, ["END"], min_tokens=min_tokens)
        assert "".join(map(stream.push, ids)) + stream.finish() == text
    # One that begins before and becomes whole after them counts too.
    stream = stream_of(tokenizer, ["END"], min_tokens=2)
    assert ["".join(map(stream.push, ids)), stream.stopped] == ["", "END"]


def test_a_character_waits_for_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("a今b")
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["a", "", "", "今", "b"]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids[:2]] == ["a", ""]
    assert stream.finish() == "�"


def test_a_run_of_bytes_waits_for_what_ends_it(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-fallback"]
    run = [3 + byte for byte in "é水".encode()]
    after = tokenizer.encode("a", special=False)[-1]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in [*run, after]] == ["", "", "", "", "", "é水a"]
    broken = [*run, 3 + 0xFF, after]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, broken)) == tokenizer.decode(broken) == "������a"


def test_a_stop_over_token_boundaries(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = [tokenizer.encode(character)[0] for character in "xENE ENDy"]
    stream = stream_of(tokenizer, ["END"])
    assert [stream.push(token) for token in ids] == ["x", "", "", "EN", "E ", "", "", "", ""]
    assert (stream.stopped, stream.finish()) == ("END", "")
    stream = stream_of(tokenizer, ["END"], include_stop_str_in_output=True)
    assert "".join(map(stream.push, ids)) == "xENE END"


def test_special_tokens_are_text_only_if_asked_for(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("a<|im_end|><think>")
    assert "".join(map(TextStream(tokenizer).push, ids)) == "a<think>"
    stream = stream_of(tokenizer, ["_end|>"], skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) == "a<|im"
