"""Text to token ids and back, as the tokenizer.json of a model directory says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from live.text.fast_encoder import fast_encoder, without_limits
from live.text.files import SETTINGS, read_object, read_text, special_tokens
from live.text.pieces import Pieces, Reader, read_pieces
from workloads.errors import BadInput

FILE = "tokenizer.json"


class Tokenizer:
    """The tokenizer of a directory.

    Attributes:
        size: how many ids it has; the model may have been given more. fast: `fastokens` encodes, and not `tokenizers`.
        bos, eos: ids, None where the directory names no such token. end_tokens: `eos`, and what generation_config.json
            adds to it: any of them ends an answer.
        special: ids that `decode` leaves out unless told otherwise.

    Raises:
        BadInput: no tokenizer.json, one that cannot be used, or special tokens that it does not have.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / FILE
        document = read_text(file)
        try:
            self._trusted = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # a plain Exception is what it raises
            raise BadInput(f"expected a tokenizer ({error})", file=file) from None
        without_limits(self._trusted)
        fast = fast_encoder(document, self._trusted)
        self._encode: Any = (fast or self._trusted).encode
        self.fast = fast is not None
        self.size: int = self._trusted.get_vocab_size()
        self.special = frozenset(i for i, token in self._trusted.get_added_tokens_decoder().items() if token.special)
        self._pieces = self._read_pieces(file)
        names = special_tokens(directory)
        self.bos, self.eos = self._id("bos_token", names, directory), self._id("eos_token", names, directory)
        self.end_tokens = _end_tokens(directory / "generation_config.json") | {self.eos} - {None}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text, in which the names of special tokens are these tokens.

        Args:
            special: put what the tokenizer puts around a text, such as a beginning-of-sequence token. A rendered chat
                has its own.

        Raises:
            BadInput: lone surrogates, which are not text.
        """
        try:
            ids: list[int] = self._encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeEncodeError):
            raise BadInput("expected text without lone surrogates", field="text", value=text) from None
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of ids. Those that the vocabulary does not have are nothing."""
        text: str = self._trusted.decode(ids, skip_special_tokens=skip_special)
        return text

    def piece_bytes(self, token: int) -> bytes:
        """What one token writes, perhaps a part of a character; empty for an id that the vocabulary does not have."""
        return self._pieces.bytes_of(token)

    def piece(self, token: int) -> str:
        """`piece_bytes` as text, with replacement characters for what is no character by itself."""
        return self._pieces.bytes_of(token).decode(errors="replace")

    def reader(self) -> Reader:
        """For an answer that comes token by token; it does not skip special tokens."""
        return self._pieces.reader()

    def _read_pieces(self, file: Path) -> Pieces:
        found = self._trusted.decoder
        decoder = found and json.loads(found.__getstate__())  # the file's part, without reading megabytes once more
        pieces = read_pieces(decoder, self._trusted.id_to_token)
        if pieces is None:
            expected = "expected ByteLevel, or Replace, ByteFallback, Fuse and perhaps Strip: others are not served"
            raise BadInput(expected, field="decoder", value=decoder, file=file)
        return pieces

    def _id(self, name: str, names: dict[str, str], directory: Path) -> int | None:
        if name not in names:
            return None
        token: int | None = self._trusted.token_to_id(names[name])
        if token is None:
            expected = f"expected a token of {FILE}"
            raise BadInput(expected, field=name, value=names[name], file=directory / SETTINGS)
        return token


def _end_tokens(file: Path) -> frozenset[int]:
    value = read_object(file).get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise BadInput("expected token ids", field="eos_token_id", value=value, file=file)
    return frozenset(tokens)
