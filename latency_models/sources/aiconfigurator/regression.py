"""Corrections for times that kernel tables leave out of served latency, fitted to measured TPOT.

A row's decode and prefill factors are products of a factor of all rows, of its backend, of its model (and precision) on
that backend, and of its group, the model's split over devices. A prior holds each near 1. So a group with few rows
resembles its model, and a model without measurements resembles its backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.models import load_model
from latency_models.fitting.estimator import CannotFit, Estimator, Floats
from latency_models.sources.aiconfigurator.closed_loop import ClosedLoop, closed_loop
from latency_models.sources.aiconfigurator.kernels import ModelKernels, compose, kv_capacity
from latency_models.sources.aiconfigurator.silicon import SiliconRow
from latency_models.sources.aiconfigurator.step_time import AiconfiguratorStepTime, Corrections
from latency_models.sources.aiconfigurator.tables import KernelTables, read_tables

DEVIATIONS = (0.2, 0.2, 0.15, 0.1)
"""Prior deviations of the logarithms of factors: common, of a backend, of a model, of a group."""

PROMPT_STEP_PER_LAYER = (1e-4, 6e-5)
"""Prior mean and deviation, seconds: without a graph, a layer launches about ten kernels."""

PER_SEQUENCE = (2e-5, 2e-5)
"""Prior mean and deviation of the host's work on one output token, seconds."""

AHEAD = ((1.0, 1.0), (0.07, 0.03))
"""Prior mean and deviation of the prompts before one: a constant, and a slope over requests in flight. The slope is due
to the start, when all requests wait at once: half of them, divided by the rounds of a benchmark (about seven)."""

TOLERANCE = 0.02
"""Relative error of a row up to which errors count by their square. Larger errors count by their size, so that a few
unusual rows do not decide."""


