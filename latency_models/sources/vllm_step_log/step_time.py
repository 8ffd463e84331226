"""A regression for the step time of a whole engine, fitted to logged steps.

    t = β + γ·padded rows + δ·decodes + κ·resident KV tokens

Rows are prompt tokens and decodes, padded to the next size for which a CUDA graph was captured; so t climbs in stairs.
Prompt tokens count like any other row. Attention within long prompts, which grows with their square, is not in the
model: `in_range` tells whether a batch is within the measured range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from latency_models.deployment.capture_sizes import GRAPH_SIZES
from latency_models.fitting.estimator import CannotFit, Estimator, Floats, NotFitted
from latency_models.sources.vllm_step_log.step_log import StepLog
from latency_models.step_time import StepTimeModel
from schedulers.batches import Batch

COEFFICIENTS = ("overhead", "per_padded_row", "per_decode", "per_kv_token")


class StepRegression(Estimator, StepTimeModel):
    """The regression above, with Huber's loss, so that a few stalled steps do not bend the line.

    Coefficients are at least 0: more work never takes less time. A coefficient that the data push below 0 is 0, without
    variance.

    `fit` sets:
        overhead_: β, seconds of every step.
        per_padded_row_, per_decode_, per_kv_token_: γ, δ, κ in seconds.
        covariance_: of the four, in this order, shape (4, 4).
        noise_: deviation of one step from the line, seconds, stalls excluded.
        max_rows_, max_kv_tokens_: the largest measured batch.
        points_: number of steps.

    Args:
        late: the log is one step late, as `StepLog.executed` describes.
        graph_sizes: batch sizes to which smaller batches are padded, rising.
        huber: steps further than this many deviations off count by their distance, not by its square.
    """

    overhead_: float
    per_padded_row_: float
    per_decode_: float
    per_kv_token_: float

    def __init__(self, *, late: bool = True, graph_sizes: Sequence[int] = GRAPH_SIZES, huber: float = 1.5) -> None:
        self.late, self.graph_sizes, self.huber = late, graph_sizes, huber

    def fit(self, steps: StepLog) -> Self:
        """Fit the line.

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

    def predict(self, steps: StepLog) -> Floats:
        """Seconds of each row's batch as logged, shape (n,); for a late log, pass `steps.executed()`.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        rows, kv = _features(steps, self.padding_)[:, 1], steps.kv_tokens
        fixed = self.overhead_ + self.per_padded_row_ * rows + self.per_decode_ * steps.decodes
        predicted: Floats = fixed + self.per_kv_token_ * kv
        return predicted

    def seconds(self, batch: Batch) -> float:
        """The value of `predict` for one batch, bit for bit.

        Its KV tokens are those of decodes and of prompts up to the end of their chunks.

        Raises:
            NotFitted: before `fit`.
        """
        kv = batch.decode_kv
        for chunk in batch.chunks:
            kv += chunk.context + chunk.tokens
        return self._fixed(batch.n_decodes, batch.prefill_tokens) + self.per_kv_token_ * kv

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """See `StepTime.decode_seconds`."""
        fixed, slope = self._fixed(decodes, 0), self.per_kv_token_
        return [fixed + slope * tokens for tokens in range(kv, kv + decodes * steps, decodes)]

    def in_range(self, batch: Batch) -> bool:
        """True if a batch as large was measured.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        return batch.tokens <= self.max_rows_ and batch.decode_kv <= self.max_kv_tokens_

    @property
    def can_draw(self) -> bool:
        """See `StepTime.can_draw`: coefficients have a covariance."""
        return True

    def draw(self, rng: np.random.Generator) -> StepRegression:
        """A regression with coefficients drawn from their covariance, none below 0.

        Its range, noise and covariance are those of this fit.

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

    def errors(self, steps: StepLog, typical_prompt: int | None = None) -> Floats:
        """Relative errors (predicted / measured − 1) for a log like the fitted one, in the rows that `executed` keeps.

        Raises:
            NotFitted: before `fit`.
        """
        ran = steps.executed(typical_prompt) if self.late else steps
        errors: Floats = self.predict(ran) / ran.seconds - 1
        return errors

    def _fixed(self, decodes: int, prompt_tokens: int) -> float:
        """Seconds of a batch without its KV tokens."""
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
    """Padded rows, by rows."""
    padded, below = [0], 0
    for size in sizes:
        padded += [size] * (size - below)
        below = size
    return tuple(padded)


def _features(steps: StepLog, padding: tuple[int, ...]) -> Floats:
    """Design matrix, shape (n, 4): 1, padded rows, decodes, KV tokens."""
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
