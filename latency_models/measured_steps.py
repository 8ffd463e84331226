"""Measured engine steps, and the regression that a whole engine's step time follows.

    t = β + γ·padded rows + δ·decodes + κ·resident KV tokens

Rows (prompt tokens and decodes) come padded: a CUDA graph is captured for some batch sizes only, and a batch runs in
the smallest that holds it, so that t climbs in stairs. A prompt token is a row like any other. What this line does not
know is attention within long prompts, which grows with their square: `in_range` says where it has been measured.

Engines that schedule asynchronously log one step late. While step i - 1 runs on the GPU, step i is scheduled, and
"start of the next step minus start of this one" is the time that step i - 1 took. In the log of vLLM 0.15.1 it shows:
a step with 581 prompt tokens took no longer than its neighbours without any, and the long intervals stand in rows whose
requests have just been prefilled. `MeasuredSteps.executed` puts each interval beside the batch that it timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from latency_models.base import CannotFit, Estimator, Floats, NotFitted
from latency_models.table_files import Columns, read_columns
from schedulers.batches import Batch
from workloads.errors import BadInput

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Batch sizes for which vLLM captures CUDA graphs by default. Larger batches run as they are."""

COEFFICIENTS = ("overhead", "per_padded_row", "per_decode", "per_kv_token")


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """Steps of one or more runs, column by column, in the order of each run; all arrays have shape (n,).

    Attributes:
        run: what the source calls an experiment. workload: what was sent in it.
        step: number of the step in its run, rising; sources may have logged a sample of them.
        seconds: start of the next step minus start of this one.
        prompts: requests with prompt tokens in the step; `prompt_tokens`: those tokens.
        decodes: requests that get one token each.
        kv_tokens: tokens in the KV cache.
    """

    run: NDArray[np.str_]
    workload: NDArray[np.str_]
    step: NDArray[np.int64]
    seconds: Floats
    prompts: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    decodes: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, rows: NDArray[np.bool_]) -> MeasuredSteps:
        """Some of the rows."""
        return MeasuredSteps(**{name: column[rows] for name, column in vars(self).items()})

    def split(self, share: float = 0.5) -> tuple[MeasuredSteps, MeasuredSteps]:
        """The first `share` of the rows of each run, and the later ones.

        Raises:
            BadInput: not a share above 0 and below 1.
        """
        if not 0 < share < 1:
            raise BadInput("expected a share above 0 and below 1", field="share", value=share)
        early = np.zeros(len(self), dtype=np.bool_)
        for run in np.unique(self.run):
            rows = np.flatnonzero(self.run == run)
            early[rows[: round(share * len(rows))]] = True
        return self.where(early), self.where(~early)

    @property
    def decode_only(self) -> NDArray[np.bool_]:
        """Which rows have no prompt tokens."""
        without: NDArray[np.bool_] = self.prompt_tokens == 0
        return without

    def executed(self, typical_prompt: int | None = None) -> MeasuredSteps:
        """The same intervals, beside the batches that ran in them, from the log of an asynchronous scheduler.

        The batch timed is that of the step before. Where that was not logged, it is taken to be this row's own less
        its prompts, which had no time to run yet: decodes change little from step to step.

        One prompt token a request says more. A request counts as prefilling until its first token is known, which is
        one step late too; so these requests decode here, and it was their prompts that ran in the step before, of a
        length that was not logged. `typical_prompt` stands in for it; without one, those rows are left out.
        """
        follows = np.zeros(len(self), dtype=np.bool_)
        follows[1:] = (self.run[1:] == self.run[:-1]) & (self.step[1:] == self.step[:-1] + 1)
        before = np.maximum(np.arange(len(self)) - 1, 0)
        first_tokens = (self.prompt_tokens == self.prompts) & (self.prompts > 0)
        prompts = np.where(first_tokens, self.prompts, 0)
        ran = replace(
            self,
            decodes=np.where(follows, (self.decodes + prompts)[before], self.decodes),
            kv_tokens=np.where(follows, self.kv_tokens[before], self.kv_tokens),
            prompts=np.where(follows, (self.prompts - prompts)[before], prompts),
            prompt_tokens=np.where(
                follows, np.where(first_tokens, 0, self.prompt_tokens)[before], prompts * (typical_prompt or 0)
            ),
        )
        return ran if typical_prompt else ran.where(follows | ~first_tokens)


