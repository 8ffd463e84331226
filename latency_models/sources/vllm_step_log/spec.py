"""A regression for the step time of a whole engine, fitted to logged steps.

    t = β + γ·log₂(1 + padded rows / 8) + π·prompt tokens + κ·resident KV tokens

Rows are prompt tokens and decodes, padded to the next size for which a CUDA graph was captured; so t climbs in stairs.
It climbs ever more slowly: small products read all weights whatever their rows, and tiles fill up. A straight line over
rows, fitted to batches of 20 to 45 decodes, is 13 % too long at 90 to 120, the logarithm 6 %. Fitted to one workload of
a log it is closer to the other one, too. The logarithm counts rows up to `ROWS`, where products become
bound by arithmetic; prompt tokens have a term of their own. Attention within long prompts, which grows with their
square, is not in the model.

Rows and resident tokens rise together in a run, so what the curve misses goes into κ, and grows without end beyond the
fitted batches. Steps of equal rows do not have that error. κ is the mean of two estimates, weighted by their precision:
of the whole line, whose curve may be off by `CURVE`, and of steps compared with others of as many rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from latency_models.fitting.estimator import CannotFit, Estimator, Floats, NotFitted, fit_huber
from latency_models.io.files import FilePath
from latency_models.sources.registry import SourceSpec, register
from latency_models.sources.vllm_step_log.step_log import StepLog, read_step_log
from latency_models.step_time import MeasuredDeployment, StepTime, Unknown, same_model
from schedulers.batches import Batch
from workloads.errors import BadInput

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""vLLM's default sizes of CUDA graphs. A batch runs in the smallest that holds it; larger batches run without one."""

COEFFICIENTS = ("overhead", "per_doubling", "per_prompt_token", "per_kv_token")

FIT = "coefficients of the regression on logged steps"

TILE = 8
"""Rows up to which a step hardly grows."""

ROWS = 512
"""Rows beyond which products are bound by arithmetic, and the logarithm stops."""

CURVE = 0.003
"""Error of the curve over rows that may look like resident tokens, as a share of a step. Leave-out errors are about the
same from 0.2 to 2 %."""

WORKLOAD = Unknown(
    "workload", "another workload than the fitted one", "held out", 0.015, "the first steps of this workload"
)
"""Another workload of the same log: each is predicted by a fit to the other with a mean error of -0.8 and +1.5 %."""

BEYOND = 0.05
"""Deviation of the logarithm of a step for each doubling of rows or of KV tokens beyond the fitted ones. Fits to 20 to
45 decodes are 6 % off at 120, fits to 30 decodes 2 % at 45 and more."""

STRETCHES, FOLDS = 25, 5
"""Stretches of each run, and the parts that they are dealt to. Each part is predicted by a fit to the others."""

PROMPT = 0.7
"""Deviation of the logarithm of a prompt token's seconds where no step with prompts was logged."""


