"""Links between ranks: the file `twin.link/1`, and collectives over a link, from measured all-reduces or by a line.

A measured table has its jumps: algorithms change with the size, and short messages scatter. Times are made to rise with
the size (a longer message takes no less), and are straight lines between sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.builtin_files import find_data
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.sources.kernel_tables.parallel import Communication

GUESS = 0.3
"""Relative uncertainty from which a link is called a guess."""

HOSTS = 0.42
"""Deviation of the logarithm of the bandwidth over PCIe from host to host: one GPU with peer access reached 15.9, 27.5
and 36 GB/s. All-reduces of one host say nothing about it."""

PCIE = 6.4e10
"""Bytes/s each way of PCIe 5 with 16 lanes; only other links have more."""

Points = tuple[tuple[float, float], ...]
"""(bytes, seconds) of messages, rising in both."""


class AllReduces(Strict):
    """Measured all-reduces over so many ranks: seconds by the bytes of the message of one rank."""

    ranks: Annotated[int, Field(ge=2)]
    bytes: list[PositiveInt] = Field(min_length=2)
    seconds: list[PositiveFloat] = Field(min_length=2)

    @model_validator(mode="after")
    def _rising(self) -> AllReduces:
        if len(self.bytes) != len(self.seconds) or sorted(set(self.bytes)) != self.bytes:
            raise ValueError("expected rising bytes, and as many seconds")
        return self


class LinkFile(Strict):
    """The file `twin.link/1`.

    Attributes:
        kind: `measured` on the machine, `fitted` to measurements of others, or `assumed`.
        latency: seconds of a collective of nothing among two ranks. each_device: more for each rank beyond two.
        bandwidth: bytes/s of one rank. all_reduce: measured times, which take the place of these three.
        spread: relative uncertainty. source: origin of the figures.
    """

    schema_: Literal["twin.link/1"] = Field(alias="schema")
    name: str
    kind: Literal["measured", "fitted", "assumed"]
    latency: NonNegativeFloat
    each_device: NonNegativeFloat = 0.0
    bandwidth: PositiveFloat
    all_reduce: list[AllReduces] = Field(default_factory=list)
    spread: PositiveFloat
    source: Annotated[str, Field(min_length=1)]


class MeasuredLink(Communication):
    """A link with measured all-reduces.

    Attributes:
        all_reduces: (bytes, seconds) by ranks. factor: on these times.
    """

    all_reduces: Mapping[int, Points] = Field(default_factory=dict)
    factor: float = 1.0

    def all_reduce(self, ranks: int, elements: float) -> float:
        """Ranks that were not measured get the next number's, by the ring's share."""
        if not self.all_reduces:
            return super().all_reduce(ranks, elements)
        nearest = min(self.all_reduces, key=lambda measured: (abs(measured - ranks), measured))
        share = _ring(ranks) / _ring(nearest)
        return self.factor * _between(self.all_reduces[nearest], elements * self.element_bytes * share)

    def all_gather(self, ranks: int, elements: float) -> float:
        """Half the way of an all-reduce."""
        return self.all_reduce(ranks, elements) / 2 if self.all_reduces else super().all_gather(ranks, elements)

    def scaled(self, factor: float) -> MeasuredLink:
        slower = super().scaled(factor)
        return MeasuredLink.model_construct(**{**dict(slower), "factor": self.factor * factor})


def resolve(communication: Communication, base: Path) -> Communication:
    """The link that a section names, by a preset or a file; the section itself where it states its numbers."""
    if communication.link is None:
        return communication
    path = find_data("links", communication.link, base)
    file = checked(LinkFile, read_yaml(path), path)
    changes = {
        "latency": file.latency,
        "each_device": file.each_device,
        "bandwidth": file.bandwidth,
        "spread": communication.spread if "spread" in communication.model_fields_set else file.spread,
        "source": f"{file.kind}: {file.source}",
        "all_reduces": {each.ranks: _rising(each) for each in file.all_reduce},
        "factor": 1.0,
    }
    return MeasuredLink.model_construct(**{**dict(communication), **changes})


def note(communication: Communication) -> str | None:
    """A sentence for a link that is a guess; None where it was measured."""
    assumed = (communication.source or "").startswith("assumed: ")
    if communication.spread < GUESS and not assumed:
        return None
    source = communication.source or "not stated"
    guess = f"the link between ranks is a guess (± {100 * communication.spread:.0f} %; {source})"
    return f"{guess}: measure an all-reduce, or refine on a short run (twin calibrate refine)"


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _rising(measured: AllReduces) -> Points:
    longest = accumulate(measured.seconds, max)
    return tuple((float(size), seconds) for size, seconds in zip(measured.bytes, longest, strict=True))


def _between(points: Points, size: float) -> float:
    """Seconds of a message: as the smallest below it, in proportion to the size beyond the largest."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1] * size / points[-1][0]
    i = bisect_right(points, size, key=lambda point: point[0]) - 1
    (low, at_low), (high, at_high) = points[i : i + 2]
    return at_low + (at_high - at_low) * (size - low) / (high - low)
