"""JSON beside a model's weights, and the special tokens that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workloads.errors import BadInput

SETTINGS = "tokenizer_config.json"

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What templates may call special tokens by."""


def read_text(file: Path) -> str:
    """A whole file.

    Raises:
        BadInput: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"expected a readable file ({error.strerror})", file=file) from None
    except UnicodeDecodeError:
        raise BadInput("expected UTF-8", file=file) from None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file.

    Raises:
        BadInput: a file that cannot be read, or with something else in it.
    """
    if not file.exists():
        return {}
    text = read_text(file)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BadInput(f"expected JSON ({error})", file=file) from None
    if not isinstance(document, dict):
        raise BadInput("expected a JSON object", value=type(document).__name__, file=file)
    return document


def special_tokens(directory: Path) -> dict[str, str]:
    """Text by name, of those that the directory names; tokenizer_config.json goes before special_tokens_map.json.

    Raises:
        BadInput: one that is neither text nor an object with `content`.
    """
    found: dict[str, str] = {}
    for file in (directory / SETTINGS, directory / "special_tokens_map.json"):
        document = read_object(file)
        for name in NAMES:
            value = document.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is None:
                continue
            if not isinstance(text, str):
                raise BadInput("expected a token's text", field=name, value=value, file=file)
            found.setdefault(name, text)
    return found