class StepRegression(Estimator, StepTime):
    """The regression above, with Huber's loss, so that a few stalled steps do not bend the line.

    Coefficients are at least 0; one that the data push below 0 is 0, without variance. Without any prompt token in the
    log, one costs what one more row costs at the mean batch. `fit` sets β, γ, π, κ; `covariance_` of these four, (4,
    4); `prompts_known_`; `scatter_`, the deviation of a step's logarithm in parts that were left out (1.645 of it hold
    90 %), and `stalls_`, of a run's time; the largest batch; `points_`.

    `late`: the log is one step late, as `StepLog.executed` describes. `graph_sizes`: to which batches are padded.
    `huber`: deviations beyond which a step counts by its distance, not by its square.
    """

    overhead_: float
    per_doubling_: float
    per_prompt_token_: float
    per_kv_token_: float
    beyond_ = 0.0

    def __init__(self, *, late: bool = True, graph_sizes: Sequence[int] = GRAPH_SIZES, huber: float = 1.5) -> None:
        self.late = late
        self.graph_sizes = graph_sizes
        self.huber = huber

    def fit(self, steps: StepLog) -> Self:
        self._check_settings()
        executed_steps = steps.executed() if self.late else steps
        if len(executed_steps) < 8:
            raise CannotFit("expected at least 8 steps", field="steps", value=len(executed_steps))
        self.curve_ = _curve(self.graph_sizes)
        features = _features(executed_steps, self.curve_)
        if np.linalg.matrix_rank(features / np.maximum(features.max(axis=0), 1.0)) < 2:
            raise CannotFit("expected batches that differ, found one", field="steps")
        coefficients, self.covariance_ = _fit_apart(features, executed_steps, self.huber)
        self.scatter_, self.stalls_ = _held_out(features, executed_steps, self.huber)
        self.points_ = len(executed_steps)
        self.origin_ = steps.origin
        self.max_rows_ = max(int((executed_steps.prompt_tokens + executed_steps.decodes).max()), 1)
        self.max_kv_tokens_ = max(int(executed_steps.kv_tokens.max()), 1)
        self.prompts_known_ = bool(executed_steps.prompt_tokens.any())
        if not self.prompts_known_:
            rows = float(np.mean(executed_steps.decodes))
            coefficients[2] = coefficients[1] / (math.log(2) * (TILE + rows))
        self._learn(coefficients)
        return self

    def predict(self, steps: StepLog) -> Floats:
        """Seconds of each row's batch as logged, shape (n,); for a late log, pass `steps.executed()`."""
        self._require_fit()
        _, doublings, prompts, kv = _features(steps, self.curve_).T
        fixed = self.overhead_ + self.per_doubling_ * doublings + self.per_prompt_token_ * prompts
        predicted: Floats = fixed + self.per_kv_token_ * kv
        if self.beyond_:
            rows = steps.prompt_tokens + steps.decodes
            predicted = np.array([time * self._beyond(*of) for time, *of in zip(predicted, rows, kv, strict=True)])
        return predicted

    def seconds(self, batch: Batch) -> float:
        """The value of `predict` for one batch, bit for bit; its KV tokens are up to the end of its chunks."""
        kv = batch.decode_kv
        for chunk in batch.chunks:
            kv += chunk.context + chunk.tokens
        seconds = self._fixed(batch.decode_tokens, batch.prefill_tokens) + self.per_kv_token_ * kv
        return seconds * self._beyond(batch.tokens, kv) if self.beyond_ else seconds

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        fixed, slope = self._fixed(decodes, 0), self.per_kv_token_
        if self.beyond_:
            tokens = range(kv, kv + decodes * steps, decodes)
            return [(fixed + slope * kv_tokens) * self._beyond(decodes, kv_tokens) for kv_tokens in tokens]
        return [fixed + slope * tokens for tokens in range(kv, kv + decodes * steps, decodes)]

    def measured_deployment(self) -> MeasuredDeployment | None:
        """None for a log that names no model."""
        self._require_fit()
        return MeasuredDeployment(self.origin_, ranks=self.origin_.tensor_parallel) if self.origin_.model else None

    def unknowns(self) -> tuple[Unknown, ...]:
        """The covariance of the fit, and what no fit to one log shows."""
        self._require_fit()
        fit = (Unknown(f"fit.{i}", FIT, "fitted", measure="more steps") for i in range(len(COEFFICIENTS)))
        beyond = Unknown("beyond", "rows and KV tokens beyond the log", "extrapolated", None, "steps of larger batches")
        prompts = Unknown("prompts", "a prompt token, of which the log has none", "assumed", PROMPT, "steps of prompts")
        stalls = Unknown("stalls", "other parts of a run, with their stalls", "held out", self.stalls_, "more steps")
        return (*fit, WORKLOAD, stalls, beyond, *(() if self.prompts_known_ else (prompts,)))

    def vary(self, scores: Mapping[str, float]) -> StepRegression:
        """A regression with other coefficients, none below 0. Range, errors and covariance are those of this fit."""
        self._require_fit()
        scale = np.sqrt(np.diag(self.covariance_))
        scale[scale == 0] = 1.0
        values, directions = np.linalg.eigh(self.covariance_ / np.outer(scale, scale))
        moves = np.array([scores.get(f"fit.{i}", 0.0) for i in range(len(COEFFICIENTS))])
        centre = np.array([getattr(self, f"{name}_") for name in COEFFICIENTS])
        shifted = np.maximum(centre + scale * (directions @ (np.sqrt(np.maximum(values, 0.0)) * moves)), 0.0)
        if not self.prompts_known_:
            shifted[2] *= math.exp(PROMPT * scores.get("prompts", 0.0))
        varied = copy(self)
        excess = math.exp(self.stalls_ * scores.get("stalls", 0.0))
        varied._learn(shifted * WORKLOAD.factor(scores.get("workload", 0.0)) * excess)
        varied.beyond_ = BEYOND * scores.get("beyond", 0.0)
        return varied

    def _fixed(self, decodes: int, prompt_tokens: int) -> float:
        try:
            rows = min(decodes + prompt_tokens, ROWS)
            return self.overhead_ + self.per_doubling_ * self.curve_[rows] + self.per_prompt_token_ * prompt_tokens
        except AttributeError:
            raise NotFitted("expected StepRegression to be fitted before it predicts") from None

    def _beyond(self, rows: float, kv_tokens: float) -> float:
        """The factor of a draw on a batch beyond the log."""
        further = max(rows / self.max_rows_, kv_tokens / self.max_kv_tokens_, 1.0)
        return math.exp(self.beyond_ * math.log2(further))

    def _learn(self, coefficients: Floats) -> None:
        for name, value in zip(COEFFICIENTS, coefficients.tolist(), strict=True):
            setattr(self, f"{name}_", value)

    def _check_settings(self) -> None:
        sizes: Any = list(self.graph_sizes)
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] < 1):
            raise CannotFit("expected whole numbers above 0 that rise", field="graph_sizes", value=self.graph_sizes)
        if not self.huber > 0:
            raise CannotFit("expected a number above 0", field="huber", value=self.huber)


