"""Settings of source `kernel_tables`, and links between ranks.

Tables describe one rank without collectives, whose cost is added here: from measured all-reduces (the file
`twin.link/1`) or by a line. A measured table has its jumps: algorithms change with the size, and short messages
scatter. Times are made to rise with the size (a longer message takes no less), and are straight lines between sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from latency_models.calibration import as_tuples
from latency_models.interpolation import level
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import NameOrFile, find_data
from workloads.errors import BadInput

Points: TypeAlias = tuple[list[float], list[float]]
"""Bytes and seconds of messages, both rising."""


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

    _measured: Mapping[int, Points] = PrivateAttr(default_factory=dict)
    """All-reduces of a file, by ranks, and a factor on them."""
    _factor: float = PrivateAttr(default=1.0)

    def scaled(self, factor: float) -> Communication:
        """The same link with all times that much longer."""
        times = {"latency": self.latency * factor, "each_device": self.each_device * factor}
        slower = self.model_copy(update={**times, "bandwidth": self.bandwidth / factor})
        slower._factor = self._factor * factor
        return slower

    def all_reduce(self, ranks: int, elements: float) -> float:
        """Seconds of an all-reduce: each element crosses a link 2(N - 1)/N times.

        Of measured ones, ranks that are not among them get the next number's, by the ring's share.
        """
        if not self._measured:
            return self._ring(ranks, elements, 2)
        nearest = min(self._measured, key=lambda measured: (abs(measured - ranks), measured))
        share = _share(ranks) / _share(nearest)
        return self._factor * _between(*self._measured[nearest], elements * self.element_bytes * share)

    def all_gather(self, ranks: int, elements: float) -> float:
        """Seconds of an all-gather of `elements` in all, or of a reduce-scatter: half the way of an all-reduce."""
        return self.all_reduce(ranks, elements) / 2 if self._measured else self._ring(ranks, elements, 1)

    def _ring(self, ranks: int, elements: float, times: int) -> float:
        latency = self.latency + (ranks - 2) * self.each_device
        return latency + elements * self.element_bytes * times * (ranks - 1) / ranks / self.bandwidth


def _share(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _between(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Seconds of a message: as the smallest below it, in proportion to the size beyond the largest."""
    return seconds[-1] * size / sizes[-1] if size >= sizes[-1] else level(sizes, seconds, size)


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
    capture_sizes: Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(as_tuples)] = None
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


def resolve(communication: Communication, base: Path) -> Communication:
    """The link that a section names, by a preset or a file; the section itself where it states its numbers."""
    if communication.link is None:
        return communication
    path = find_data("links", communication.link, base)
    file = checked(LinkFile, read_yaml(path), path)
    numbers = {name: getattr(file, name) for name in ("latency", "each_device", "bandwidth", "spread")}
    if "spread" in communication.model_fields_set:
        del numbers["spread"]
    link = communication.model_copy(update={**numbers, "source": f"{file.kind}: {file.source}"})
    link._measured = {
        table.ranks: ([float(size) for size in table.bytes], list(accumulate(table.seconds, max)))
        for table in file.all_reduce
    }
    return link


def note(communication: Communication) -> str | None:
    """A sentence for a link that is a guess; None where it was measured."""
    assumed = (communication.source or "").startswith("assumed: ")
    if communication.spread < GUESS and not assumed:
        return None
    source = communication.source or "not stated"
    guess = f"the link between ranks is a guess (± {100 * communication.spread:.0f} %; {source})"
    return f"{guess}: measure an all-reduce, or refine on a short run (twin calibrate refine)"