class SiliconRegression(Estimator):
    """TPOT of closed-loop serving from kernel tables, with corrections fitted by maximum a posteriori.

    `fit` sets, keyed by the `levels` of a row:
        decode_, prefill_: logarithms of factors on decode kernels, and on the time that prompts add.
        prompt_step_: further seconds a layer of a step with prompts, by model.
        per_sequence_: seconds of the host for a decode, by model.
        ahead_, ahead_each_: prompts that go before one, by backend: a constant, and a slope over requests in flight.
        points_: number of rows.

    Args:
        tables: folder that contains the folders of kernel tables, and their systems.
        expert_rows: see `Placement`.
        max_batched_tokens: rows of a step.
    """

    decode_: dict[str, float]
    prefill_: dict[str, float]
    prompt_step_: dict[str, float]
    per_sequence_: dict[str, float]
    ahead_: dict[str, float]
    ahead_each_: dict[str, float]

    def __init__(self, *, tables: Path = Path(), expert_rows: int = 256, max_batched_tokens: int = 8192) -> None:
        self.tables, self.expert_rows, self.max_batched_tokens = tables, expert_rows, max_batched_tokens

    def fit(self, rows: Sequence[SiliconRow]) -> Self:
        """Fit the corrections.

        Raises:
            CannotFit: fewer than 8 rows.
            BadInput: a row whose kernels are not in the tables.
        """
        if len(rows) < 8:
            raise CannotFit("expected at least 8 rows", field="rows", value=len(rows))
        library = _Library(self.tables, self.expert_rows)
        bare = [self._loop(row, library, Corrections()) for row in rows]
        layers = [library.engine(row)[0].layers for row in rows]
        steps = [
            math.ceil(row.isl / (self.max_batched_tokens - loop.decoding)) for row, loop in zip(rows, bare, strict=True)
        ]
        posterior = _Posterior(rows, bare, np.array(steps) * np.array(layers))
        self.library_, self.points_ = library, len(rows)
        for name, values in posterior.name(posterior.most_probable()).items():
            setattr(self, name, values)
        return self

    def predict(self, rows: Sequence[SiliconRow]) -> Floats:
        """Seconds an output token after the first, shape (n,).

        Raises:
            NotFitted: before `fit`.
            BadInput: a row whose kernels are not in the tables.
        """
        return np.array([self.loop(row).tpot for row in rows], dtype=np.float64)

    def loop(self, row: SiliconRow) -> ClosedLoop:
        """The steady state in which a row was measured. Raises as `predict` does."""
        self._require_fit()
        ahead = _of(self.ahead_, row.backend) + _of(self.ahead_each_, row.backend) * row.concurrency
        return self._loop(row, self.library_, self.corrections(row), ahead)

    def step_time(self, row: SiliconRow) -> AiconfiguratorStepTime:
        """The engine that served a row. Raises as `predict` does."""
        self._require_fit()
        return AiconfiguratorStepTime(self.library_.engine(row)[0], self.corrections(row))

    def corrections(self, row: SiliconRow) -> Corrections:
        """Corrections of a row's group, or of the closest known level.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        return Corrections(
            decode=float(np.exp(sum(self.decode_.get(level, 0.0) for level in levels(row)))),
            prefill=float(np.exp(sum(self.prefill_.get(level, 0.0) for level in levels(row)))),
            prompt_step=_of(self.prompt_step_, _model(row)) * self.library_.engine(row)[0].layers,
            per_sequence=_of(self.per_sequence_, _model(row)),
        )

    def _loop(self, row: SiliconRow, library: _Library, corrections: Corrections, ahead: float = 0.0) -> ClosedLoop:
        kernels, capacity = library.engine(row)
        return closed_loop(
            AiconfiguratorStepTime(kernels, corrections),
            row.concurrency,
            row.isl,
            row.osl,
            ahead=ahead,
            max_batched_tokens=self.max_batched_tokens,
            kv_capacity=capacity,
        )


def levels(row: SiliconRow) -> tuple[str, str, str, str]:
    """Names under which a row shares its factors, from all rows to its own group."""
    return "all", row.backend, _model(row), _group(row)


def _model(row: SiliconRow) -> str:
    return f"{row.backend} {row.model} {row.precision}"


def _group(row: SiliconRow) -> str:
    experts = f"{row.expert_tensor_parallel}x{row.expert_parallel}"
    return f"{_model(row)} tp{row.tensor_parallel} experts {experts}"


class _Library:
    """The engines of the rows: kernels and memory, each read and composed once."""

    def __init__(self, folder: Path, expert_rows: int) -> None:
        self._folder, self._expert_rows = folder, expert_rows
        self._tables: dict[str, KernelTables] = {}
        self._engines: dict[tuple[str, str], tuple[ModelKernels, float | None]] = {}

    def engine(self, row: SiliconRow) -> tuple[ModelKernels, float | None]:
        """The kernels, and the tokens that the KV cache holds; None if the memory is unknown."""
        key = (row.tables, _group(row))
        if key not in self._engines:
            if row.tables not in self._tables:
                self._tables[row.tables] = read_tables(self._folder / row.tables)
            tables, model = self._tables[row.tables], load_model(row.model)
            placement = row.placement(model, self._expert_rows)
            capacity = None if tables.device is None else kv_capacity(tables.device, model, placement)
            self._engines[key] = (compose(tables, model, placement), capacity)
        return self._engines[key]


class _Posterior:
    """The corrections as one vector, in prior deviations.

    `bare` are the rows' steady states by kernels alone, `prompt_layers` how many layers run for one prompt (all of them
    for each of its chunks). Corrections change how many requests decode at once too little to iterate at each trial.
    """

    def __init__(
        self, rows: Sequence[SiliconRow], bare: Sequence[ClosedLoop], prompt_layers: NDArray[np.int64]
    ) -> None:
        self._levels = sorted({(depth, name) for row in rows for depth, name in enumerate(levels(row))})
        self._models = sorted({_model(row) for row in rows})
        self._backends = sorted({row.backend for row in rows})
        self._shares = np.array([[float(levels(row)[depth] == name) for depth, name in self._levels] for row in rows])
        self._model = np.array([self._models.index(_model(row)) for row in rows])
        self._backend = np.array([self._backends.index(row.backend) for row in rows])
        self._step, self._prompt, self._residents, self._decoding = (
            np.array([getattr(loop, name) for loop in bare])
            for name in ("decode_step", "prompt", "residents", "decoding")
        )
        self._in_flight = np.array([row.concurrency for row in rows])
        self._later_tokens = np.array([row.osl - 1 for row in rows])
        self._prompt_layers = prompt_layers
        self._log_measured = np.log([row.tpot for row in rows])
        factors = [(0.0, DEVIATIONS[depth]) for depth, _ in self._levels]
        blocks = [factors, factors, *([prior] * len(self._models) for prior in (PROMPT_STEP_PER_LAYER, PER_SEQUENCE))]
        blocks += [[prior] * len(self._backends) for prior in AHEAD]
        self._ends = np.cumsum([len(block) for block in blocks])[:-1]
        self._mean, self._deviation = np.array([prior for block in blocks for prior in block]).T
        signed = np.arange(len(self._mean)) < 2 * len(factors)
        self._least = np.where(signed, -np.inf, -self._mean / self._deviation)

    def most_probable(self) -> list[Floats]:
        """The blocks of corrections of highest density."""
        from scipy.optimize import least_squares  # slow to import, and only a fit needs it

        start = np.maximum(np.zeros(len(self._mean)), self._least + 1e-3)
        return self._blocks(least_squares(self._misfit, start, bounds=(self._least, np.inf)).x)

    def name(self, blocks: list[Floats]) -> dict[str, dict[str, float]]:
        """The fitted values of each block, by name."""
        of_levels = [name for _, name in self._levels]
        owners = (of_levels, of_levels, self._models, self._models, self._backends, self._backends)
        kinds = ("decode_", "prefill_", "prompt_step_", "per_sequence_", "ahead_", "ahead_each_")
        return {
            kind: dict(zip(names, block.tolist(), strict=True))
            for kind, names, block in zip(kinds, owners, blocks, strict=True)
        }

    def _blocks(self, deviations: Floats) -> list[Floats]:
        return np.split(self._mean + self._deviation * deviations, self._ends)

    def _misfit(self, deviations: Floats) -> Floats:
        """Residuals whose squares add up to the negative logarithm of the density."""
        error = (np.log(self._tpot(*self._blocks(deviations))) - self._log_measured) / TOLERANCE
        softened = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([softened, deviations])

    def _tpot(
        self, decode: Floats, prefill: Floats, prompt_step: Floats, per_sequence: Floats, base: Floats, each: Floats
    ) -> Floats:
        """The TPOT of `closed_loop`."""
        step = np.exp(self._shares @ decode) * self._step + per_sequence[self._model] * self._decoding
        prompt = np.exp(self._shares @ prefill) * self._prompt + prompt_step[self._model] * self._prompt_layers
        others = self._residents - 1
        ahead = np.minimum(base[self._backend] + each[self._backend] * self._in_flight, others)
        tpot: Floats = step + (others - ahead) * prompt / self._later_tokens
        return tpot


def _of(known: Mapping[str, float], name: str) -> float:
    """The fitted value of a name; the mean of all for a name that was not among the rows."""
    return known.get(name, sum(known.values()) / len(known))
