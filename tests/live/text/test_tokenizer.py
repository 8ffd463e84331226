"""Encoding, decoding, and what a single token writes, against `tokenizers` itself."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from live.tokenizer import LONG, Tokenizer, check_texts
from tests.live.text.making import VOCABULARY, write_byte_fallback
from workloads.errors import BadInput


@pytest.fixture(scope="module")
def byte_level(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer(tokenizer_folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("fallback")
    write_byte_fallback(directory)
    return Tokenizer(directory)


def copied(folder: Path, to: Path, file: str = "tokenizer.json", **changes: object) -> Path:
    """A tokenizer's directory, with top-level fields of one file changed."""
    for row in folder.iterdir():
        (to / row.name).write_bytes(row.read_bytes())
    document = json.loads((to / file).read_text()) if (to / file).exists() else {}
    (to / file).write_text(json.dumps(document | changes))
    return to


def test_special_tokens_are_known_by_name_and_by_id(byte_level: Tokenizer, fallback: Tokenizer) -> None:
    assert (byte_level.size, byte_level.bos, byte_level.eos) == (VOCABULARY, None, 318)
    assert byte_level.special == {316, 317, 318}
    assert (fallback.bos, fallback.eos, fallback.special) == (1, 2, {0, 1, 2})
    assert byte_level.encode("<|im_start|>a<think>") == [317, *byte_level.encode("a"), 319]
    assert byte_level.decode([317, 319, 318]) == "<think>"
    assert byte_level.decode([317, 319, 318], skip_special=False) == "<|im_start|><think><|im_end|>"


def test_a_text_is_begun_only_if_that_is_asked_for(fallback: Tokenizer) -> None:
    plain = fallback.encode("the engine", special=False)
    assert fallback.encode("the engine") == [1, *plain]
    assert 1 not in plain


def test_end_tokens_are_joined_from_two_files(tokenizer_folder: Path, tmp_path: Path) -> None:
    directory = copied(tokenizer_folder, tmp_path, "generation_config.json", eos_token_id=[316, 318])
    assert Tokenizer(directory).end_tokens == {316, 318}


def test_a_name_is_looked_for_in_the_older_file_too(tokenizer_folder: Path, tmp_path: Path) -> None:
    directory = copied(tokenizer_folder, tmp_path, "special_tokens_map.json", bos_token={"content": "<|im_start|>"})
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|im_start|>"}, "eos_token": "x"}')
    tokenizer = Tokenizer(directory)
    assert (tokenizer.bos, tokenizer.eos) == (317, 318)  # tokenizer_config.json names another eos_token, and goes first


def test_long_texts_have_the_ids_of_their_parts(
    tokenizer_folder: Path, fallback: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    for fast in (False, True):
        monkeypatch.setitem(sys.modules, "fastokens", sys.modules.get("fastokens") if fast else None)
        tokenizer = Tokenizer(tokenizer_folder)
        for text in ("ab é今 <|im_start|>\n" * LONG, "a" * (LONG - 1), "a" * LONG):
            ids = tokenizer.encode(text)
            assert ids == trusted.encode(text).ids
            assert tokenizer.decode(ids, skip_special=False) == text
    with pytest.raises(BadInput, match="surrogates"):
        fallback.encode("a\ud800" * LONG)


def test_both_encoders_give_the_same_ids(tokenizer_folder: Path) -> None:
    pytest.importorskip("fastokens")
    tokenizer = Tokenizer(tokenizer_folder)
    assert tokenizer.fast
    peer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    for text in check_texts(["<think>"], seed=1):  # other texts than those that it was checked with
        assert tokenizer.encode(text) == peer.encode(text).ids


def test_an_encoder_that_differs_once_is_not_used(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Differs:
        def __init__(self, document: str) -> None:
            self.peer: Any = tokenizers.Tokenizer.from_str(document)
            self.no_truncation = self.no_padding = lambda: None

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            ids = self.peer.encode(text, add_special_tokens=add_special_tokens).ids
            return SimpleNamespace(ids=ids[:-1] if "👩‍🚀" in text else ids)

    def from_json_str(document: str) -> Differs:
        return Differs(document)

    monkeypatch.setitem(
        sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=from_json_str))
    )
    with caplog.at_level(logging.WARNING, "live.tokenizer"):
        tokenizer = Tokenizer(tokenizer_folder)
    assert not tokenizer.fast
    assert tokenizer.decode(tokenizer.encode("a 👩‍🚀")) == "a 👩‍🚀"
    assert [record.message.partition(" on ")[0] for record in caplog.records] == [
        "encoding with tokenizers: fastokens differs"
    ]


