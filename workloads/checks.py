"""Checks of values that a user gave for lengths, arrivals and mixes.

Each function returns the value in the type that the rest of the code uses, or raises `BadInput` with the field, the
value found and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from workloads.errors import BadInput

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
_Array = TypeVar("_Array", IntArray, FloatArray)

MAX_TOKENS = 10**9
"""The longest length accepted anywhere. A product of two still fits in 64 bits."""


def number(value: object, field: str, *, low: float, high: float, hint: str = "") -> float:
    """Check that `value` is a float within [low, high]. Not a number (NaN) is outside every range."""
    kinds = int | float | np.integer | np.floating
    if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise BadInput(f"expected a number from {low:g} to {high:g}{hint}", field=field, value=value)


def whole(value: object, field: str, *, low: int, high: int = MAX_TOKENS) -> int:
    """Check that `value` is an int within [low, high]. A float is refused even when it is whole."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= value <= high:
        return int(value)
    raise BadInput(f"expected a whole number from {low} to {high}", field=field, value=value)


def token_counts(values: Sequence[int] | IntArray, field: str, *, low: int = 0) -> IntArray:
    """A read-only int64 copy, shape (n,) with n >= 1, of lengths within [low, `MAX_TOKENS`]."""
    array = _flat(values, field)
    expected = f"expected a whole number from {low} to {MAX_TOKENS}"
    if array.dtype.kind not in "iu":
        raise BadInput(f"{expected} everywhere", field=field, value=values)
    _refuse_first(array, (array < low) | (array > MAX_TOKENS), field, expected)
    return frozen(array.astype(np.int64))


def instants(values: Sequence[float] | FloatArray, field: str) -> FloatArray:
    """A read-only float64 copy, shape (n,) with n >= 1, of finite times from 0 on that never go backwards."""
    array = _flat(values, field)
    if array.dtype.kind not in "iuf":
        raise BadInput("expected finite times, 0 or later", field=field, value=values)
    times = array.astype(np.float64)
    _refuse_first(times, ~(np.isfinite(times) & (times >= 0.0)), field, "expected a finite time, 0 or later")
    back = np.concatenate(([False], times[1:] < times[:-1]))
    _refuse_first(times, back, field, "expected a time no earlier than the one before it")
    return frozen(times)


def weights(values: Sequence[float] | FloatArray, field: str) -> FloatArray:
    """A read-only float64 copy, shape (n,) with n >= 1, of finite weights, 0 or more and not all 0."""
    array = _flat(values, field)
    if array.dtype.kind not in "iuf":
        raise BadInput("expected finite numbers, 0 or more", field=field, value=values)
    parts = array.astype(np.float64)
    _refuse_first(parts, ~(np.isfinite(parts) & (parts >= 0.0)), field, "expected a finite number, 0 or more")
    if not parts.any():
        raise BadInput("expected at least one above 0", field=field, value=values)
    return frozen(parts)


def frozen(array: _Array) -> _Array:
    """Make an array read-only, and return it."""
    array.flags.writeable = False
    return array


def _flat(values: object, field: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unequal length
        raise BadInput("expected a flat list of numbers", field=field, value=values) from None
    if array.ndim != 1 or array.size == 0:
        raise BadInput("expected a flat list with at least one number", field=field, value=values)
    return array


def _refuse_first(array: npt.NDArray[Any], unusable: npt.NDArray[np.bool_], field: str, expected: str) -> None:
    places = np.flatnonzero(unusable)
    if places.size:
        at = int(places[0])
        raise BadInput(expected, field=f"{field}[{at}]", value=array[at].item())
