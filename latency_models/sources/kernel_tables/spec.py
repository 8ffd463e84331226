"""The step times of `source: kernel_tables`, and its scenario section."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from latency_models.deployment.models import Model, load_model
from latency_models.io.files import FilePath
from latency_models.sources.kernel_tables.attention import AttentionTimes
from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.kernel_tables.layers import ExpertTimes, head, kernels_a_step, linear_layers
from latency_models.sources.kernel_tables.settings import KernelTableSettings, note, resolve
from latency_models.sources.kernel_tables.tables import KernelTables, held_out_errors
from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import Basis, MeasuredDeployment, StepTime, Unknown
from schedulers.batches import Batch
from workloads.errors import BadInput


class KernelTableStepTime(StepTime):
    """The sum of linear layers, attention, LM head and sampler, experts, collectives and overhead.

    The head computes one row for every sequence in the step, also of prompts that continue: vLLM computes their logits
    too, and drops the token. Tables leave out a clock that falls under sustained load, and kernels that a compiled
    engine fuses. `composed_error`: relative error of composed steps on the measured engine; None: there were none.
    """

    def __init__(
        self, tables: KernelTables, settings: KernelTableSettings, model: Model, composed_error: float | None = None
    ) -> None:
        if tables.tensor_parallel != settings.tensor_parallel:
            expected = f"expected {tables.tensor_parallel}, for which the tables were measured"
            raise BadInput(
                expected, field="tensor_parallel", value=settings.tensor_parallel, file=tables.provenance.source
            )
        model.check_layers_alike()
        self.tables = tables
        self.settings = settings
        self.model = model
        self._outside: dict[str, float] = {}
        scale = model.layers * 1e-6 * settings.time_scale
        self._attention = AttentionTimes(tables.attention, tables.skew, scale, self._flag)
        self._rows = linear_layers(tables, settings, model, self._flag)
        self._head = head(tables, settings, model, self._flag)
        self._experts = self._expert_times()
        self._overhead = self._between_kernels()
        self._peers = settings.data_parallel
        self._composed_error = composed_error

    def measured_deployment(self) -> MeasuredDeployment:
        ranks = None if self.settings.expert_parallel else self.settings.tensor_parallel
        return MeasuredDeployment(self.tables.origin, self.model, ranks, self._notes())

    def _notes(self) -> tuple[str, ...]:
        """Notes on what no table has: the link, and experts that were measured on one rank."""
        link = self.settings.communication if self.settings.ranks > 1 else None
        notes = (note(link) if link is not None else None, self._experts.note if self._experts is not None else None)
        return tuple(text for text in notes if text)

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds. All data-parallel ranks are assumed to have as many rows."""
        return self.rank_seconds(batch, batch.tokens * self._peers if self._experts is not None else 0)

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return self.rank_decode_seconds(decodes, kv, longest, decodes * self._peers, steps)

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        """An idle rank lends its experts, and runs a row of its own to keep step."""
        if batch is None:
            return self._rest(1, 0, gathered) if self._experts is not None else 0.0
        chunks = batch.chunks
        fixed = self._rest(batch.tokens, batch.decode_tokens + len(chunks), gathered)
        if chunks:
            return fixed + self._attention.mixed(batch)
        return fixed + self._attention.decode(batch.n_decodes, batch.decode_kv, batch.longest_decode)

    def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
        if not decodes:
            return [self.rank_seconds(None, gathered)] * steps
        return self._attention.decode_run(decodes, kv, longest, steps, self._rest(decodes, decodes, gathered))

    def outside(self) -> dict[str, float]:
        """Axes are named `attention.kv_decode`, `dense.tokens`, ..."""
        return dict(self._outside)

    def unknowns(self) -> tuple[Unknown, ...]:
        """`unknowns_of` lists them."""
        return self._known_unknowns

    @property
    def can_draw(self) -> bool:
        """Always, and the errors of the tables need not be computed for that."""
        return True

    @cached_property
    def _known_unknowns(self) -> tuple[Unknown, ...]:
        return unknowns_of(self.tables, self.settings, self._experts is not None, self._composed_error)

    def vary(self, scores: Mapping[str, float]) -> StepTime:
        return VariedKernelTables(self, scores)

    def _expert_times(self) -> ExpertTimes | None:
        return ExpertTimes(self.tables, self.settings, self.model, self._flag) if self.model.expert_layers else None

    def _between_kernels(self) -> float:
        return self.settings.overhead + self.settings.kernel_gap * kernels_a_step(self.tables, self.model)

    def _rest(self, rows: int, sequences: int, gathered: int) -> float:
        try:
            seconds = self._overhead + self._rows.seconds[rows] + self._head.seconds[sequences]
        except IndexError:  # beyond the measurements
            seconds = self._overhead + self._rows.at(rows) + self._head.at(sequences)
        return seconds if self._experts is None else seconds + self._experts.at(gathered)

    def _flag(self, axis: str, value: float) -> None:
        if value > self._outside.get(axis, 0.0):
            self._outside[axis] = float(value)


