"""JSON files beside a model's weights, and the special tokens that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workloads.errors import BadInput
from workloads.json_files import read_bounded_text, read_json_object

SETTINGS = "tokenizer_config.json"

MAX_BYTES = 256 << 20
"""Limit for tokenizer.json, the largest file beside the weights: about 35 MB for a vocabulary of 256,000 tokens."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that templates may use."""


def read_text(file: Path) -> str:
    """The text of a whole file.

    Raises:
        BadInput: it cannot be read, is larger than MAX_BYTES, or is not UTF-8.
    """
    return read_bounded_text(file, MAX_BYTES)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        BadInput: a file that cannot be read, or that holds no object.
    """
    return read_json_object(file) if file.exists() else {}


def special_tokens(directory: Path) -> dict[str, str]:
    """The texts of a directory's special tokens, by name; tokenizer_config.json precedes special_tokens_map.json.

    Raises:
        BadInput: a token that is neither text nor an object with `content`.
    """
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
