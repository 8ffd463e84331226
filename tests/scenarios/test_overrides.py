"""Ranges of values, and fields that vary together."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.overrides import combinations, parse_overrides, parse_zipped
from workloads.errors import BadInput


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=5:20:5", [5, 10, 15, 20]),
        ("a=5:19:5", [5, 10, 15]),
        ("a=3:1:-1", [3, 2, 1]),
        ("a=0.1:0.4:0.1", [0.1, 0.2, 0.3, 0.4]),
        ("a=1:2:0.5", [1.0, 1.5, 2.0]),
        ("a=1,4:6:1,x", [1, 4, 5, 6, "x"]),
        ("a=5:5:1", [5]),
        ("a=1:32", ["1:32"]),  # two numbers are no range
        ("ratio=1:32:4", ["1:32:4"]),  # which has ranges of its own
        ("a='1:2:1'", ["1:2:1"]),
    ],
)
def test_a_range_is_its_numbers(text: str, values: list[Any]) -> None:
    ((_, result),) = parse_overrides([text]).items()
    assert result == values
    assert [type(value) for value in result] == [type(value) for value in values]


@pytest.mark.parametrize("text", ["a=1:5:0", "a=5:1:1", "a=1:5:-1"])
def test_a_step_that_leads_nowhere(text: str) -> None:
    with pytest.raises(BadInput, match=r"^--set: got '.*', expected start:stop:step with a step from start to stop$"):
        parse_overrides([text])


def test_a_range_of_too_many_numbers_is_refused_before_it_is_made() -> None:
    with pytest.raises(BadInput, match=r"^--set: got 'a=1:1e15:1', expected at most 10,000"):
        parse_overrides(["a=1:1e15:1"])


def test_zipped_fields_go_together_beside_every_combination_of_the_others() -> None:
    zipped = parse_zipped(["a=1,2 b=x,y", "c=3:4:1"])
    assert list(combinations({"d": [7, 8]}, zipped)) == [
        {"d": 7, "a": 1, "b": "x", "c": 3},
        {"d": 7, "a": 2, "b": "y", "c": 4},
        {"d": 8, "a": 1, "b": "x", "c": 3},
        {"d": 8, "a": 2, "b": "y", "c": 4},
    ]
    assert list(combinations({}, {})) == [{}]


def test_zipped_fields_need_as_many_values_and_a_key_once() -> None:
    with pytest.raises(BadInput, match=r"^--zip: .*expected as many values of each field, found: a has 2, b has 3$"):
        parse_zipped(["a=1,2", "b=1,2,3"])
    with pytest.raises(BadInput, match=r"^--zip: got 'a', expected each key once, in --set or in --zip$"):
        list(combinations({"a": [1]}, parse_zipped(["a=1,2"])))
    with pytest.raises(BadInput, match=r"^--zip: got 'a', expected key=value"):
        parse_zipped(["a"])
    with pytest.raises(BadInput, match=r"^--set: got 20000, expected at most 10,000"):
        list(combinations({"a": list(range(100))}, {"b": list(range(200))}))
