"""What each token writes, and how tokens that come one by one become text.

Two ways of writing tokens are known, those of the families that are served. In a byte-level vocabulary (Llama 3, Qwen)
every token is some bytes, and an answer is all of them decoded at once, so that a character may be spread over tokens.
In a vocabulary with byte fallback (Llama 2) tokens are text, and characters that it lacks are runs of one-byte tokens:
such a run is decoded when it is over, and if it is not UTF-8 then each of its bytes becomes a replacement character.
What comes of it therefore stays unknown until the run ends.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Names: TypeAlias = Callable[[int], str | None]
"""A token's name in the vocabulary; None for an id that has none."""


class Reader(Protocol):
    """Tokens in, text out as soon as nothing that follows can change it."""

    def push(self, token: int) -> str:
        """What this token settles."""

    def finish(self) -> str:
        """What is left when no more tokens come. The reader is used up."""


class Pieces(Protocol):
    """The tokens of one vocabulary."""

    def bytes_of(self, token: int) -> bytes:
        """What a token writes, perhaps a part of a character; nothing if there is no such token."""

    def reader(self) -> Reader:
        """For one answer."""


class ByteLevel:
    """Names are bytes, each written as one character."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """As `Pieces.bytes_of`."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._written(self._names(token) or "")
        return piece

    def reader(self) -> Reader:
        """As `Pieces.reader`."""
        return _BytesReader(self)

    @staticmethod
    def _written(name: str) -> bytes:
        try:
            return bytes(BYTES[character] for character in name)
        except KeyError:  # an added token, which stands for itself
            return name.encode()


class _BytesReader:
    def __init__(self, pieces: ByteLevel) -> None:
        self._bytes_of = pieces.bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class ByteFallback:
    """Names are text with `space` for spaces, or <0x00> to <0xFF>.

    Attributes:
        strips: a space that an answer begins with is left out: encoding puts one there.
    """

    def __init__(self, names: Names, space: str, strips: bool) -> None:
        self._names, self._space, self.strips = names, space, strips
        self._known: dict[int, tuple[bytes, bool] | None] = {}

    def bytes_of(self, token: int) -> bytes:
        """As `Pieces.bytes_of`, the space at the beginning included."""
        known = self.known(token)
        return known[0] if known else b""

    def known(self, token: int) -> tuple[bytes, bool] | None:
        """What a token writes, and whether it is a byte that belongs to a run; None if there is no such token."""
        if token not in self._known:
            name = self._names(token)
            self._known[token] = None if name is None else self._written(name.replace(self._space, " "))
        return self._known[token]

    def reader(self) -> Reader:
        """As `Pieces.reader`."""
        return _RunsReader(self)

    @staticmethod
    def _written(name: str) -> tuple[bytes, bool]:
        byte = BYTE_NAME.fullmatch(name)
        return (bytes.fromhex(byte[1]), True) if byte else (name.encode(), False)


class _RunsReader:
    def __init__(self, pieces: ByteFallback) -> None:
        self._known, self._strips = pieces.known, pieces.strips
        self._run = bytearray()

    def push(self, token: int) -> str:
        known = self._known(token)
        if known is None:
            return ""
        piece, in_run = known
        if in_run:
            self._run += piece
            return ""
        return self._stripped(self._read_run() + piece.decode())

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


def read_pieces(decoder: Any, names: Names) -> Pieces | None:
    """As the `decoder` of a tokenizer.json says; None for one of another kind than these two."""
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
    """A sequence of decoders, or a single one, as a list."""
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for each in decoder.get("decoders", []) for step in _flat(each)]


def _alphabet() -> dict[str, int]:
    """The byte for each character of byte-level names: Latin-1 as far as it is visible, the others from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTES = _alphabet()
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")
