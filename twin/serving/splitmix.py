"""Random numbers that are functions of a key and a position (SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from twin.compiled import runs_compiled

_MASK: Final = (1 << 64) - 1
_LOW: Final = 0xFFFFFFFF
_SHORT: Final = 0xFFFF
_COMPILED: Final = runs_compiled()


def mixed(number: int) -> int:
    """SplitMix64's output function: 64 bits in which every bit of `number` matters."""
    bits = (number * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def uniform(high: i64, low: i64, position: i64) -> float:
    """A number from [0, 1) for a key, given as its halves of 32 bits, and a position, not negative."""
    return _by_halves(high, low, position) if _COMPILED else mixed(((high << 32) | low) + position) / 2.0**64


def _by_halves(high: i64, low: i64, position: i64) -> float:
    """`mixed` in machine integers, which hold products of 32 and 16 bits. Compiled, it takes a tenth of the time."""
    low += position & _LOW
    high = (high + (position >> 32) + (low >> 32)) & _LOW
    high, low = _product(high, low & _LOW, 0x9E37, 0x79B9, 0x7F4A, 0x7C15)
    low ^= ((high << 2) & _LOW) | (low >> 30)
    high, low = _product(high ^ (high >> 30), low, 0xBF58, 0x476D, 0x1CE4, 0xE5B9)
    low ^= ((high << 5) & _LOW) | (low >> 27)
    high, low = _product(high ^ (high >> 27), low, 0x94D0, 0x49BB, 0x1331, 0x11EB)
    low ^= ((high << 1) & _LOW) | (low >> 31)
    return (float(high ^ (high >> 31)) * 2.0**32 + float(low)) / 2.0**64


def _product(high: i64, low: i64, a: i64, b: i64, c: i64, d: i64) -> tuple[i64, i64]:
    """The halves of a number times another one, which is given as `a` to `d` of 16 bits each, modulo 2⁶⁴."""
    first = low * d
    second = low * c + (first >> 16)
    by_low = low * b + ((low * a & _SHORT) << 16)  # beyond 64 bits nothing counts
    by_high = high * d + ((high * c & _SHORT) << 16)
    return ((second >> 16) + by_low + by_high) & _LOW, ((second & _SHORT) << 16) | (first & _SHORT)