def read_measured_steps(path: Path, block_tokens: int = 16) -> MeasuredSteps:
    """Steps from a CSV file, gzipped or not, with the columns that the inference-sim project logs from vLLM.

    Args:
        block_tokens: tokens of a KV block; the file counts blocks.

    Raises:
        BadInput: a file that cannot be read, a column that is missing, a cell that is not the number it should be, or
            a run whose steps do not rise, with file, line and column.
    """
    table = read_columns(path)
    usage = table.numbers("kv.usage_gpu_ratio")
    for row, share in enumerate(usage):
        if not 0 <= share <= 1:
            raise table.fault("expected a share from 0 to 1", row, "kv.usage_gpu_ratio")
    blocks = np.rint(np.array(usage) * np.array(table.wholes("kv.blocks_total_gpu", low=1)))
    steps = MeasuredSteps(
        run=np.array(table.text("experiment_id")),
        workload=np.array(table.text("workload")),
        step=np.array(table.wholes("step.id", low=0)),
        seconds=np.array(table.numbers("step_time_us", above=0.0)) * 1e-6,
        prompts=np.array(table.wholes("batch.num_prefill_reqs", low=0)),
        prompt_tokens=np.array(table.wholes("batch.prefill_tokens", low=0)),
        decodes=np.array(table.wholes("batch.num_decode_reqs", low=0)),
        kv_tokens=blocks.astype(np.int64) * block_tokens,
    )
    _check_order(steps, table)
    return steps


def _check_order(steps: MeasuredSteps, table: Columns) -> None:
    latest: dict[str, int] = {}
    for row, (run, step) in enumerate(zip(steps.run.tolist(), steps.step.tolist(), strict=True)):
        if step <= latest.get(run, -1):
            raise table.fault(
                f"expected steps that rise within a run (the one before is {latest[run]})", row, "step.id"
            )
        latest[run] = step