class VariedKernelTables(KernelTableStepTime):
    """The same tables at other scores of the unknowns; shares the other model's record of what lay outside."""

    def __init__(self, centre: KernelTableStepTime, scores: Mapping[str, float]) -> None:
        vars(self).update(vars(centre))
        factors = centre.factors(scores)
        changed: dict[str, object] = {}
        for name, (_, missing, _) in HOST.items():  # time that was left out can only be longer than 0
            seconds = getattr(centre.settings, name)
            changed[name] = seconds * factors[name] if seconds else missing * max(scores.get(name, 0.0), 0.0)
        if centre.settings.communication is not None and "link" in factors:
            changed["communication"] = centre.settings.communication.scaled(factors["link"])
        self.settings = centre.settings.model_copy(update=changed)
        if self.settings.communication != centre.settings.communication:
            self._rows = linear_layers(self.tables, self.settings, self.model, self._flag)
            self._head = head(self.tables, self.settings, self.model, self._flag)
            self._experts = self._expert_times()
        self._overhead = self._between_kernels()
        self._parts = {part: factors["engine"] * factors.get(part, 1.0) for part in PARTS}
        self._prompt_steps = factors["prompt_steps"]
        self._beyond = BEYOND * scores.get("beyond", 0.0)
        self._longest = float(max(self.tables.attention.kv_decode))

    def unknowns(self) -> tuple[Unknown, ...]:
        """No unknowns: this is one of the models that the other's unknowns allow."""
        return ()

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        if batch is None:
            return self._step(self._kernels(1, 0, gathered), 0.0, 1, 0) if self._experts is not None else 0.0
        rows, chunks = batch.tokens, batch.chunks
        kernels = self._kernels(rows, batch.decode_tokens + len(chunks), gathered)
        if chunks:
            attention = self._parts["prompt_attention"] * self._attention.mixed(batch)
            return self._step(kernels, attention, rows, batch.longest_decode, self._prompt_steps)
        seconds = self._attention.decode(batch.n_decodes, batch.decode_kv, batch.longest_decode)
        return self._step(kernels, self._parts["decode_attention"] * seconds, rows, batch.longest_decode)

    def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
        if not decodes:
            return [self.rank_seconds(None, gathered)] * steps
        kernels, factor = self._kernels(decodes, decodes, gathered), self._parts["decode_attention"]
        attention = self._attention.decode_run(decodes, kv, longest, steps, 0.0)
        return [self._step(kernels, factor * seconds, decodes, longest + i) for i, seconds in enumerate(attention)]

    def _kernels(self, rows: int, sequences: int, gathered: int) -> float:
        parts = self._parts
        seconds = parts["dense"] * self._rows.at(rows) + parts["head"] * self._head.at(sequences)
        return seconds if self._experts is None else seconds + parts["experts"] * self._experts.at(gathered)

    def _step(self, kernels: float, attention: float, rows: int, longest: int, factor: float = 1.0) -> float:
        """Seconds of a step from its parts, its kernels times a factor."""
        beyond = max(rows / (len(self._rows.seconds) - 1), longest / self._longest, 1.0)
        return self._overhead + factor * (kernels + attention) * math.exp(self._beyond * math.log(beyond))


PARTS = ("dense", "head", "decode_attention", "prompt_attention", "experts")
"""Parts of a step with a factor of their own, beside the one of `engine` on all kernels."""

BEYOND = 0.3
"""Deviation of the exponent on how far a batch lies beyond the tables: twice as far, a step is within 23 % of what
their last slope says."""

HOST = {
    "overhead": ("host time between two steps", 300e-6, "the engine's step log"),
    "kernel_gap": ("time between two kernels", 1.3e-6, "a profile of one step"),
}
"""Settings, what they are, seconds at a score of +1 where a scenario states none (an asynchronous scheduler needs 0.15
ms between two steps, a synchronous one up to milliseconds), and what to measure."""

