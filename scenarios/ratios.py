"""A/F ratios as a user writes them: `8`, `1,2,4,8`, `1:32`, `1:32:4`, `7/2`, `3.5`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from workloads.errors import BadInput

MOST_INSTANCES = 4096
EXPECTED = "expected a ratio above 0 such as 8, 7/2 or 3.5, a range such as 1:32 or 1:32:4, or a list of these"


@dataclass(frozen=True, slots=True, order=True)
class Topology:
    """x attention and y FFN instances, in lowest terms: 7/2 is 7A-2F, r = 3.5."""

    ratio: Fraction

    @property
    def attention_instances(self) -> int:
        """The number x of attention instances."""
        return self.ratio.numerator

    @property
    def ffn_instances(self) -> int:
        """The number y of FFN instances."""
        return self.ratio.denominator

    def __str__(self) -> str:
        return f"{self.attention_instances}A-{self.ffn_instances}F"


def parse_ratios(text: str) -> list[Topology]:
    """Parse the ratios in `text`, each once, in the order given."""
    ratios: dict[Fraction, None] = {}
    for part in text.split(","):
        for ratio in _range(part.strip(), text):
            ratios.setdefault(ratio)
    return [Topology(ratio) for ratio in ratios]


def _range(part: str, text: str) -> list[Fraction]:
    ends = [_ratio(end, text) for end in part.split(":")]
    if len(ends) == 1:
        return ends
    if len(ends) > 3 or ends[1] < ends[0]:
        raise BadInput(EXPECTED, field="--ratio", value=text)
    step = ends[2] if len(ends) == 3 else Fraction(1)
    count = int((ends[1] - ends[0]) / step) + 1
    if count > MOST_INSTANCES:
        raise BadInput(f"expected at most {MOST_INSTANCES} ratios", field="--ratio", value=text)
    return [ends[0] + step * index for index in range(count)]


def _ratio(text: str, option: str) -> Fraction:
    try:
        ratio = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise BadInput(EXPECTED, field="--ratio", value=option) from None
    if ratio <= 0:
        raise BadInput(EXPECTED, field="--ratio", value=option)
    if max(ratio.numerator, ratio.denominator) > MOST_INSTANCES:
        raise BadInput(f"expected at most {MOST_INSTANCES} instances of a kind", field="--ratio", value=option)
    return ratio