class StepRegression(Estimator):
    """The line above, fitted to measured steps so that a few stalled ones do not bend it (Huber's loss).

    No coefficient is below 0: more work never takes less time. Where the data ask for that, it is 0 and has no
    variance.

    `fit` learns:
        overhead_: β, seconds of a step whatever its batch.
        per_padded_row_, per_decode_, per_kv_token_: γ, δ, κ in seconds.
        covariance_: of the four, in this order, shape (4, 4).
        noise_: deviation of one step from the line, seconds, stalls apart.
        max_rows_, max_kv_tokens_: the largest batch that was measured. points_: how many steps.

    Args:
        late: the log is one step late, as `MeasuredSteps.executed` describes.
        graph_sizes: batch sizes to which smaller batches are padded, rising.
        huber: steps further than this many deviations from the line count by their distance, no longer by its square.
    """

    overhead_: float
    per_padded_row_: float
    per_decode_: float
    per_kv_token_: float

    def __init__(self, *, late: bool = True, graph_sizes: Sequence[int] = GRAPH_SIZES, huber: float = 1.5) -> None:
        self.late, self.graph_sizes, self.huber = late, graph_sizes, huber

    def fit(self, steps: MeasuredSteps) -> Self:
        """Learn the line.

        Raises:
            CannotFit: settings out of their range, fewer than 8 steps, or steps that are all alike.
        """
        self._check_settings()
        used = steps.executed() if self.late else steps
        if len(used) < 8:
            raise CannotFit("expected at least 8 steps", field="steps", value=len(used))
        padding = _padding(self.graph_sizes)
        features = _features(used, padding)
        if np.linalg.matrix_rank(features / features.max(axis=0)) < 2:
            raise CannotFit("expected batches that differ, found one", field="steps")
        coefficients, covariance, noise = _huber(features, used.seconds, self.huber)
        self.covariance_, self.noise_, self.points_ = covariance, noise, len(used)
        self.max_rows_ = int((used.prompt_tokens + used.decodes).max())
        self.max_kv_tokens_ = int(used.kv_tokens.max())
        self.padding_ = padding
        self._learn(coefficients)
        return self

    def predict(self, steps: MeasuredSteps) -> Floats:
        """Seconds of each row's batch as it stands (of a late log, ask for `steps.executed()`), shape (n,).

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        rows, kv = _features(steps, self.padding_)[:, 1], steps.kv_tokens
        fixed = self.overhead_ + self.per_padded_row_ * rows + self.per_decode_ * steps.decodes
        predicted: Floats = fixed + self.per_kv_token_ * kv
        return predicted

    def seconds(self, batch: Batch) -> float:
        """`predict` for one batch, to the last bit. Its KV is what decodes and prompts hold, prompts once a chunk.

        Raises:
            NotFitted: before `fit`.
        """
        kv = batch.decode_kv
        for chunk in batch.chunks:
            kv += chunk.context + chunk.tokens
        return self._fixed(batch.n_decodes, batch.prefill_tokens) + self.per_kv_token_ * kv

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """As `StepTime.decode_seconds`."""
        fixed, slope = self._fixed(decodes, 0), self.per_kv_token_
        return [fixed + slope * tokens for tokens in range(kv, kv + decodes * steps, decodes)]

    def in_range(self, batch: Batch) -> bool:
        """Whether so large a batch was measured.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        return batch.tokens <= self.max_rows_ and batch.decode_kv <= self.max_kv_tokens_

    def draw(self, rng: np.random.Generator) -> StepRegression:
        """Another line that the same steps might have come from: coefficients from their covariance, none below 0.

        What it says of its own fit (range, noise, covariance) is this one's.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        centre = np.array([getattr(self, f"{name}_") for name in COEFFICIENTS])
        drawn = rng.multivariate_normal(centre, self.covariance_, size=64, method="svd")
        physical = drawn[(drawn >= 0).all(axis=1)]
        other = StepRegression(**self.get_params())
        vars(other).update(vars(self))
        other._learn(physical[0] if len(physical) else np.maximum(drawn[0], 0.0))
        return other

    def errors(self, steps: MeasuredSteps, typical_prompt: int | None = None) -> Floats:
        """Predicted over measured, less 1, for the steps of a log like the one fitted; rows as `executed` keeps them.

        Raises:
            NotFitted: before `fit`.
        """
        ran = steps.executed(typical_prompt) if self.late else steps
        errors: Floats = self.predict(ran) / ran.seconds - 1
        return errors

    def _fixed(self, decodes: int, prompt_tokens: int) -> float:
        """All but the KV."""
        try:
            rows = decodes + prompt_tokens
            padded = self.padding_[rows] if rows < len(self.padding_) else rows
            return self.overhead_ + self.per_padded_row_ * padded + self.per_decode_ * decodes
        except AttributeError:
            raise NotFitted("expected StepRegression to be fitted before it predicts") from None

    def _learn(self, coefficients: Floats) -> None:
        for name, value in zip(COEFFICIENTS, coefficients.tolist(), strict=True):
            setattr(self, f"{name}_", value)

    def _check_settings(self) -> None:
        sizes: Any = list(self.graph_sizes)
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] < 1):
            raise CannotFit("expected whole numbers above 0 that rise", field="graph_sizes", value=self.graph_sizes)
        if not self.huber > 0:
            raise CannotFit("expected a number above 0", field="huber", value=self.huber)


def _padding(sizes: Sequence[int]) -> tuple[int, ...]:
    """Rows that a batch runs with, by the rows it has."""
    padded, below = [0], 0
    for size in sizes:
        padded += [size] * (size - below)
        below = size
    return tuple(padded)


def _features(steps: MeasuredSteps, padding: tuple[int, ...]) -> Floats:
    """Shape (n, 4): 1, padded rows, decodes, KV tokens."""
    rows = steps.prompt_tokens + steps.decodes
    padded = np.where(rows < len(padding), np.array(padding)[np.minimum(rows, len(padding) - 1)], rows)
    return np.stack([np.ones(len(rows)), padded, steps.decodes, steps.kv_tokens], axis=1).astype(np.float64)


def _huber(features: Floats, times: Floats, tuning: float) -> tuple[Floats, Floats, float]:
    """Coefficients of at least 0, their covariance, and the deviation of a point, by reweighted least squares.

    The covariance is the sandwich of an M-estimate (Huber 1967): it holds whether or not long steps scatter more.
    """
    from scipy.optimize import nnls  # slow to import, and only a fit needs it

    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    x, unit = features / scale, float(np.median(times))
    t, weight = times / unit, np.ones(len(times))
    for _ in range(50):
        root = np.sqrt(weight)
        solution = nnls(x * root[:, None], t * root)[0]
        residual = t - x @ solution
        deviation = max(1.4826 * float(np.median(np.abs(residual))), 1e-12)
        weight = np.minimum(1.0, tuning * deviation / np.maximum(np.abs(residual), 1e-300))
    free = solution > 0
    inside = x[np.abs(residual) <= tuning * deviation][:, free]
    pulls = x[:, free] * np.clip(residual, -tuning * deviation, tuning * deviation)[:, None]
    bread = np.linalg.pinv(inside.T @ inside)
    spare = len(t) / max(len(t) - int(free.sum()), 1)  # as many degrees of freedom as the coefficients leave
    covariance = np.zeros((len(solution), len(solution)))
    covariance[np.ix_(free, free)] = spare * bread @ (pulls.T @ pulls) @ bread
    return solution * unit / scale, covariance * unit**2 / np.outer(scale, scale), deviation * unit
