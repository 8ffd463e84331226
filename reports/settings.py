"""Settings of a sweep's configurations: those that vary name the rows, those that are fixed are stated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]


def varying(configurations: Sequence[Settings]) -> list[str]:
    """Keys that have more than one value, in the order given."""
    first = configurations[0]
    return [key for key in first if any(settings[key] != first[key] for settings in configurations)]


def fixed(configurations: Sequence[Settings]) -> str:
    """The settings that all configurations share, in words; "" if there are none."""
    keys = varying(configurations)
    return in_words(configurations[0], [key for key in configurations[0] if key not in keys])


def in_words(settings: Settings, keys: Iterable[str]) -> str:
    """Settings in words: `batch_size=128, seed=2`."""
    return ", ".join(f"{key}={settings[key]}" for key in keys)


def short_names(keys: Sequence[str]) -> list[str]:
    """The shortest last parts of dotted keys that are all different."""
    return [_short(key, [rival for rival in keys if rival != key]) for key in keys]


def _short(key: str, rivals: Sequence[str]) -> str:
    parts = key.split(".")
    for count in range(1, len(parts)):
        ending = ".".join(parts[-count:])
        if not any(f".{rival}".endswith(f".{ending}") for rival in rivals):
            return ending
    return key


def axis_and_lines(configurations: Sequence[Settings]) -> tuple[str, list[str]] | None:
    """The setting to draw points over, and those that tell lines apart; None if nothing varies.

    The first is the number with the most values, or, without numbers, the first that varies. A setting that follows
    from it, as in fields that vary together, tells no lines apart.
    """
    keys = varying(configurations) if configurations else []
    if not keys:
        return None
    counts = {key: len({str(settings[key]) for settings in configurations}) for key in keys}
    axis = max(
        [key for key in keys if is_number(settings[key] for settings in configurations)] or keys[:1],
        key=counts.__getitem__,
    )
    pairs = {key: len({(str(settings[axis]), str(settings[key])) for settings in configurations}) for key in keys}
    return axis, [key for key in keys if key != axis and pairs[key] > counts[axis]]


def is_number(values: Iterable[Any]) -> bool:
    """True if all values are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