STEPS, ATTENTION = "a minute of the engine's own steps", "kernels of attention"


def unknowns_of(
    tables: KernelTables, settings: KernelTableSettings, experts: bool, composed_error: float | None = None
) -> tuple[Unknown, ...]:
    """The unknowns of a model from these tables; `composed_error` takes the place of the prior for kernels.

    Deviations are those of interpolation, and what measured engines suggest: on an RTX PRO 6000 decode steps of one run
    are 3 % shorter than the sum of their kernels and gaps, steps with prompts 5 % longer; on an RTX 4090 all steps 6 %
    shorter.
    """
    errors = {name: held_out.median for name, held_out in (tables.held_out or held_out_errors(tables)).items()}

    def from_tables(prefix: str, further: float) -> float:
        """The deviation of interpolation between points, and what no table says besides."""
        interpolated = max((error for name, error in errors.items() if name.startswith(prefix)), default=0.0)
        return math.hypot(interpolated, further)

    skew = tables.skew.heldout_median_error if tables.skew else None
    in_engine: tuple[Basis, float] = ("assumed", 0.04)
    if composed_error is not None:
        in_engine = ("held out", max(1.5 * composed_error, 0.01))
    decodes = from_tables("attention.decode", 0.1 if skew is None else max(0.03, skew))
    rows: list[tuple[str, str, Basis, float | None, str]] = [
        ("engine", "kernels in an engine against kernels alone: clocks under load, fusion, caches", *in_engine, STEPS),
        ("dense", "linear layers, as interpolated", "held out", from_tables("dense", 0.02), "kernels of layers"),
        ("decode_attention", "attention of decodes of uneven lengths", "held out", decodes, ATTENTION),
        ("prompt_attention", "attention of prompts, alone and beside decodes", "held out",
         from_tables("attention.mixed", 0.05), ATTENTION),
        ("head", "LM head and sampler", "held out", from_tables("per_sequence", 0.05), "kernels of the head"),
    ]  # fmt: skip
    for name, (about, _, measure) in HOST.items():
        if getattr(settings, name):
            rows.append((name, f"{about}, as the scenario states it", "stated", 0.3, measure))
        else:
            rows.append((name, f"{about}, which the scenario leaves out", "assumed", None, measure))
    rows += [
        ("prompt_steps", "steps with prompts against steps of decodes alone: graphs in pieces, launches", "assumed",
         0.05, STEPS),
        ("beyond", "batches beyond the tables: an exponent on how far", "extrapolated", None,
         "kernels at larger batches"),
    ]  # fmt: skip
    if experts:
        further = math.hypot(from_tables("moe", 0.05), 0.15)
        about = "uneven load of experts, which tables spread evenly"
        rows.append(("experts", about, "assumed", further, "the load of experts in the engine"))
    link = settings.communication
    if link is not None and settings.ranks > 1:
        about = f"collectives ({link.source})"
        rows.append(("link", about, "assumed", link.spread, "an all-reduce of this size on this machine"))
    return tuple(Unknown(*row) for row in rows)


def load_kernel_tables(
    path: Path, settings: KernelTableSettings, model: Model | None = None, base: Path = Path()
) -> KernelTableStepTime:
    """Step times from a folder of tables, or from the file that `twin calibrate import` made of one."""
    tables = read_kernel_tables(base / path)
    if settings.communication is not None:
        settings = settings.model_copy(update={"communication": resolve(settings.communication, base)})
    return KernelTableStepTime(tables, settings, model or load_model(settings.model, base))


@register
class KernelTablesSpec(KernelTableSettings, SourceSpec):
    """Kernel microbenchmarks: `path` is a profiler's folder, or the file that `twin calibrate import` made of it."""

    source: Literal["kernel_tables"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        settings = KernelTableSettings(**self.model_dump(exclude={"source", "path"}, exclude_unset=True))
        return load_kernel_tables(Path(self.path), settings, base=base)

    def check_ranks(self, data_parallel: int) -> None:
        """Both sides state the number of ranks that share experts."""
        if self.data_parallel != data_parallel:
            expected = f"expected engine.data_parallel_size ({data_parallel}): ranks that step together"
            raise BadInput(expected, field="step_time.data_parallel", value=self.data_parallel)
