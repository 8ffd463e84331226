"""The bytes that each token stands for, and the text of tokens that come one by one.

Two kinds of vocabulary are supported, those of the model families that are served. In a byte-level vocabulary (Llama 3,
Qwen) each token stands for some bytes, and the output is all of them decoded together, so that a character may be
spread over several tokens. In a vocabulary with byte fallback (Llama 2) tokens are text, and characters that it lacks
are runs of one-byte tokens. Such a run is decoded when it is over; if it is not UTF-8, each of its bytes becomes a
replacement character. So the text of a run is unknown until the run ends.

`tokenizers.decoders.DecodeStream` does not serve here. It refuses most random outputs of a vocabulary with byte
fallback ("Invalid prefix encountered"), it sends text that later tokens change, and it decodes an unfinished run again
at each token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, TypeAlias

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Names: TypeAlias = Callable[[int], str | None]
"""A token's name in the vocabulary; None for an unknown id."""


class ByteLevel:
    """A vocabulary whose names are bytes, each written as one character."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._cache: dict[int, bytes] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, perhaps a part of a character; empty for an unknown id."""
        value = self._cache.get(token)
        if value is None:
            value = self._cache[token] = self._from_name(self._names(token) or "")
        return value

    def incremental(self) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(self)

    @staticmethod
    def _from_name(name: str) -> bytes:
        try:
            return bytes(BYTES[character] for character in name)
        except KeyError:  # an added token, whose name is its text
            return name.encode()


class ByteLevelDetokenizer:
    """Converts the tokens of one output to text, as soon as later tokens cannot change it."""

    def __init__(self, vocabulary: ByteLevel) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class ByteFallback:
    """A vocabulary whose names are text, with `space` for spaces (an output's first may be stripped), or <0x00>."""

    def __init__(self, names: Names, space: str, strips: bool) -> None:
        self._names = names
        self._space = space
        self.strips = strips
        self._cache: dict[int, tuple[bytes, bool] | None] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, including a leading space; empty for an unknown id."""
        entry = self.entry(token)
        return entry[0] if entry else b""

    def entry(self, token: int) -> tuple[bytes, bool] | None:
        """The bytes of a token, and whether it is a byte of a run; None for an unknown id."""
        if token not in self._cache:
            name = self._names(token)
            self._cache[token] = None if name is None else self._from_name(name.replace(self._space, " "))
        return self._cache[token]

    def incremental(self) -> ByteFallbackDetokenizer:
        return ByteFallbackDetokenizer(self)

    @staticmethod
    def _from_name(name: str) -> tuple[bytes, bool]:
        byte = BYTE_NAME.fullmatch(name)
        return (bytes.fromhex(byte[1]), True) if byte else (name.encode(), False)


class ByteFallbackDetokenizer:
    """The same for a vocabulary with byte fallback; a run of bytes waits for what ends it."""

    def __init__(self, vocabulary: ByteFallback) -> None:
        self._entry = vocabulary.entry
        self._strips = vocabulary.strips
        self._run = bytearray()

    def push(self, token: int) -> str:
        entry = self._entry(token)
        if entry is None:
            return ""
        value, in_run = entry
        if in_run:
            self._run += value
            return ""
        return self._stripped(self._read_run() + value.decode())

    def finish(self) -> str:
        return self._stripped(self._read_run())

    def _read_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        if text and self._strips:
            self._strips = False
            return text.removeprefix(" ")
        return text


def vocabulary_bytes(decoder: Any, names: Names) -> ByteLevel | ByteFallback | None:
    """The vocabulary that the `decoder` of a tokenizer.json describes; None if it is of another kind than these two."""
    steps = _flat(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel(names)
    strips = kinds[3:] == ["Strip"]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or (kinds[3:] and not strips):
        return None
    space = steps[0].get("pattern", {}).get("String")
    if not space or steps[0].get("content") != " ":
        return None
    if strips and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
        return None
    return ByteFallback(names, space, strips)


def _flat(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder.get("decoders", []) for step in _flat(part)]


def _alphabet() -> dict[str, int]:
    """The byte for each character of byte-level names: visible Latin-1 stands for itself, the other bytes start at
    256.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTES = _alphabet()
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
