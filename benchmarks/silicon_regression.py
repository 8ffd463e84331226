"""Corrections for times that kernel tables leave out of served latency, fitted to measured TPOT.

Each kind of kernel has a factor of its own: linear layers, attention, collectives and experts of decodes, and prompts.
A row's factor is a product of one of all rows, of its tables (a system and an engine), of its model (and precision) on
them, and of its group, the model's split over devices. A prior holds each near 1; the first is the widest, so that most
is learnt for configurations that no row has. A group with few rows resembles its model, and a system without
measurements resembles the others. Decision 0042 has the errors of what was tried, at configurations, models and systems
that were left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from benchmarks.closed_loop import ClosedLoop, closed_loop, step_and_prompt
from benchmarks.silicon import SiliconRow
from latency_models.deployment.models import ExpertFFN, Model, load_model
from latency_models.fitting.estimator import CannotFit, Estimator, Floats
from latency_models.sources.aiconfigurator.kernels import ModelKernels, Placement, cached_bytes, compose
from latency_models.sources.aiconfigurator.spec import STATED, AiconfiguratorStepTime, Corrections
from latency_models.sources.aiconfigurator.tables import Device, KernelTables, read_tables
from workloads.errors import BadInput

NEW_MODEL = 1.3
"""Share of the deviations of corrections for a model none of whose configurations was fitted. Among four models that
were left out in turn, 90 % intervals then hold 90 % of the measured TPOTs (79 % with 1; the mean interval score is
least at 1.2)."""

GROUP = (0.02, 0.08)
"""Prior deviation of the logarithms of a group's factors: for configurations that are not among the rows, so that what
several groups share is learnt as common, and for those that are."""

DEVIATIONS = {
    "decode": (0.3, 0.05, 0.05),
    "attention": (0.3, 0.05, 0.05),
    "collectives": (1.0, 0.1, 0.05),
    "experts": (0.2, 0.4, 0.05),
    "prefill": (0.4, 0.05, 0.1),
}
"""Prior deviations of the logarithms of factors: of all rows, of their tables, of a model."""

STEP_PER_LAYER = (3e-5, 3e-5)
"""Prior mean and deviation, seconds: gaps between the kernels of a layer, in a graph."""

PROMPT_STEP_PER_LAYER = (1e-4, 6e-5)
"""Prior mean and deviation, seconds: without a graph, a layer launches about ten kernels."""

PER_SEQUENCE = (2e-5, 2e-5)
"""Prior mean and deviation of the host's work on one output token, seconds."""

AHEAD = ((1.0, 1.0), (0.07, 0.03))
"""Prior mean and deviation of the prompts before one: a constant, and a slope over requests in flight. The slope is due
to the start, when all requests wait at once: half of them, divided by the rounds of a benchmark (about seven)."""

HOSTS = {
    "step": STEP_PER_LAYER,
    "prompt_step": PROMPT_STEP_PER_LAYER,
    "per_sequence": PER_SEQUENCE,
    "ahead": AHEAD[0],
    "ahead_each": AHEAD[1],
}
"""Prior means and deviations by kind."""

SCATTER = 0.02
"""Deviation of measured TPOT among neighbouring rows of one configuration."""

TOLERANCE = 0.05
"""Relative error of a row up to which errors count by their square. Larger errors count by their size, so that a few
unusual rows do not decide."""


@dataclass(frozen=True)
class Learnt:
    """Corrections by the names of their owners.

    Attributes:
        factors: by kind, the logarithms of factors by level (`levels`).
        hosts: by kind (`step`, `prompt_step`, `per_sequence`; `ahead`, `ahead_each`: prompts that go before one, a
            constant and a slope over requests in flight), values by tables: seconds, those of steps for each layer.
    """

    factors: Mapping[str, Mapping[str, float]]
    hosts: Mapping[str, Mapping[str, float]]

    def factor(self, kind: str, row: SiliconRow) -> float:
        """The factor of a row's group, or of the closest known level."""
        factors = self.factors[kind]
        return math.exp(sum(factors.get(level, 0.0) for level in levels(row)))

    def host(self, kind: str, row: SiliconRow) -> float:
        """The value of a row's tables; the prior's mean for tables that were not among the rows."""
        return self.hosts[kind].get(row.tables, HOSTS[kind][0])


