"""Draws by key and position: in machine integers as in Python's, and as SplitMix64 is published."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twin.serving.engine.speculation import _by_halves, mixed, uniform

BITS = st.integers(0, 2**64 - 1)


@given(BITS, st.integers(0, 2**41))
def test_halves_give_the_same_number(key: int, position: int) -> None:
    expected = mixed(key + position) / 2.0**64
    assert _by_halves(key >> 32, key & 0xFFFFFFFF, position) == expected
    assert uniform(key >> 32, key & 0xFFFFFFFF, position) == expected


def test_published_numbers() -> None:
    """The first outputs of the generator with seed 1234567 (Vigna's splitmix64.c; also Rosetta Code's task)."""
    golden = 0x9E3779B97F4A7C15
    inverse = pow(golden, -1, 2**64)
    outputs = [mixed((1234567 * inverse + step) % 2**64) for step in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
