"""The tokenizer of a model directory, read from its tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from latency_models.deployment.model_config import ConfigFields, end_tokens
from live.text.detokenizer import (
    ByteFallback,
    ByteFallbackDetokenizer,
    ByteLevel,
    ByteLevelDetokenizer,
    vocabulary_bytes,
)
from live.text.fast_encoder import fast_encoder, without_limits
from workloads.errors import BadInput
from workloads.json_files import read_bounded_text, read_json_object

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"

MAX_BYTES = 256 << 20
"""Limit for tokenizer.json, the largest file beside the weights: about 35 MB for a vocabulary of 256,000 tokens."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that templates may use."""

LONG = 4096
"""Characters or ids from which `tokenizers` is called for a batch of one: only then do other threads run meanwhile."""


def read_text(file: Path) -> str:
    return read_bounded_text(file, MAX_BYTES)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_json_object(file) if file.exists() else {}


def special_tokens(directory: Path) -> dict[str, str]:
    """The texts of a directory's special tokens, by name; tokenizer_config.json precedes special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for file in (directory / SETTINGS, directory / "special_tokens_map.json"):
        document = read_object(file)
        for name in NAMES:
            value = document.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is None:
                continue
            if not isinstance(text, str):
                raise BadInput("expected a token's text", field=name, value=value, file=file)
            tokens.setdefault(name, text)
    return tokens


class Tokenizer:
    """The tokenizer of a directory; `BadInput` if it cannot be used, or lacks its special tokens.

    `size`: number of ids; the vocabulary may be larger. `end_tokens`: `eos` and those of generation_config.json, each
    of which ends an output. `special`: ids that `decode` skips by default. `fast`: `fastokens` encodes.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / FILE
        document = read_text(file)
        try:
            self._trusted = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # tokenizers raises a plain Exception
            raise BadInput(f"expected a tokenizer ({error})", file=file) from None
        without_limits(self._trusted)
        fast = fast_encoder(document, self._trusted)
        self._encode: Any = (fast or self._trusted).encode
        self.fast = fast is not None
        self.size: int = self._trusted.get_vocab_size()
        self.special = frozenset(i for i, token in self._trusted.get_added_tokens_decoder().items() if token.special)
        self._vocabulary = self._read_vocabulary(file)
        names = special_tokens(directory)
        self.bos = self._id("bos_token", names, directory)
        self.eos = self._id("eos_token", names, directory)
        eos = frozenset[int]() if self.eos is None else frozenset({self.eos})
        self.end_tokens = eos | _end_tokens(directory / "generation_config.json")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, in which names of special tokens become these.

        `special`: add what the tokenizer puts around a text, which a rendered chat already contains.
        """
        try:
            if self.fast or len(text) < LONG:
                ids: list[int] = self._encode(text, add_special_tokens=special).ids
            else:
                ids = self._trusted.encode_batch([text], add_special_tokens=special)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise BadInput("expected text without lone surrogates", field="text", value=text) from None
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of ids. Unknown ids produce nothing."""
        if len(ids) < LONG:
            text: str = self._trusted.decode(ids, skip_special_tokens=skip_special)
        else:
            text = self._trusted.decode_batch([ids], skip_special_tokens=skip_special)[0]
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, perhaps a part of a character; empty for an unknown id."""
        return self._vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with replacement characters for incomplete characters."""
        return self._vocabulary.token_bytes(token).decode(errors="replace")

    def detokenizer(self) -> ByteLevelDetokenizer | ByteFallbackDetokenizer:
        """A detokenizer for one output that comes token by token; it does not skip special tokens."""
        return self._vocabulary.incremental()

    def _read_vocabulary(self, file: Path) -> ByteLevel | ByteFallback:
        configured = self._trusted.decoder
        decoder = configured and json.loads(configured.__getstate__())  # spares parsing the whole file again
        vocabulary = vocabulary_bytes(decoder, self._trusted.id_to_token)
        if vocabulary is None:
            expected = "expected ByteLevel, or Replace, ByteFallback, Fuse and perhaps Strip: others are not served"
            raise BadInput(expected, field="decoder", value=decoder, file=file)
        return vocabulary

    def _id(self, name: str, names: dict[str, str], directory: Path) -> int | None:
        if name not in names:
            return None
        token: int | None = self._trusted.token_to_id(names[name])
        if token is None:
            expected = f"expected a token of {FILE}"
            raise BadInput(expected, field=name, value=names[name], file=directory / SETTINGS)
        return token


def _end_tokens(file: Path) -> frozenset[int]:
    return frozenset(end_tokens(ConfigFields(read_object(file), file)))