class SiliconRegression(Estimator):
    """TPOT of closed-loop serving from kernel tables, with corrections fitted by maximum a posteriori.

    `fit` sets:
        known_, new_: corrections of groups that are among the rows, and of others.
        groups_: names of the first. models_: models that are among the rows.
        points_: number of rows.

    Args:
        tables: folder that contains the folders of kernel tables, and their systems.
        max_batched_tokens: rows of a step.
    """

    known_: Learnt
    new_: Learnt
    groups_: frozenset[str]
    models_: frozenset[str]

    def __init__(self, *, tables: Path = Path(), max_batched_tokens: int = 8192) -> None:
        self.tables = tables
        self.max_batched_tokens = max_batched_tokens

    def fit(self, rows: Sequence[SiliconRow], library: Library | None = None) -> Self:
        """Fit the corrections.

        Args:
            library: of another fit with the same settings, whose tables are not read again.
        """
        if len(rows) < 8:
            raise CannotFit("expected at least 8 rows", field="rows", value=len(rows))
        library = library or Library(self.tables)
        parts = [library.known(row, self._parts) for row in rows]
        self.new_, self.known_ = [Posterior(rows, parts, group).most_probable() for group in GROUP]
        self.library_ = library
        self.points_ = len(rows)
        self.groups_ = frozenset(levels(row)[-1] for row in rows)
        self.models_ = frozenset(row.model for row in rows)
        return self

    def predict(self, rows: Sequence[SiliconRow]) -> Floats:
        """Seconds an output token after the first, shape (n,)."""
        return np.array([self.loop(row).tpot for row in rows], dtype=np.float64)

    def loop(self, row: SiliconRow, scores: Mapping[str, float] | None = None) -> ClosedLoop:
        """The steady state in which a row was measured. Raises as `predict` does.

        Args:
            scores: of the unknowns of its engine; None: the estimates.
        """
        learnt = self._learnt(row)
        ahead = learnt.host("ahead", row) + learnt.host("ahead_each", row) * row.concurrency
        engine = self.step_time(row)
        return self._loop(row, self.library_, engine.vary(scores) if scores else engine, ahead)

    def deviation(self, row: SiliconRow) -> float:
        """Standard deviation of the logarithm of a measured TPOT around the prediction. Raises as `predict` does.

        The unknowns of the engine, each alone, and the scatter of equal rows.
        """
        variance = SCATTER**2
        for unknown in self.step_time(row).unknowns():
            low, high = (self.loop(row, {unknown.name: score}).tpot for score in (-1.0, 1.0))
            variance += (math.log(high / low) / 2) ** 2
        return math.sqrt(variance)

    def step_time(self, row: SiliconRow) -> AiconfiguratorStepTime:
        """The engine that served a row, with the unknowns of its group. Raises as `predict` does."""
        self._require_fit()
        share = STATED if levels(row)[-1] in self.groups_ else 1.0 if row.model in self.models_ else NEW_MODEL
        return AiconfiguratorStepTime(self.library_.engine(row)[0], self.corrections(row), share)

    def corrections(self, row: SiliconRow) -> Corrections:
        """Corrections of a row's group, or of the closest known level."""
        learnt, layers = self._learnt(row), self.library_.engine(row)[0].layers
        decode = learnt.factor("decode", row)
        return Corrections(
            decode=decode,
            prefill=learnt.factor("prefill", row),
            prompt_step=learnt.host("prompt_step", row) * layers,
            per_sequence=learnt.host("per_sequence", row),
            attention=learnt.factor("attention", row) / decode,
            collectives=learnt.factor("collectives", row) / decode,
            experts=learnt.factor("experts", row) / decode,
            step=learnt.host("step", row) * layers,
        )

    def _learnt(self, row: SiliconRow) -> Learnt:
        self._require_fit()
        return self.known_ if levels(row)[-1] in self.groups_ else self.new_

    def _loop(
        self, row: SiliconRow, library: Library, engine: AiconfiguratorStepTime, ahead: float = 0.0
    ) -> ClosedLoop:
        _, capacity = library.engine(row)
        return closed_loop(
            engine,
            row.concurrency,
            row.isl,
            row.osl,
            ahead=ahead,
            max_batched_tokens=self.max_batched_tokens,
            kv_capacity=capacity,
        )

    def _parts(self, row: SiliconRow, library: Library) -> Parts:
        """The steady state of a row by kernels alone, kind by kind: what is missing without one is its share."""
        kernels = library.engine(row)[0]
        bare = self._loop(row, library, AiconfiguratorStepTime(kernels))

        def without(**kind: float) -> tuple[float, float]:
            model = AiconfiguratorStepTime(kernels, Corrections(**kind))
            return step_and_prompt(model, bare.decoding, row.isl, row.osl, self.max_batched_tokens)

        step, prompt = without()
        attention = step - without(attention=0.0)[0]
        of_step, of_prompt = without(collectives=0.0)
        experts = step - without(experts=0.0)[0]
        collectives = step - of_step
        return Parts(
            decode=step - attention - collectives - experts,
            attention=attention,
            collectives=collectives,
            experts=experts,
            prompt=of_prompt,
            prompt_collectives=prompt - of_prompt,
            layers=kernels.layers,
            chunks=math.ceil(row.isl / (self.max_batched_tokens - bare.decoding)),
            residents=bare.residents,
            decoding=bare.decoding,
        )