def _curve(sizes: Sequence[int]) -> tuple[float, ...]:
    """The value of log₂(1 + padded rows / TILE), by rows from 0 to ROWS."""
    padded = [next((size for size in sizes if size >= rows), rows) for rows in range(ROWS + 1)]
    return (0.0, *(math.log2(1 + rows / TILE) for rows in padded[1:]))


def _features(steps: StepLog, curve: tuple[float, ...]) -> Floats:
    """Design matrix, shape (n, 4): 1, doublings of rows, prompt tokens, KV tokens."""
    rows = np.minimum(steps.prompt_tokens + steps.decodes, ROWS)
    columns = [np.ones(len(rows)), np.array(curve)[rows], steps.prompt_tokens, steps.kv_tokens]
    return np.stack(columns, axis=1).astype(np.float64)


def _held_out(features: Floats, steps: StepLog, tuning: float) -> tuple[float, float]:
    """The two deviations `scatter_` and `stalls_`, each part of the log predicted by a fit to the others."""
    fold = np.zeros(len(steps), dtype=np.int64)
    for run in np.unique(steps.run):
        rows = np.flatnonzero(steps.run == run)
        fold[rows] = np.arange(len(rows)) * STRETCHES // len(rows) % FOLDS
    errors, excesses = [], []
    for left_out in np.unique(fold):
        rows = fold == left_out
        coefficients, _ = _fit_apart(features[~rows], steps.where(~rows), tuning)
        predicted = np.maximum(features[rows] @ coefficients, 1e-12)
        errors.append(np.log(steps.seconds[rows] / predicted))
        excesses.append(math.log(steps.seconds[rows].sum() / predicted.sum()))
    error_p90 = float(np.quantile(np.abs(np.concatenate(errors)), 0.9))
    return error_p90 / 1.645, math.hypot(
        float(np.mean(excesses)), float(np.std(excesses, ddof=1)) / math.sqrt(len(excesses))
    )


def _fit_apart(features: Floats, steps: StepLog, tuning: float) -> tuple[Floats, Floats]:
    """Coefficients and covariance, with the price of a resident token told from the price of a row."""
    fit = fit_huber(features, steps.seconds, tuning)
    line, covariance = fit.coefficients, fit.covariance
    features_but_kv, kv = features[:, :-1], features[:, -1]
    kv_residual = kv - features_but_kv @ np.linalg.lstsq(features_but_kv, kv, rcond=None)[0]
    alike = _price_at_equal_rows(steps, tuning)
    if alike is None or kv_residual.std() <= 1e-9 * kv.max():
        return line, covariance
    of_curve = (CURVE * float(np.median(steps.seconds)) / kv_residual.std()) ** 2
    weights = 1 / np.maximum([covariance[-1, -1] + of_curve, alike[1]], 1e-30)
    price, deviation = float(weights @ [line[-1], alike[0]] / weights.sum()), float(weights.sum() ** -0.5)
    at_price = fit_huber(features_but_kv, steps.seconds - price * kv, tuning)
    refit = fit_huber(features_but_kv, steps.seconds - (price + deviation) * kv, tuning)
    shift = np.append(refit.coefficients - at_price.coefficients, deviation)
    return np.append(at_price.coefficients, price), np.pad(at_price.covariance, (0, 1)) + np.outer(shift, shift)


def _price_at_equal_rows(steps: StepLog, tuning: float) -> tuple[float, float] | None:
    """Seconds of a resident token and their variance, by steps of equal decodes without prompts; None if not longer."""
    decode_steps = steps.where(steps.decode_only)
    tokens, seconds, sizes = [], [], 0
    for size in np.unique(decode_steps.decodes):
        rows = decode_steps.decodes == size
        if rows.sum() > 1:
            tokens.append(decode_steps.kv_tokens[rows] - np.median(decode_steps.kv_tokens[rows]))
            seconds.append(decode_steps.seconds[rows] - np.median(decode_steps.seconds[rows]))
            sizes += 1
    count = sum(len(part) for part in tokens)
    if count <= sizes + 1 or not np.concatenate(tokens).any():
        return None
    all_tokens = np.concatenate(tokens)
    longer = np.concatenate(seconds) * np.where(all_tokens < 0, -1.0, 1.0)
    fit = fit_huber(np.abs(all_tokens)[:, None], longer, tuning)
    price, variance = float(fit.coefficients[0]), float(fit.covariance[0, 0])
    return (price, variance * count / (count - sizes - 1)) if price > 0 else None


@register
class VllmStepLogSpec(SourceSpec):
    """A regression on the logged steps at `path`, fitted to the first `share` of each experiment; `model`: a check."""

    source: Literal["vllm_step_log"]
    path: FilePath
    share: float = Field(default=0.5, gt=0, le=1)
    model: str | None = None

    def build(self, base: Path) -> StepTime:
        log = read_step_log(base / self.path)
        if self.model is not None and not same_model(self.model, log.origin.model):
            expected = f"expected {log.origin.model}, whose steps were logged"
            raise BadInput(expected, field="step_time.model", value=self.model)
        training, _ = log.split(self.share)
        return StepRegression().fit(training)

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path, "share": self.share}
