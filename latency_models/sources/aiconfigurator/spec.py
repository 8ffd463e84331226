"""Source `aiconfigurator`: step times from the kernels of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from latency_models.interpolation import Curve, blend
from latency_models.io.config_io import read_yaml
from latency_models.io.files import FilePath
from latency_models.sources.aiconfigurator.kernels import ModelKernels
from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import MeasuredDeployment, StepTime, Unknown
from schedulers.batches import Batch
from workloads.errors import BadInput


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections for times that kernels timed one by one leave out.

    `decode`: factor on the kernels of decodes, below 1 where the engine fuses what the tables time separately.
    `prefill`: on the kernel time that prompts add; above 1 where sustained GEMMs lower the clock. `prompt_step`,
    `step`: further seconds of a step with prompts (no full CUDA graph), or with decodes. `per_sequence`: seconds of the
    host for each decode. `attention`, `experts`, `collectives`: further factors on these kernels.
    """

    decode: float = 1.0
    prefill: float = 1.0
    prompt_step: float = 0.0
    per_sequence: float = 0.0
    attention: float = 1.0
    collectives: float = 1.0
    experts: float = 1.0
    step: float = 0.0


UNKNOWNS = {
    "decode": Unknown("decode", "linear layers of decodes in an engine", "assumed", 0.12, "TPOT at a low load"),
    "attention": Unknown("attention", "attention of decodes in an engine", "assumed", 0.15, "TPOT of long contexts"),
    "collectives": Unknown("collectives", "all-reduces beside other kernels", "assumed", 0.5, "TPOT on more devices"),
    "experts": Unknown("experts", "experts under uneven load", "assumed", 0.2, "TPOT at two loads"),
    "prefill": Unknown("prefill", "kernels of prompts in an engine", "assumed", 0.2, "TTFT at a low load"),
    "host": Unknown("host", "the host: launches of steps, and each answer", "assumed", 0.7, "the engine's step log"),
}
"""Deviations of the corrections of a configuration that was left out of the fits of `regression`. That of prompts is of
their part of TPOT, without queues: fitted to seven models one by one, their factors are 0.6 for a mixture of experts of
vLLM, and 1.1 to 1.5 for the others, with a deviation of 0.13."""

STATED = 0.4
"""Share of these deviations that is left where a scenario states corrections, for example fitted ones."""

STEP_PER_LAYER, PROMPT_STEP_PER_LAYER, PER_SEQUENCE = 1e-5, 1e-4, 2e-5
"""Seconds at a score of +1 where a scenario states none."""