def levels(row: SiliconRow) -> tuple[str, str, str, str]:
    """Names under which a row shares its factors, from all rows to its own group."""
    return "all", row.tables, _model(row), _group(row)


def _model(row: SiliconRow) -> str:
    return f"{row.tables} {row.model} {row.precision}"


def _group(row: SiliconRow) -> str:
    experts = f"{row.expert_tensor_parallel}x{row.expert_parallel}"
    return f"{_model(row)} tp{row.tensor_parallel} experts {experts}"


def kv_capacity(device: Device, model: Model, placement: Placement, share: float = 0.9) -> float:
    """Tokens that the KV cache of one attention replica holds, in what the weights leave of a `share` of memory."""
    ranks = max(placement.tensor_parallel, placement.expert_ranks if isinstance(model.ffn, ExpertFFN) else 1)
    weight_bytes = 1.0 if placement.weights.startswith("fp8") else 2.0
    free = device.memory_capacity * share - device.reserved - model.parameters * weight_bytes / ranks
    if free <= 0:
        raise BadInput(f"expected weights that fit ({model.name} on {ranks} devices)", field="placement")
    return free / (model.attention_layers * cached_bytes(model, placement))


class Library:
    """The engines of rows: kernels and memory, each read and composed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[str, KernelTables] = {}
        self._engines: dict[str, tuple[ModelKernels, float | None]] = {}
        self._parts: dict[SiliconRow, Parts] = {}

    def engine(self, row: SiliconRow) -> tuple[ModelKernels, float | None]:
        """The kernels, and the tokens that the KV cache holds; None if the memory is unknown."""
        key = _group(row)
        if key not in self._engines:
            if row.tables not in self._tables:
                self._tables[row.tables] = read_tables(self._folder / row.tables)
            tables, model = self._tables[row.tables], load_model(row.model)
            placement = row.placement(model)
            capacity = None if tables.device is None else kv_capacity(tables.device, model, placement)
            self._engines[key] = (compose(tables, model, placement), capacity)
        return self._engines[key]

    def known(self, row: SiliconRow, compute: Callable[[SiliconRow, Library], Parts]) -> Parts:
        """The parts of a row, computed once."""
        if row not in self._parts:
            self._parts[row] = compute(row, self)
        return self._parts[row]


@dataclass(frozen=True)
class Parts:
    """The steady state of one row by kernels alone: kernel seconds of a decode step and of a prompt, by kind.

    Attributes:
        layers, chunks: of the model, and of a prompt.
        residents, decoding: as in `ClosedLoop`.
    """

    decode: float
    attention: float
    collectives: float
    experts: float
    prompt: float
    prompt_collectives: float
    layers: int
    chunks: int
    residents: float
    decoding: int


class Posterior:
    """The corrections as one vector, in prior deviations.

    Corrections change how many requests decode at once too little to iterate at each trial.

    Args:
        rows, parts: what was measured, and the kernels of it.
        group: prior deviation of a group's factors.
    """

    def __init__(self, rows: Sequence[SiliconRow], parts: Sequence[Parts], group: float) -> None:
        self._levels = sorted({(depth, name) for row in rows for depth, name in enumerate(levels(row))})
        self._tables = sorted({row.tables for row in rows})
        self._shares = np.array([[float(levels(row)[depth] == name) for depth, name in self._levels] for row in rows])
        self._of_tables = np.array([self._tables.index(row.tables) for row in rows])
        self._parts = {field.name: np.array([getattr(part, field.name) for part in parts]) for field in fields(Parts)}
        self._in_flight = np.array([row.concurrency for row in rows])
        self._later_tokens = np.array([row.osl - 1 for row in rows])
        self._log_measured = np.log([row.tpot for row in rows])
        blocks = [[(0.0, (*prior, group)[depth]) for depth, _ in self._levels] for prior in DEVIATIONS.values()]
        blocks += [[prior] * len(self._tables) for prior in HOSTS.values()]
        self._ends = np.cumsum([len(block) for block in blocks])[:-1]
        self._mean, self._deviation = np.array([prior for block in blocks for prior in block]).T
        signed = np.arange(len(self._mean)) < len(DEVIATIONS) * len(self._levels)
        self._least = np.where(signed, -np.inf, -self._mean / self._deviation)

    def most_probable(self) -> Learnt:
        """The corrections of highest density."""
        from scipy.optimize import least_squares  # slow to import, and only a fit needs it

        start = np.maximum(np.zeros(len(self._mean)), self._least + 1e-3)
        blocks = iter(self._blocks(least_squares(self._misfit, start, bounds=(self._least, np.inf), max_nfev=30).x))
        names = [name for _, name in self._levels]
        return Learnt(
            {kind: dict(zip(names, next(blocks).tolist(), strict=True)) for kind in DEVIATIONS},
            {kind: dict(zip(self._tables, next(blocks).tolist(), strict=True)) for kind in HOSTS},
        )

    def _blocks(self, deviations: Floats) -> list[Floats]:
        return np.split(self._mean + self._deviation * deviations, self._ends)

    def _misfit(self, deviations: Floats) -> Floats:
        """Residuals whose squares add up to the negative logarithm of the density."""
        error = (np.log(self._tpot(*self._blocks(deviations))) - self._log_measured) / TOLERANCE
        softened = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([softened, deviations])

    def _tpot(self, *blocks: Floats) -> Floats:
        """The TPOT of `closed_loop`."""
        factors = dict(zip(DEVIATIONS, (np.exp(self._shares @ block) for block in blocks), strict=False))
        hosts = dict(zip(HOSTS, (block[self._of_tables] for block in blocks[len(factors) :]), strict=True))
        parts = self._parts
        step = hosts["step"] * parts["layers"] + hosts["per_sequence"] * parts["decoding"]
        for kind in ("decode", "attention", "collectives", "experts"):
            step = step + factors[kind] * parts[kind]
        # A step's all-reduces have one correction, beside the decodes' linear layers or the prompts'.
        of_collectives = factors["collectives"] / factors["decode"] * parts["prompt_collectives"]
        prompt = factors["prefill"] * (parts["prompt"] + of_collectives)
        prompt = prompt + hosts["prompt_step"] * parts["layers"] * parts["chunks"]
        neighbours = parts["residents"] - 1
        ahead = np.minimum(hosts["ahead"] + hosts["ahead_each"] * self._in_flight, neighbours)
        tpot: Floats = step + (neighbours - ahead) * prompt / self._later_tokens
        return tpot
