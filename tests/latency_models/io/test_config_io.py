"""YAML as people write it, and faults as people read them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from latency_models.io.config_io import (
    MAX_BYTES,
    Strict,
    checked,
    explain_validation,
    read_yaml,
    read_yaml_text,
    write_yaml,
)
from workloads.errors import BadInput


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5e3", 1500.0),
        ("-2E6", -2e6),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("0x1F", 31),
        ("-7", -7),
        ("0", 0),
        (".inf", float("inf")),
        ("1:32", "1:32"),
        ("12:30:45", "12:30:45"),
        ("007", "007"),
        ("1.2.3", "1.2.3"),
        ("-", [None]),
        ("true", True),
        ("2026-01-31", datetime.date(2026, 1, 31)),
        ("{<<: {a: 1, b: 2}, a: 3}", {"a": 3, "b": 2}),
        ("{<<: [{a: 1}, {a: 2, b: 2}], c: 3}", {"a": 1, "b": 2, "c": 3}),
        ("{<<: {a: 1}, '<<': 2}", {"a": 1, "<<": 2}),
        ("{a: &x [1, 2], b: *x}", {"a": [1, 2], "b": [1, 2]}),
    ],
)
def test_values(text: str, value: Any) -> None:
    result = read_yaml_text(text)
    assert result == value
    assert type(result) is type(value)


def test_a_merged_key_is_no_repetition_whichever_mapping_is_read_first() -> None:
    """`inner` is merged into `late` before it is read itself."""
    text = "base: &base {x: 1}\nouter:\n  inner: &inner {<<: *base, x: 2}\nlate: {<<: *inner, y: 3}\n"
    assert read_yaml_text(text) == {"base": {"x": 1}, "outer": {"inner": {"x": 2}}, "late": {"x": 2, "y": 3}}


@pytest.mark.parametrize("text", ["\udcff", "a: 'x\udcff'"])
def test_text_that_no_file_can_hold_is_a_yaml_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml_text(text)


TRICKY = ["1e3", "4e12345", ".5e3", "1.5e3", "1_000", "0x1f", "1:32", "007", "yes", "~", "2026-01-31", "-", "<<", "="]


@given(st.sampled_from(TRICKY) | st.from_regex(r"[-+]?[0-9._]{0,3}[eE]?[-+0-9._]{0,4}", fullmatch=True) | st.text())
@example("a\x85b")
@example("a\u2028b")
def test_text_that_is_written_stays_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert read_yaml_text(write_yaml({"a": text, "b": [text]})) == {"a": text, "b": [text]}


@given(st.floats(allow_nan=False))
def test_every_float_is_read_back_as_python_and_yaml_write_it(value: float) -> None:
    assert read_yaml_text(yaml.safe_dump(value)) == value
    text = repr(value)
    assert "inf" in text or read_yaml_text(text) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", ":3: expected YAML: 'a' is given twice"),
        (b"x:\n  a: 1\n  a: 1\n", ":3: expected YAML: 'a' is given twice"),
        (b"a: [1, 2\nb: 3\n", ":2: expected YAML: "),
        (b"a: 1\n\tb: 2\n", ":2: expected YAML: "),
        (b"a: 1\nwhen: 2026-02-31\n", ":2: expected YAML: day "),
        (b"a: &x [*x\n", ":1: expected YAML: the alias x stands inside what it names"),
        (b"a: {<<: *none}\n", ":1: expected YAML: found undefined alias"),
        (b"a: !!python/object:os.system {}\n", ":1: expected YAML: could not determine a constructor"),
        (b"a: \x00\n", "expected YAML: "),
        (b"? [1]\n: 2\n", ":1: expected YAML: found unhashable key"),
        (b"[" * 100 + b"]" * 100, "expected a mapping of fields, found a list"),
        (b"{? " * 2000 + b"a" + b": 1}" * 2000, ":1: expected YAML: nested more than 100 deep"),
        (b"a: 1\nb: " + b"[" * 30_000, ":2: expected YAML: nested more than 100 deep"),
        (b"- " * 30_000, ":1: expected YAML: nested more than 100 deep"),
        (b"".join(b" " * i + b"a:\n" for i in range(200)), ":101: expected YAML: nested more than 100 deep"),
        (b"seed: 0x" + b"f" * 5000, ":1: expected YAML: a whole number of more than 1023 bits"),
        (b"b: &b {x: 1}\nc:\n  <<: *b\n  <<: *b\n", ":4: expected YAML: '<<' is given twice"),
        (b"a: 1\nb: !!int ''\n", ":2: expected YAML: '' does not fit its tag"),
        (b"a: !!int x\n", ":1: expected YAML: invalid literal"),
        (b"a: {<<: 3}\n", ":1: expected YAML: expected a mapping or list of mappings for merging"),
        (b"", ": expected a mapping of fields, found nothing"),
        (b"- a\n", ": expected a mapping of fields, found a list"),
        (b"words\n", ": got 'words', expected a mapping of fields"),
        (b"1: a\n", ": got 1, expected field names that are text"),
        (b"a: \xff\n", ": expected a text file in UTF-8"),
    ],
)
def test_a_file_that_is_no_mapping_is_told_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(BadInput) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def _nested_aliases(levels: int) -> bytes:
    """Stands for 10^levels values and more."""
    lines = [b"a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    for level in range(1, levels):
        lines.append(b"a%d: &a%d [%b]" % (level, level, b",".join([b"*a%d" % (level - 1)] * 10)))
    return b"\n".join(lines) + b"\n"


def test_aliases_count_as_what_they_stand_for(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    path.write_bytes(_nested_aliases(3))
    assert len(read_yaml(path)["a2"][9][9]) == 10
    path.write_bytes(_nested_aliases(9))
    with pytest.raises(BadInput, match=r":6: expected YAML: more than 1,000,000 values, aliases counted as what they"):
        read_yaml(path)


def test_a_file_is_not_read_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(BadInput, match=r"^\S*large\.yaml: expected a file of at most 32 MiB$"):
        read_yaml(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / "x.yaml" / "y.yaml", "No such file or directory"),
    ):
        with pytest.raises(BadInput) as error:
            read_yaml(path)
        assert str(error.value) == f"{path}: expected a readable file: {reason}"
    with pytest.raises(BadInput, match=r"expected a path: embedded null byte$"):
        read_yaml(Path("a\0b"))


def test_a_byte_order_mark_is_no_part_of_the_first_field(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(path) == {"a": 1, "b": 2}


class Near(Strict):
    kind: Literal["near"]
    metres: float = Field(gt=0)


class Far(Strict):
    kind: Literal["far"]
    miles: int


class Leg(Strict):
    speed: float = Field(ge=0, le=100)
    place: Annotated[Near | Far, Field(discriminator="kind")]


class Detour(Strict):
    reason: str
    length: float


class Trip(Strict):
    schema_: Literal["trip/1"] = Field(alias="schema")
    legs: list[Leg] = Field(min_length=1)
    via: str | Detour = "nowhere"
    notes: dict[str, str] = Field(default_factory=dict)
    day: datetime.date | None = None
    rested: bool = True
    low: int = 0
    high: int = 9

    @model_validator(mode="after")
    def _ordered(self) -> Trip:
        if self.low > self.high:
            raise BadInput("expected no more than high", field="low", value=self.low)
        if self.low == self.high:
            raise ValueError("expected low and high to differ")
        return self


GOOD: dict[str, Any] = {"schema": "trip/1", "legs": [{"speed": 3.0, "place": {"kind": "near", "metres": 5.0}}]}


def with_leg(**fields: Any) -> dict[str, Any]:
    return {"legs": [GOOD["legs"][0], GOOD["legs"][0] | fields]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"lgs": []}, "lgs: unknown field, did you mean legs?"),
    ({"zzz": 1}, "zzz: unknown field, expected one of schema, legs, via, notes, day, rested, low, high"),
    ({"schema_": "trip/1"}, "schema_: unknown field, did you mean schema?"),
    ({"schema": "trip/2"}, "schema: got 'trip/2', expected 'trip/1'"),
    ({"legs": 5}, "legs: got 5, expected a list"),
    ({"legs": []}, "legs: got [], expected at least 1 items, found 0"),
    ({"legs": [5]}, "legs[0]: got 5, expected a section of fields"),
    (with_leg(speed=-1), "legs[1].speed: got -1, expected a number of at least 0"),
    (with_leg(speed=101.0), "legs[1].speed: got 101.0, expected a number of at most 100"),
    (with_leg(speed="3"), "legs[1].speed: got '3', expected a number"),
    (with_leg(speed=None), "legs[1].speed: expected a number, found nothing"),
    (with_leg(speed=True), "legs[1].speed: got True, expected a number"),
    (with_leg(speed=float("nan")), "legs[1].speed: got nan, expected a finite number"),
    (with_leg(sped=3.0), "legs[1].sped: unknown field, did you mean speed?"),
    (with_leg(place={"metres": 1.0}), "legs[1].place.kind: expected this field, which is missing"),
    (with_leg(place={"kind": "moon"}), "legs[1].place.kind: got 'moon', expected one of 'near', 'far'"),
    (with_leg(place={"kind": "near", "metres": 0.0}), "legs[1].place.metres: got 0.0, expected a number above 0"),
    (with_leg(place={"kind": "near"}), "legs[1].place.metres: expected this field, which is missing"),
    (with_leg(place={"kind": "far", "miles": 1.5}), "legs[1].place.miles: got 1.5, expected a whole number"),
    (with_leg(place={"kind": "far", "mile": 1}), "legs[1].place.mile: unknown field, did you mean miles? (and 1 more)"),
    ({"via": {"reason": "rain"}}, "via.length: expected this field, which is missing"),
    ({"via": {"reason": "rain", "lenght": 1.0}}, "via.lenght: unknown field, did you mean length? (and 1 more)"),
    ({"via": 5}, "via: got 5, expected text or a section of fields"),
    ({"notes": {"a": 1}}, "notes.a: got 1, expected text"),
    ({"notes": {1: "a"}}, "notes.1: got 1, expected field names that are text"),
    ({"notes": {"a": nested(3000)}}, "notes.a: expected text"),
    ({"day": "soon"}, "day: got 'soon', expected a date such as 2026-01-31"),
    ({"rested": "yes"}, "rested: got 'yes', expected true or false"),
    ({"low": 10}, "low: got 10, expected no more than high"),
    ({"low": 9}, "expected low and high to differ"),
    ({"low": 1.5, "high": "x", "lo": 1}, "lo: unknown field, did you mean low? (and 2 more)"),
]


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_faults_are_one_line_with_the_field_as_written(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        checked(Trip, GOOD | change, Path("trip.yaml"))
    assert str(error.value) == f"trip.yaml: {message}"
    assert error.value.file == "trip.yaml"


def test_a_section_of_a_larger_file_keeps_its_place() -> None:
    with pytest.raises(BadInput, match=r"^f\.yaml: trips\.first\.legs\[1\]\.speed: got -1, "):
        checked(Trip, GOOD | with_leg(speed=-1), Path("f.yaml"), "trips.first")
    with pytest.raises(BadInput, match=r"^f\.yaml: trips\.first\.low: got 10, "):
        checked(Trip, GOOD | {"low": 10}, Path("f.yaml"), "trips.first")
    with pytest.raises(BadInput, match=r"^f\.yaml: trips\.first: expected low and high"):
        checked(Trip, GOOD | {"low": 9}, Path("f.yaml"), "trips.first")


def test_without_the_model_there_is_the_field_but_no_suggestion() -> None:
    with pytest.raises(ValidationError) as error:
        Trip.model_validate(GOOD | {"lgs": []})
    assert str(explain_validation(error.value, Path("t.yaml"))) == "t.yaml: lgs: unknown field"