def test_an_encoder_that_cannot_read_the_file_is_not_used(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def from_json_str(document: str) -> None:
        raise RuntimeError("no such normalizer")

    monkeypatch.setitem(
        sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=from_json_str))
    )
    assert not Tokenizer(tokenizer_folder).fast
    assert caplog.messages == ["encoding with tokenizers: fastokens cannot use this tokenizer (no such normalizer)"]


def test_a_file_that_pads_and_cuts_does_neither_here(tokenizer_folder: Path, tmp_path: Path) -> None:
    peer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    peer.enable_truncation(3)
    peer.enable_padding(length=8)
    document = json.loads(peer.to_str())
    directory = copied(
        tokenizer_folder, tmp_path, truncation=document["truncation"], padding=document["padding"]
    )  # fmt: skip
    assert peer.encode("a b c d e f g").ids != Tokenizer(directory).encode("a b c d e f g")
    assert Tokenizer(directory).encode("a b c d e f g") == Tokenizer(tokenizer_folder).encode("a b c d e f g")


def test_pieces_are_bytes_of_characters_too(byte_level: Tokenizer, fallback: Tokenizer) -> None:
    ids = byte_level.encode("今")
    assert [byte_level.token_bytes(token) for token in ids] == [b"\xe4", b"\xbb", b"\x8a"]
    assert [byte_level.token_text(token) for token in ids] == ["�", "�", "�"]
    assert byte_level.token_text(318) == "<|im_end|>"
    newline, unseen = fallback.encode("\n", special=False)[-1], fallback.encode("水", special=False)[1:]
    assert fallback.token_bytes(newline) == b"\n"
    assert b"".join(map(fallback.token_bytes, unseen)) == "水".encode()
    assert fallback.token_text(fallback.encode("a", special=False)[0]) == " "


@pytest.mark.parametrize("kind", ["byte_level", "fallback"])
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_what_tokens_write_is_the_text(byte_level: Tokenizer, fallback: Tokenizer, kind: str, text: str) -> None:
    tokenizer = byte_level if kind == "byte_level" else fallback
    ids = tokenizer.encode(text, special=False)
    file_text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    assert tokenizer.decode(ids, skip_special=False) == (
        file_text.removeprefix(" ") if kind == "fallback" else file_text
    )


def test_an_added_token_may_have_letters_that_also_mean_bytes(tokenizer_folder: Path, tmp_path: Path) -> None:
    peer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    peer.add_tokens(["é b", "éa"])
    directory = copied(tokenizer_folder, tmp_path)
    peer.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    for token in (VOCABULARY, VOCABULARY + 1):
        assert tokenizer.token_text(token) == peer.decode([token])


BROKEN: dict[str, tuple[str, dict[str, object], str]] = {
    "decoder": ("tokenizer.json", {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder: got"),
    "no decoder": ("tokenizer.json", {"decoder": None}, "decoder: expected ByteLevel"),
    "model": ("tokenizer.json", {"model": {"type": "None"}}, "tokenizer.json: expected a tokenizer"),
    "name": ("tokenizer_config.json", {"eos_token": "<eos>"}, "eos_token: got '<eos>', expected a token of"),
    "text": ("tokenizer_config.json", {"bos_token": 3}, "bos_token: got 3, expected a token's text"),
    "ids": ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id: got '2', expected token ids"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_used_is_said_in_one_line(tokenizer_folder: Path, tmp_path: Path, case: str) -> None:
    file, changes, expected = BROKEN[case]
    with pytest.raises(BadInput) as result:
        Tokenizer(copied(tokenizer_folder, tmp_path, file, **changes))
    assert expected in str(result.value)
    assert "\n" not in str(result.value)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.json: expected a readable file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(BadInput, match=r"tokenizer\.json: expected a text file in UTF-8"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("fast", [True, False])
def test_lone_surrogates_are_no_text(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    if not fast:
        monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(BadInput, match="expected text without lone surrogates"):
        Tokenizer(tokenizer_folder).encode("a\ud800b")
