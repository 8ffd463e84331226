"""Overrides of a scenario's fields on the command line.

`--set a.b=8` changes any field, `--set a.b=1,2,4` tries several values of it, and `--set a.b=5:40:5` those from 5 to 40
in steps of 5. With `--zip a=1,2 b=3,4`, the first values of fields go together, the second ones, and so on.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from latency_models.io.builtin_files import from_command_line
from latency_models.io.config_io import MAX_DEPTH, read_yaml_text
from scenarios.fields import SWEEP_POINTS
from scenarios.goals import LATENCY, has_no_unit, read_goal
from workloads.errors import BadInput

Settings = dict[str, Any]

_NUMBER = r"\s*-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?\s*"
_RANGE = re.compile(f"({_NUMBER}):({_NUMBER}):({_NUMBER})")

OWN_RANGES = frozenset({"ratio"})
"""Fields whose values may read like ranges, with a meaning of their own: they are left as they are."""


def parse_overrides(texts: Iterable[str], flag: str = "--set") -> dict[str, list[Any]]:
    """Parse each `key=v1,v2` into a dotted key and its values, read as YAML (so 1 is a number and [1, 2] a list).

    A value `start:stop:step` stands for the numbers from start to stop, which is one of them if a step ends there.
    `BadInput` for other texts, a key given twice or too deep, and values that exceed a limit of `config_io`.
    """
    overrides: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")) or not values.strip():
            raise BadInput("expected key=value or key=v1,v2", field=flag, value=text)
        if key.count(".") > MAX_DEPTH:
            raise BadInput(f"expected a key of at most {MAX_DEPTH} sections", field=flag, value=text)
        if key in overrides:
            raise BadInput("expected each key once; give several values as key=v1,v2", field=flag, value=text)
        parts = _split(values)
        overrides[key] = [value for part in parts for value in _values(part, text, flag, key)]
    return overrides


def parse_zipped(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse fields that vary together, each `key=v1,v2` or several of these with blanks between them."""
    words = [word for text in texts for word in re.split(r"\s+(?=[\w.-]+=)", text.strip())]
    overrides = parse_overrides(words, "--zip")
    counts = {key: len(values) for key, values in overrides.items()}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise BadInput(f"expected as many values of each field, found: {numbers}", field="--zip", value=words)
    return overrides


def single_settings(texts: Iterable[str], hint: str = "") -> Settings:
    """Parse overrides for a command that takes one value a key; `hint` names a command that takes several."""
    overrides = parse_overrides(texts)
    for key, values in overrides.items():
        if len(values) > 1:
            raise BadInput(f"expected one value a key{hint}", field=f"--set {key}", value=values)
    return {key: value for key, (value,) in overrides.items()}


def goals_of_texts(texts: Iterable[str], flag: str = "--slo") -> dict[str, float | str]:
    """The mapping of goals given as `name=limit`. Limits of latencies have a unit."""
    goals: dict[str, float | str] = {}
    for text in texts:
        try:
            ((name, values),) = parse_overrides([text]).items()
        except BadInput as error:
            raise BadInput("expected GOAL=LIMIT, for example ttft_p99=1s", field=flag, value=error.value) from None
        if len(values) != 1 or name in goals:
            raise BadInput("expected one limit for each goal", field=flag, value=text)
        goals[name] = limit = values[0]
        if LATENCY.fullmatch(name) and has_no_unit(limit):
            expected = f"expected a limit with its unit: {name}={limit}ms or {name}={limit}s"
            raise BadInput(expected, field=flag, value=text)
        try:
            read_goal(name, limit)
        except BadInput as error:
            raise BadInput(error.expected, field=flag, value=text) from None
    return goals


def combinations(overrides: dict[str, list[Any]], zipped: dict[str, list[Any]] | None = None) -> Iterator[Settings]:
    """Every combination of one value a key, in order; `zipped` keys vary together. One empty one without overrides."""
    together = zipped or {}
    tied = list(zip(*together.values(), strict=True)) if together else [()]
    for key in together:
        if key in overrides:
            raise BadInput("expected each key once, in --set or in --zip", field="--zip", value=key)
    count = math.prod(map(len, overrides.values())) * len(tied)
    if count > SWEEP_POINTS.maximum:
        raise BadInput(SWEEP_POINTS.expectation(count), field="--set", value=count)
    for values in itertools.product(*overrides.values(), tied):
        yield dict(zip(overrides, values[:-1], strict=True)) | dict(zip(together, values[-1], strict=True))


def apply(document: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """A copy of `document` with each dotted key set; sections on the way are made when absent.

    A key names an item of a list by its number or, if it has one, by its `name`: `system.pools.decode.replicas`. Paths
    among the values will start from the current folder, where those in `document` start from the file's.
    """
    result = dict(document)
    for key, value in settings.items():
        *path, last = key.split(".")
        section: Any = result
        for depth, name in enumerate(path):
            place = _place(section, name, key)
            inner = section.get(place) if isinstance(section, dict) else section[place]
            if inner is not None and not isinstance(inner, dict | list):
                dotted = ".".join(path[: depth + 1])
                raise BadInput(f"expected a section at {dotted!r}, found {inner!r}", field="--set", value=key)
            section[place] = section = {} if inner is None else inner.copy()
        section[_place(section, last, key)] = from_command_line(value)
    return result


def _place(section: dict[str, Any] | list[Any], name: str, key: str) -> Any:
    if isinstance(section, dict):
        return name
    names = [item.get("name") if isinstance(item, dict) else None for item in section]
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(section):
        return int(name)
    items = ", ".join(str(item_name) for item_name in names if item_name) or f"a number below {len(section)}"
    raise BadInput(f"expected an item of the list ({items}), found {name!r}", field="--set", value=key)


def in_words(settings: Settings) -> str:
    """Settings in words: `batch_size=128, seed=2`."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _split(values: str) -> list[str]:
    parts, depth, quote, current = [], 0, "", ""
    for character in values:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def _values(text: str, override: str, flag: str, key: str) -> list[Any]:
    """The values of one part between commas: those of a range, or one."""
    match = _RANGE.fullmatch(text)
    if match is None or key in OWN_RANGES:
        return [_value(text, override, flag)]
    start, stop, step = (Decimal(number.strip()) for number in match.groups())
    if step == 0 or (stop - start) / step < 0:
        raise BadInput("expected start:stop:step with a step from start to stop", field=flag, value=override)
    count = int((stop - start) // step) + 1
    if count > SWEEP_POINTS.maximum:
        raise BadInput(SWEEP_POINTS.expectation(count), field=flag, value=override)
    numbers = [start + i * step for i in range(count)]
    whole_numbers = all(number == number.to_integral_value() for number in (start, step)) and "." not in text
    return [int(number) if whole_numbers else float(number) for number in numbers]


def _value(text: str, override: str, flag: str) -> Any:
    if not text.strip():
        raise BadInput("expected a value between commas", field=flag, value=override)
    try:
        return read_yaml_text(text)
    except yaml.YAMLError as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise BadInput(f"expected a YAML value: {problem}", field=flag, value=override) from None


def with_trace(
    document: dict[str, Any], trace: Path | None, lengths: Collection[str] = ("prefill", "decode", "tasks")
) -> dict[str, Any]:
    """A scenario with a trace in place of the fields `lengths` of its workload; the same without a trace."""
    if trace is None:
        return document
    workload = {key: value for key, value in (document.get("workload") or {}).items() if key not in lengths}
    workload["trace"] = {**(workload.get("trace") or {}), "path": str(trace.absolute())}
    return {**document, "workload": workload}
