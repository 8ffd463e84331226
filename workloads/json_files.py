"""Reads JSON files of other projects: a model's config.json, its tokenizer's settings, the index of its weights.

Size and depth are bounded, so that a broken or hostile file is refused in one line before it takes memory or the
interpreter's stack.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workloads.errors import BadInput, readable

MAX_BYTES = 64 << 20
"""Bytes of one file. The largest index of a published model has about 10 MB."""

MAX_DEPTH = 64
"""Levels of nested objects and lists. Published files have fewer than ten."""


def read_bounded_text(file: Path, max_bytes: int = MAX_BYTES) -> str:
    """A text file's content, without a byte order mark; `BadInput` if unreadable, too large, or not UTF-8."""
    with readable(file):
        with file.open("rb") as opened:
            content = opened.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise BadInput(f"expected at most {max_bytes} bytes, found more", file=file)
        text = content.decode("utf-8-sig")
    return text


def read_json_object(file: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file; `BadInput` for other files, nesting deeper than MAX_DEPTH, or lone surrogates."""
    text = read_bounded_text(file, max_bytes)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadInput(f"expected JSON: {error.msg}", file=file, line=error.lineno) from None
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError:  # an integer literal with more digits than Python converts
        raise BadInput("expected JSON with numbers of at most 4300 digits", file=file) from None
    if not isinstance(document, dict):
        raise BadInput("expected a JSON object", value=type(document).__name__, file=file)
    _check_values(document, file)
    return document


def number_lines(file: Path, text: str, names: Sequence[str]) -> Iterator[tuple[int, list[float]]]:
    """The line number of each object in JSON Lines, and its numbers of these names; `BadInput` if there is none."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            numbers = [float(entry[name]) for name in names]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            expected = f"expected a JSON object with the numbers {', '.join(names)}"
            raise BadInput(expected, value=line[:60], file=file, line=number) from None
        yield number, numbers
    if not text.strip():
        raise BadInput("expected at least one request", file=file)


def _check_values(document: dict[str, Any], file: Path) -> None:
    """Walk a document level by level, which takes no stack."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [value for node in level for value in _children(node)]
        if not level:
            return
        if any(isinstance(value, str) and not is_text(value) for value in level):
            raise BadInput("expected text without lone surrogates", file=file)
    if any(isinstance(node, dict | list) for node in level):
        raise _too_deep(file)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else []


def is_text(value: str) -> bool:
    """False for lone surrogates, which JSON can have and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(file: Path) -> BadInput:
    return BadInput(f"expected JSON nested at most {MAX_DEPTH} deep, found more", file=file)
