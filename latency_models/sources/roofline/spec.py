"""The step times of `source: roofline`, its scenario section, and the board of errors.

The board says how far predictions from data sheets were off rows that were measured. `python -m benchmarks.error_board`
makes it of 5,221 measured rows. A cell has the rows of one model on one device in one format, of one engine or of all;
where the model was not measured, one of models like it. Errors are of mean TPOT, predicted over measured, minus 1, by
source roofline as it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.layers import ExpertLoad
from latency_models.deployment.models import ExpertFFN, LatentAttention, Model, load_model
from latency_models.io.config_io import Strict, checked
from latency_models.io.files import FOLDER, FilePath, NameOrFile
from latency_models.sources.registry import SourceSpec, register
from latency_models.sources.roofline.efficiency import (
    Backend,
    Efficiency,
    at_the_peaks,
    built_in_efficiency,
    load_efficiency,
)
from latency_models.sources.roofline.placement import Cache, Placement, Weights, check_placement, device_memory
from latency_models.sources.roofline.step_kernels import StepKernels
from latency_models.sources.roofline.work import ABOUT, EVEN, WHOLE_STEP, ExpertRows, notes_on
from latency_models.stages import split
from latency_models.step_time import Basis, MeasuredDeployment, Origin, StepTime, Unknown
from schedulers.batches import Batch
from workloads.errors import BadInput
from workloads.json_files import read_json_object

SUMMARY = FOLDER / "error-board.json"

LIKE = {"dense": "dense models", "experts": "mixtures of experts", "latent": "models with latent attention"}


class Cell(Strict):
    """Measured rows that are alike; `model` or `engine` "": all of the `family`, or all engines.

    `bias`, `median`, `p90`: of the errors of TPOT. `spread`: root mean square of their logarithms.
    """

    family: Literal["dense", "experts", "latent"]
    model: str = ""
    engine: str = ""
    hardware: str
    precision: Literal["bf16", "fp8", "fp4", "int4"]
    rows: PositiveInt
    bias: float
    median: NonNegativeFloat
    p90: NonNegativeFloat
    spread: NonNegativeFloat

    @property
    def own(self) -> bool:
        """True if these are rows of the model itself, on one engine."""
        return bool(self.model and self.engine)

    def sentence(self) -> str:
        """The error of rows like these, in a sentence without a full stop."""
        model = self.model or LIKE[self.family]
        engine = f", {self.engine}" if self.engine else ""
        way = "slow" if self.bias > 0 else "fast"
        bias = f", {100 * abs(self.bias):.0f} % too {way} on the whole" if abs(self.bias) >= BIASED else ""
        return (
            f"measured rows like this one ({model} in {self.precision} on {self.hardware}{engine}) were "
            f"{100 * self.median:.0f} % off in the median of TPOT ({self.rows} rows{bias})"
        )


BIASED = 0.05
"""Smallest bias that is worth a word."""


class Summary(Strict):
    """The file."""

    schema_: Literal["twin.error-board/1"] = Field(alias="schema")
    source: str
    cells: list[Cell]


@cache
def built_in_board() -> Summary:
    """The summary that comes with the package."""
    return checked(Summary, read_json_object(SUMMARY), SUMMARY)


def family(model: Model) -> Literal["dense", "experts", "latent"]:
    """Dense, experts or latent: models with kernels of their own."""
    if isinstance(model.attention, LatentAttention):
        return "latent"
    return "experts" if isinstance(model.ffn, ExpertFFN) else "dense"


def board_cell(model: Model, hardware: str, placement: Placement, engine: str = "vllm") -> Cell | None:
    """The measured rows most like a deployment: of the model and engine, of the model, of models like it; or None."""
    sparse = isinstance(model.ffn, ExpertFFN)
    precision = FOUR_BITS.get(placement.experts if sparse else placement.weights)
    cells = {
        (cell.model, cell.engine): cell
        for cell in built_in_board().cells
        if (cell.family, cell.hardware, cell.precision) == (family(model), hardware, precision)
    }
    name = next((name for name, _ in cells if name and _alike(load_model(name), model)), "")
    keys = ((name, engine), (name, ""), ("", engine), ("", ""))
    return next((cells[key] for key in keys if key in cells), None)


def _alike(measured: Model, model: Model) -> bool:
    """True if two models have the same shapes: those of one name in two versions."""
    return (measured.layers, measured.hidden_size, measured.vocabulary, measured.attention, measured.ffn) == (
        model.layers, model.hidden_size, model.vocabulary, model.attention, model.ffn
    )  # fmt: skip


FOUR_BITS: dict[str, str] = {"bf16": "bf16", "fp8": "fp8", "fp4": "fp4", "mxfp4": "fp4", "int4": "int4"}
"""Precisions of measured rows by the formats of weights."""


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
            basis: Basis = "fitted" if measured else "held out"
            factors.append(Unknown(part, about, basis, spread, "kernel tables of the device"))
        basis = "fitted" if served else "held out"
        about, spread = "steps of an engine against kernels alone", math.sqrt(STEP_SHARE) * total
        return (*factors, Unknown(WHOLE_STEP, about, basis, spread, "TPOT"))

    def vary(self, scores: Mapping[str, float]) -> RooflineStepTime:
        scales = {name: self.scales[name] * factor for name, factor in self.factors(scores).items()}
        parts = self.model, self.hardware, self.placement
        if self._floor is None:
            unscaled = dict.fromkeys(ABOUT, 1.0) | {WHOLE_STEP: self._load.slowdown}
            peaks = at_the_peaks(self.efficiency)
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


@register
class RooflineSpec(SourceSpec):
    """A model on a device, from data sheets and what kernels reach of them: nothing needs to be measured.

    `model`, `hardware`: built-in names or files. `pipeline_parallel`: stages; one batch is under way at a time unless
    `engine.pipeline_parallel_size` is as large. `expert_parallel`: experts are spread whole over all devices of a
    stage. `weights`: default: as published; `experts`: as `weights`. `expert_load`: popularity of experts, and EPLB;
    default: even. `link`: of all-reduces; default: intra_node while a stage fits in a node. `backend`: vllm, sglang or
    trtllm. `efficiency`: a file of fits in place of the built-in one.
    """

    source: Literal["roofline"]
    model: NameOrFile
    hardware: NameOrFile
    tensor_parallel: PositiveInt = 1
    pipeline_parallel: PositiveInt = 1
    data_parallel: PositiveInt = 1
    expert_parallel: bool = False
    weights: Weights | None = None
    experts: Weights | None = None
    cache: Cache = "bf16"
    expert_load: ExpertLoad | None = None
    link: Literal["intra_node", "inter_node"] | None = None
    backend: Backend = "vllm"
    efficiency: FilePath | None = None

    def placement(self, model: Model) -> Placement:
        formats = model.formats(self.weights, self.experts)
        degrees = (self.tensor_parallel, self.pipeline_parallel, self.data_parallel, self.expert_parallel)
        return Placement(*degrees, formats.linear, formats.experts, self.cache)

    def build(self, base: Path) -> StepTime:
        from latency_models.deployment.hugging_face import any_model
        from latency_models.sources.roofline.work import expert_rows, kinds_of_parts

        model, hardware = any_model(self.model, base), load_hardware(self.hardware, base)
        placement = self.placement(model)
        try:
            check_placement(model, hardware, placement)
        except BadInput as error:
            raise BadInput(error.expected, value=error.value, field=f"step_time.{error.field}") from None
        load = expert_rows(model, placement, self.expert_load, base)
        efficiency = built_in_efficiency(self.backend)
        if self.efficiency:
            path = base / self.efficiency
            efficiency = load_efficiency(path)
            for kind in kinds_of_parts(model, hardware, placement).values():
                if kind not in efficiency.kernels:
                    raise BadInput(f"expected a fit of {kind}, which {model.name} has", field="kernels", file=path)
        return RooflineStepTime(model, hardware, placement, efficiency, link=self.link, load=load)

    def check_ranks(self, data_parallel: int) -> None:
        if data_parallel != self.data_parallel:
            expected = f"expected {data_parallel}, as engine.data_parallel_size"
            raise BadInput(expected, field="step_time.data_parallel", value=self.data_parallel)

    def check_stages(self, pipeline_parallel: int) -> None:
        """An engine of one stage in flight may have step times of several stages."""
        if pipeline_parallel not in (1, self.pipeline_parallel):
            expected = f"expected {pipeline_parallel}, as engine.pipeline_parallel_size"
            raise BadInput(expected, field="step_time.pipeline_parallel", value=self.pipeline_parallel)
