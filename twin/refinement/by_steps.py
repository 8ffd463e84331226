"""Evidence of logged engine steps, for engines that write a log of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.refined import RefinedStepTime
from latency_models.sources.vllm_step_log.step_log import StepLog, read_step_log
from latency_models.step_time import StepTime, same_model
from scenarios.serving import check_scenario
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence as Running
from twin.refinement.posterior import Observations, Posterior, estimate, log_ratio_of_means
from twin.refinement.question import MAX_FITTED, Advance, Evidence, Question, named_scores, one_step_time
from twin.serving.plan.plan import make_plan
from workloads.errors import BadInput
from workloads.request import Request

Floats = NDArray[np.float64]

SHARE = 0.1
"""The first steps of each run that are fitted, unless stated."""

STEP = 0.25
"""Half the width of a central difference, in scores."""

COMMON = 0.1
"""Steps disturb their neighbours within this share of the log: its intervals."""


def is_step_log(run: Path) -> bool:
    """True for a log of steps, which is a CSV file."""
    return run.is_file() and ".csv" in run.suffixes


class StepEvidence(Evidence):
    """A log of steps."""

    kind = "steps"

    def __init__(self, question: Question, advance: Advance) -> None:
        self._advance = advance
        self.notes = list[str]()
        self.scenario = check_scenario(question.document, question.settings, question.path)
        base = question.path.parent
        self.step_time = one_step_time(make_plan(self.scenario, base, self.scenario.workload.read_trace(base)))
        self._log = read_step_log(question.run).executed()
        deployment = self.step_time.measured_deployment()
        name = "" if deployment is None else deployment.origin.model
        if deployment is not None and deployment.model is not None:
            name = deployment.model.name
        if not same_model(name, self._log.origin.model):
            expected = f"expected a log of {name}, as the scenario's step_time is for"
            raise BadInput(expected, field="model", value=self._log.origin.model, file=question.run)
        self._early = _early(self._log.run, question.first)
        self._fitted = int(self._early.sum())
        if not 2 <= self._fitted <= MAX_FITTED:
            expected = f"expected fewer or more steps to fit than {self._fitted} of {len(self._log)}"
            raise BadInput(f"{expected}: from 2 to {MAX_FITTED}", field="--first", value=question.first)

    def estimate(self, names: Sequence[str]) -> Posterior:
        log = self._log.where(self._early)
        steps = _batches(log)

        def linearise(scores: Floats) -> tuple[Floats, Floats]:
            self._advance("comparing")
            by_name = named_scores(names, scores)
            predicted = _predicted(self.step_time.vary(by_name), steps)
            return predicted, _derivatives(self.step_time, steps, names, by_name)

        return estimate(_observe(log), linearise, len(names))

    def mean_factor(self, typical: RefinedStepTime) -> tuple[float, float]:
        log = self._log.where(self._early)
        return log_ratio_of_means(log.seconds, np.exp(_predicted(typical, _batches(log))))

    def errors(self, refined: RefinedStepTime) -> dict[str, Any]:
        later = _batches(self._log.where(~self._early))
        if not later:
            return {"rest": None}
        measured = self._log.seconds[~self._early]
        row = {"measured": float(measured.mean())}
        for name, model in (("before", self.step_time), ("after", refined)):
            predicted = np.exp(_predicted(model, later))
            row[f"{name}_error"] = float(predicted.mean() / measured.mean() - 1)
            row[f"{name}_median"] = float(np.median(np.abs(predicted / measured - 1)))
        return {"rest": {"step": row}}

    def drift(self, errors: Mapping[str, Any]) -> float:
        """The error of the mean of the other steps."""
        held_out = errors["rest"]
        return 0.01 if held_out is None else max(self.min_drift, abs(float(np.log1p(held_out["step"]["after_error"]))))

    def fields(self) -> dict[str, Any]:
        return {"fitted": self._fitted, "held_out": len(self._log) - self._fitted, "settings": {}}


def _early(runs: NDArray[np.str_], first: int | None) -> NDArray[np.bool_]:
    """Mask of the first steps of each run: `first` of them, or `SHARE`."""
    early = np.zeros(len(runs), dtype=np.bool_)
    for run in np.unique(runs):
        rows = np.flatnonzero(runs == run)
        early[rows[: first if first is not None else max(round(SHARE * len(rows)), 1)]] = True
    return early


def _batches(log: StepLog) -> list[Batch]:
    """The batch of each row. Decodes are taken to be equally long, prompts to be whole and equally long."""
    return [
        _batch(*row)
        for row in zip(
            log.decodes.tolist(), log.kv_tokens.tolist(), log.prompts.tolist(), log.prompt_tokens.tolist(), strict=True
        )
    ]


def _batch(decodes: int, kv: int, prompts: int, prompt_tokens: int) -> Batch:
    # Latency models count sequences and look at none.
    running = [Running(Request(0, 0.0, 1, 1), 0, one_shot=False)] * decodes
    tokens = max(kv - prompt_tokens, decodes) if decodes else 0
    longest = -(-tokens // decodes) if decodes else 0
    if not prompt_tokens:
        return DecodeBatch([], running, tokens, longest)
    prompts = max(prompts, 1)
    size = -(-prompt_tokens // prompts)
    sizes = [min(size, prompt_tokens - i * size) for i in range(prompts) if prompt_tokens > i * size]
    chunks = [Chunk(Running(Request(0, 0.0, size, 1), 0, False), size, 0, last=True) for size in sizes]
    return MixedBatch(chunks, running, tokens, longest)


def _observe(log: StepLog) -> Observations:
    count = len(log)
    places = np.arange(count, dtype=np.float64)
    reach = max(COMMON * count, 1.0)
    return Observations(
        np.log(log.seconds), np.zeros(count, dtype=np.int64), places, places + reach, np.full(count, 1e-4)
    )


def _predicted(model: StepTime, steps: Sequence[Batch]) -> Floats:
    return np.log([model.seconds(batch) for batch in steps])


def _derivatives(model: StepTime, steps: Sequence[Batch], names: Sequence[str], scores: Mapping[str, float]) -> Floats:
    """Derivatives of these by the scores, shape (n, number of names)."""
    columns = []
    for name in names:
        low, high = (model.vary({**scores, name: scores[name] + step}) for step in (-STEP, STEP))
        columns.append((_predicted(high, steps) - _predicted(low, steps)) / (2 * STEP))
    return np.array(columns).T
