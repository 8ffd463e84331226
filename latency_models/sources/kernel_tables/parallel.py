"""Settings of kernel-table step times, and the cost of collectives.

Tables describe one rank without collectives, whose cost is added here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.paths import NameOrFile
from workloads.errors import BadInput


class Communication(Strict):
    """Cost model of ring collectives: a latency, and the bytes that cross a rank's link.

    Attributes:
        link: a preset (nvlink3, nvlink4, nvlink5, pcie4, pcie5, pcie4-no-peer, pcie5-no-peer), or a file `twin.link/1`
            such as that of `twin calibrate run --ops communication`, in place of latency, bandwidth and source.
        latency: seconds of the shortest collective. each_device: seconds more for each rank beyond two.
        bandwidth: bytes/s that a rank sends while it receives as many.
        element_bytes: of one activation; 2 for bf16.
        source: origin of the two figures.
        spread: their relative uncertainty. 0.35 is what data sheets are off by; a measured link may state less.
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

    Attributes:
        model: name or path of a model file: layers, sizes, experts. Tables describe one layer.
        tensor_parallel: ranks that share each layer; must equal that of the measurement.
        data_parallel: ranks with requests of their own that share their experts; only with `expert_parallel`.
        expert_parallel: whole experts are spread over all ranks, in place of splitting each.
        overhead: seconds a step without a kernel, between one step's last kernel and the next one's first. vLLM with
            async scheduling and CUDA graphs: 150 to 170 µs (vllm-project/vllm pull request 11133); without async
            scheduling several milliseconds.
        kernel_gap: seconds between the end of a kernel and the start of the next, which kernel timings leave out. About
            1.3 µs in a CUDA graph on an H100 (hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles).
        communication: collectives; required for more than one rank.
        capture_sizes: batch sizes with captured CUDA graphs. A step of at most the largest runs in the smallest graph
            that holds it, its linear layers over that many rows. Off by default, since tables with points as close as
            `row_tile` are read upwards anyway.
        time_scale: factor on all kernel times, for a device with another clock than the measured one.
        row_tile: minimum number of rows that linear layers compute at once. Between measured points that are at most
            this far apart, the upper point's time is used, since times climb in stairs; elsewhere times are
            interpolated.
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