class AiconfiguratorStepTime(StepTime):
    """The sum of GEMMs and all-reduces by rows, attention by context, and the head by sequences.

    Decodes of uneven lengths count as decodes of their mean length. A later chunk of a prompt costs attention over all
    tokens so far, less that over earlier tokens. Decode attention is never faster than the memory: some tables were
    measured with the KV cache in L2. `share`: of the deviations of `UNKNOWNS`; default: all without corrections, else
    `STATED`.
    """

    def __init__(
        self, kernels: ModelKernels, corrections: Corrections | None = None, share: float | None = None
    ) -> None:
        self.kernels = kernels
        self.corrections = corrections or Corrections()
        self.share = (1.0 if self.corrections == Corrections() else STATED) if share is None else share
        self._by_decodes: dict[int, tuple[float, Curve, Curve, float]] = {}

    def measured_deployment(self) -> MeasuredDeployment:
        """The kernels are sums over the layers of one model."""
        kernels = self.kernels
        return MeasuredDeployment(kernels.origin, ranks=kernels.origin.tensor_parallel, notes=kernels.notes)

    def seconds(self, batch: Batch) -> float:
        decodes = batch.n_decodes
        duration = self._decode(decodes, batch.decode_kv) if decodes else 0.0
        if batch.draft_tokens:
            duration += self.corrections.decode * self._drafts(batch)
        if batch.chunks:
            duration += self.corrections.prefill * self._prompts(batch) + self.corrections.prompt_step
        return duration

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return [self._decode(decodes, tokens) for tokens in range(kv, kv + decodes * steps, decodes)]

    def unknowns(self) -> tuple[Unknown, ...]:
        """Corrections of the kernels that a step has, and of the host."""
        absent = {name for name in ("experts", "collectives") if getattr(self.kernels, name) is None}
        present = (unknown for name, unknown in UNKNOWNS.items() if name not in absent)
        if self.share == 1.0:
            return tuple(present)
        return tuple(
            replace(unknown, basis="stated", deviation=self.share * unknown.deviation)  # type: ignore[operator]
            for unknown in present
        )

    def vary(self, scores: Mapping[str, float]) -> AiconfiguratorStepTime:
        centre, layers = self.corrections, self.kernels.layers
        factors = self.factors(scores)
        changed = {name: getattr(centre, name) * factor for name, factor in factors.items() if name != "host"}
        # What other kernels cost beside linear layers has unknowns of its own.
        for name in ("attention", "experts", "collectives"):
            changed[name] = changed.get(name, 1.0) / factors["decode"]
        missing = {
            "step": STEP_PER_LAYER * layers, "prompt_step": PROMPT_STEP_PER_LAYER * layers, "per_sequence": PER_SEQUENCE
        }  # fmt: skip
        for name, seconds in missing.items():
            stated, further = getattr(centre, name), seconds * max(scores.get("host", 0.0), 0.0)
            changed[name] = stated * factors["host"] if stated else further
        return AiconfiguratorStepTime(self.kernels, replace(centre, **changed))

    def _decode(self, decodes: int, kv: int) -> float:
        parts = self._by_decodes.get(decodes)
        if parts is None:
            linear = self._rows(decodes, self.corrections.experts) + self.kernels.head.at(decodes)
            parts = self._by_decodes[decodes] = (linear, *self.kernels.generation.between(decodes))
        linear, low, high, share = parts
        attention = max(blend(low, high, share, kv / decodes), self.kernels.kv_token * kv)
        corrections = self.corrections
        kernels = corrections.decode * (linear + corrections.attention * attention)
        return kernels + corrections.step + corrections.per_sequence * decodes

    def _rows(self, rows: int, experts: float = 1.0) -> float:
        kernels, seconds = self.kernels, self.kernels.rows.at(rows)
        if kernels.experts is not None:
            seconds += (experts - 1.0) * kernels.experts.at(rows)
        if kernels.collectives is not None:
            seconds += (self.corrections.collectives - 1.0) * kernels.collectives.at(rows)
        return seconds

    def _drafts(self, batch: Batch) -> float:
        """Kernel seconds that draft tokens add to decodes: their rows. Attention reads each cache once, for all."""
        decodes, rows, head = batch.n_decodes, batch.decode_tokens, self.kernels.head
        return self._rows(rows) - self._rows(decodes) + head.at(rows) - head.at(decodes)

    def _prompts(self, batch: Batch) -> float:
        kernels, decodes = self.kernels, batch.decode_tokens
        added = self._rows(batch.tokens) - (self._rows(decodes) if decodes else 0.0)
        if batch.outputs > decodes:
            added += kernels.head.at(batch.outputs) - (kernels.head.at(decodes) if decodes else 0.0)
        context = kernels.context
        attention = context.y[0]  # one launch for all prompts; each adds what it takes beyond that
        for chunk in batch.chunks:
            attention += max(context.at(chunk.context + chunk.tokens) - context.at(chunk.context), 0.0)
        return max(added, 0.0) + attention


@register
class AiconfiguratorSpec(SourceSpec):
    """Kernels of one model: `path` is the file that `twin calibrate import` made. The other fields are `Corrections`.

    `benchmarks.silicon_regression` fits all corrections to closed-loop measurements.
    """

    source: Literal["aiconfigurator"]
    path: FilePath
    decode: PositiveFloat = 1.0
    prefill: PositiveFloat = 1.0
    prompt_step: NonNegativeFloat = 0.0
    per_sequence: NonNegativeFloat = 0.0
    attention: PositiveFloat = 1.0
    collectives: PositiveFloat = 1.0
    expert_layers: PositiveFloat = 1.0
    step: NonNegativeFloat = 0.0

    def build(self, base: Path) -> StepTime:
        path = base / self.path
        if path.is_dir():
            raise BadInput("expected the file that twin calibrate import makes of this folder", file=path)
        kernels = ModelKernels.from_document(read_yaml(path))
        stated = self.model_dump(exclude={"source", "path", "expert_layers"})
        return AiconfiguratorStepTime(kernels, Corrections(**stated, experts=self.expert_layers))
