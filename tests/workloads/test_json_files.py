"""Bounds on JSON files that came from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from workloads.errors import BadInput
from workloads.json_files import MAX_DEPTH, read_bounded_text, read_json_object


def nested(depth: int) -> str:
    """An object that is `depth` containers deep, itself counted."""
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def test_an_object_of_the_largest_depth_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("\ufeff" + nested(MAX_DEPTH), encoding="utf-8")
    value = read_json_object(file)["a"]
    for _ in range(MAX_DEPTH - 2):
        (value,) = value
    assert value == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nested(MAX_DEPTH + 1), f"nested at most {MAX_DEPTH} deep"),
        (nested(100_000), f"nested at most {MAX_DEPTH} deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, f"nested at most {MAX_DEPTH} deep"),
        ('{"a": 1' + "0" * 5000 + "}", "at most 4300 digits"),
        ('{"a": "\\ud800"}', "lone surrogates"),
        ('{"\\ud800": 1}', "lone surrogates"),
        ('{"a": 1,\n oops}', "config.json:2: expected JSON"),
        ("[1]", "got 'list', expected a JSON object"),
        (b"\xff\xfe{}", "UTF-8"),
    ],
    ids=["a level too many", "100,000 lists", "100,000 objects", "digits", "value", "key", "syntax", "list", "UTF-16"],
)
def test_what_cannot_be_read_is_told_in_one_line(content: str | bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput) as error:
        read_json_object(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_file_without_an_end_is_refused_at_the_bound() -> None:
    with pytest.raises(BadInput, match="/dev/zero: expected at most 1000 bytes, found more"):
        read_bounded_text(Path("/dev/zero"), 1000)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected a readable file"):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(BadInput, match="expected a path"):
        read_json_object(Path("a\0b"))
