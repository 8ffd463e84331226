"""Step times from FLOPs and bytes, and the shares of a device's peaks that kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from latency_models.deployment.hardware import Hardware
from latency_models.deployment.models import Model
from latency_models.origin import MeasuredDeployment, Origin
from latency_models.sources.roofline.efficiency import Efficiency, at_the_peaks
from latency_models.sources.roofline.error_board import Cell, board_cell
from latency_models.sources.roofline.placement import Placement, device_memory
from latency_models.sources.roofline.step_kernels import StepKernels
from latency_models.sources.roofline.work import ABOUT, EVEN, WHOLE_STEP, ExpertRows, notes_on
from latency_models.stages import split
from latency_models.step_time import StepTime
from latency_models.unknowns import Basis, Unknown
from schedulers.batches import Batch

STEP_SHARE = 0.7
"""Share of the variance of served TPOT that moves whole steps, so that a short run tells it from that of one part."""


class RooflineStepTime(StepTime):
    """The sum over the kernels of a step of `launch + max(FLOPs / rate, bytes / bandwidth)`, and the engine's own time.

    Decodes of uneven lengths count as decodes of their mean length. Sparse attention (DSA) is attention to at most
    `top_k` tokens, and an indexer's work on all of them; linear attention works on a state of each sequence. `scales`:
    factors by unknown. `floor`: kernels that no step is faster than; of a draw, those that reach the device's peaks.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        placement: Placement,
        efficiency: Efficiency,
        *,
        link: Literal["intra_node", "inter_node"] | None = None,
        scales: Mapping[str, float] | None = None,
        load: ExpertRows = EVEN,
        floor: StepKernels | None = None,
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.placement = placement
        self.efficiency = efficiency
        self._load = load
        self.scales = dict.fromkeys(ABOUT, 1.0) | {WHOLE_STEP: load.slowdown} | dict(scales or {})
        self._link: Literal["intra_node", "inter_node"] = link or (
            "intra_node" if placement.stage_devices <= hardware.devices_per_node else "inter_node"
        )
        self._kernels = StepKernels(model, hardware, placement, efficiency, self._link, self.scales, load, floor)
        self._floor = floor  # of its draws, which share what it remembers, once there are some
        self.kinds = self._kernels.kinds

    # -- the protocol ------------------------------------------------------------------------------------------------

    def seconds(self, batch: Batch) -> float:
        """Seconds of one step. Of attention replicas that share experts, all have as large a batch."""
        return self._kernels.rank_seconds(batch, batch.tokens * self.placement.data_parallel)

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return self._kernels.decode_seconds(decodes, kv, decodes * self.placement.data_parallel, steps)

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        """An idle rank computes its share of the experts."""
        return self._kernels.rank_seconds(batch, gathered)

    def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
        return self._kernels.decode_seconds(decodes, kv, gathered, steps)

    def group_decode_seconds(self, runs: Sequence[tuple[int, int, int]], steps: int) -> list[float]:
        return self._kernels.group_decode_seconds(runs, sum(decodes for decodes, _, _ in runs), steps)

    def stage_seconds(self, batch: Batch, shares: Sequence[float]) -> list[float]:
        """With the messages between stages, they sum to `seconds`; the last has the output head and the host's work."""
        behind = self.placement.pipeline_parallel - 1
        if not behind:
            return split(self.seconds(batch), shares)
        scale, engine = self.scales[WHOLE_STEP], self.efficiency.engine
        last = scale * (self._kernels.sampled(batch.outputs) + engine.per_sequence * batch.outputs)
        stages = split(self.seconds(batch) - last - behind * self._kernels.message(batch.tokens), shares)
        stages[-1] += last
        return stages

    def send_seconds(self, tokens: int) -> float | None:
        return self._kernels.message(tokens) if self.placement.pipeline_parallel > 1 else None

    def unknowns(self) -> tuple[Unknown, ...]:
        """A factor for each kind of kernel, and one for the whole step.

        `STEP_SHARE` of the variance of served TPOT (of the board's rows of this model, device, engine and format, else
        of all) is the whole step's, and the rest, at most, that of each part.
        """
        factors, cell = [], self._board_cell()
        served = cell is not None and cell.own
        total = cell.spread if cell and served else self.efficiency.engine.spread
        part_most = math.sqrt(1 - STEP_SHARE) * total
        for part, kind in self.kinds.items():
            fitted = self.efficiency.kernels[kind]
            measured = self.hardware.name in fitted.devices
            about = f"{ABOUT[part]} on {self.hardware.name}" + ("" if measured else ", by those of other devices")
            most = part_most if measured or served else math.inf
            spread = min(fitted.of(self.hardware.name).spread, most)
            factors.append(
                Unknown(part, about, "fitted" if measured else "held out", spread, "kernel tables of the device")
            )
        basis: Basis = "fitted" if served else "held out"
        about, spread = "steps of an engine against kernels alone", math.sqrt(STEP_SHARE) * total
        return (*factors, Unknown(WHOLE_STEP, about, basis, spread, "TPOT"))

    def vary(self, scores: Mapping[str, float]) -> RooflineStepTime:
        scales = {
            unknown.name: self.scales[unknown.name] * unknown.factor(scores.get(unknown.name, 0.0))
            for unknown in self.unknowns()
        }
        parts = self.model, self.hardware, self.placement
        if self._floor is None:
            unscaled, peaks = (
                dict.fromkeys(ABOUT, 1.0) | {WHOLE_STEP: self._load.slowdown},
                at_the_peaks(self.efficiency),
            )
            self._floor = StepKernels(*parts, peaks, self._link, unscaled, self._load, None)
        return RooflineStepTime(
            *parts, self.efficiency, link=self._link, scales=scales, load=self._load, floor=self._floor
        )

    def __deepcopy__(self, memo: dict[int, object]) -> RooflineStepTime:
        """The model itself: it remembers nothing of a run but what any other would compute again."""
        return self

    def measured_deployment(self) -> MeasuredDeployment:
        """Nothing was measured, but the model and the devices are known."""
        tensor_only = self.placement.devices == self.placement.tensor_parallel
        ranks = self.placement.tensor_parallel if tensor_only else None
        memory = device_memory(self.model, self.hardware, self.placement)
        return MeasuredDeployment(
            Origin(),
            self.model,
            ranks,
            tuple(self.notes()),
            measured=False,
            device=self.hardware.name,
            devices=self.placement.devices,
            memory=memory.capacity,
            weights=memory.weights,
        )

    def kv_tokens(self, gpu_memory_utilization: float, max_num_seqs: int, *, mtp: bool = False) -> float:
        shares = gpu_memory_utilization, max_num_seqs
        return device_memory(self.model, self.hardware, self.placement, *shares, mtp=mtp).kv_tokens

    def notes(self) -> list[str]:
        """Notes on the parts of the step that are extrapolated."""
        notes = notes_on(self.model, self.hardware, self.placement, self.efficiency)
        cell = self._board_cell()
        return notes if cell is None else [*notes, cell.sentence()]

    def _board_cell(self) -> Cell | None:
        return board_cell(self.model, self.hardware.name, self.placement, self.efficiency.backend)
