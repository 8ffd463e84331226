"""Settings of source `kernel_tables`, and links between ranks.

Tables describe one rank without collectives, whose cost is added here: from measured all-reduces (the file
`twin.link/1`) or by a line. A measured table has its jumps: algorithms change with the size, and short messages
scatter. Times are made to rise with the size (a longer message takes no less), and are straight lines between sizes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import NameOrFile, find_data
from workloads.errors import BadInput


class Communication(Strict):
    """Cost model of ring collectives: a latency, and the bytes that cross a rank's link.

    `link`: a preset (nvlink3, nvlink4, nvlink5, pcie4, pcie5, pcie4-no-peer, pcie5-no-peer) or a file `twin.link/1`, in
    place of the next. `latency`: seconds of the shortest collective; `each_device`: more for each rank beyond two.
    `bandwidth`: bytes/s that a rank sends while it receives as many. `spread`: relative uncertainty; data sheets are
    off by 0.35.
    """

    link: NameOrFile | None = None
    latency: NonNegativeFloat = 0.0
    each_device: NonNegativeFloat = 0.0
    bandwidth: PositiveFloat = 1.0
    element_bytes: PositiveFloat = 2.0
    source: Annotated[str, Field(min_length=1)] | None = None
    spread: PositiveFloat = 0.35

    @model_validator(mode="after")
    def _stated(self) -> Communication:
        stated = {"latency", "bandwidth", "source"} & self.model_fields_set
        if self.link is None and len(stated) < 3:
            missing = sorted({"latency", "bandwidth", "source"} - stated)
            raise BadInput("required field is missing; or give a link, such as nvlink4", field=missing[0])
        if self.link is not None and (self.latency, self.bandwidth, self.source) != (0.0, 1.0, None):
            raise BadInput("expected either a link or its numbers", field="link", value=self.link)
        return self

    def scaled(self, factor: float) -> Communication:
        """The same link with all times that much longer."""
        return self.model_copy(
            update={
                "latency": self.latency * factor,
                "each_device": self.each_device * factor,
                "bandwidth": self.bandwidth / factor,
            }
        )

    def _latency(self, ranks: int) -> float:
        return self.latency + (ranks - 2) * self.each_device

    def all_reduce(self, ranks: int, elements: float) -> float:
        """Seconds of an all-reduce: each element crosses a link 2(N - 1)/N times."""
        return self._latency(ranks) + elements * self.element_bytes * 2 * (ranks - 1) / ranks / self.bandwidth

    def all_gather(self, ranks: int, elements: float) -> float:
        """Seconds of an all-gather of `elements` in all. A reduce-scatter takes as long."""
        return self._latency(ranks) + elements * self.element_bytes * (ranks - 1) / ranks / self.bandwidth


def _a_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class KernelTableSettings(Strict):
    """The deployment of the measured model.

    `tensor_parallel`: as in the measurement. `data_parallel`: ranks with requests of their own that share experts.
    `overhead`: seconds a step without a kernel; vLLM with async scheduling and CUDA graphs: 150 to 170 µs
    (vllm-project/vllm pull request 11133), else several milliseconds. `kernel_gap`: seconds between kernels; about 1.3
    µs in a CUDA graph on an H100 (hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles). `capture_sizes`: batch sizes
    of CUDA graphs, to which linear layers pad; off by default, since close tables are read upwards anyway.
    `time_scale`: for a device with another clock. `row_tile`: rows that linear layers compute at once: between points
    this close, the upper one's time is used.
    """

    model: Annotated[NameOrFile, Field(min_length=1)]
    tensor_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    expert_parallel: bool = False
    overhead: NonNegativeFloat = 0.0
    kernel_gap: NonNegativeFloat = 0.0
    communication: Communication | None = None
    capture_sizes: Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(_a_list)] = None
    time_scale: PositiveFloat = 1.0
    row_tile: PositiveInt = 16

    @model_validator(mode="after")
    def _agrees(self) -> KernelTableSettings:
        if self.ranks > 1 and self.communication is None:
            raise BadInput(f"expected latency, bandwidth and source, since there are {self.ranks} ranks",
                           field="communication")  # fmt: skip
        if self.data_parallel > 1 and not self.expert_parallel:
            expected = "expected 1 without expert_parallel: ranks that share nothing are engines of their own"
            raise BadInput(expected, field="data_parallel", value=self.data_parallel)
        sizes = list(self.capture_sizes or ())
        if sizes != sorted(set(sizes)):
            raise BadInput("expected rising numbers", field="capture_sizes", value=sizes)
        return self

    @property
    def ranks(self) -> int:
        """Devices that work on one step."""
        return self.tensor_parallel * self.data_parallel

    @property
    def expert_ranks(self) -> int:
        """Ranks over which whole experts are spread; 1 where each expert is split."""
        return self.ranks if self.expert_parallel else 1


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
    """Measured all-reduces over this many ranks: seconds by the bytes of the message of one rank."""

    ranks: Annotated[int, Field(ge=2)]
    bytes: list[PositiveInt] = Field(min_length=2)
    seconds: list[PositiveFloat] = Field(min_length=2)

    @model_validator(mode="after")
    def _rising(self) -> AllReduces:
        if len(self.bytes) != len(self.seconds) or sorted(set(self.bytes)) != self.bytes:
            raise ValueError("expected rising bytes, and as many seconds")
        return self


class LinkFile(Strict):
    """The file `twin.link/1`: `measured`, `fitted` to measurements of others, or `assumed`.

    `latency`, `each_device`, `bandwidth`: as in `Communication`; `all_reduce`: measured times in place of these three.
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
    """A link with measured all-reduces: (bytes, seconds) by ranks, and a factor on them."""

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
        "all_reduces": {table.ranks: _rising(table) for table in file.all_reduce},
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
