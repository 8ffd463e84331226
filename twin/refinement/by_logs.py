"""Evidence of logs, which say nothing of single requests: an engine's steps, and means of a server's metrics pages.

Means tell one number about step times: the mean time between two tokens, which holds all steps that decode. Mean time
to first token is a queue, whose length follows from the load; it is compared and not learned from. The scenario must
describe the requests, since pages do not: only their mean lengths are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.refined import RefinedStepTime
from latency_models.sources.vllm_step_log.step_log import StepLog, read_step_log
from latency_models.step_time import StepTime, same_model
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence as Running
from twin.recording.server_pages import Means, between, cache_settings, mean_gauges, read_scrapes
from twin.refinement.by_requests import StepDerivatives
from twin.refinement.posterior import Observations, Posterior, estimate, log_mean_factor
from twin.refinement.question import (
    MAX_FITTED,
    Advance,
    Evidence,
    Question,
    named_scores,
    one_step_time,
    plan_of,
    prediction_errors,
    read_settings,
)
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import Run, summarise
from twin.serving.results.uncertainty import combine, flatten
from twin.serving.run.simulation import Simulation
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
    metric = "step"

    def __init__(self, question: Question, advance: Advance) -> None:
        self._advance = advance
        self.notes = list[str]()
        plan = plan_of(question, question.settings)
        self.scenario = plan.scenario
        self.step_time = one_step_time(plan)
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
        return log_mean_factor(log.seconds, np.exp(_predicted(typical, _batches(log))))

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


REALISATIONS, DRAWS = 4, 12
"""Realisations of the scenario's workload, whose scatter is the error of sampling; draws of the refined model."""

SERVER = 0.01
"""Deviation of a mean between tokens that neither steps nor sampling explain: streams, and the machine's drift."""

LENGTHS = 0.1
"""Relative difference in mean lengths above which a scenario does not describe the requests."""

UNLIKELY = 3.0
"""Scores beyond which an unknown is a doubtful explanation."""

SEARCH, CLOSE = 4, 0.03
"""Steps of the search at most; fewer scores end it."""

LATENCIES = ("ttft", "itl", "tpot", "e2e")


class MeanEvidence(Evidence):
    """The mean time between tokens of the first half of three or more pages; the second half is predicted."""

    kind = "means"
    min_drift = SERVER

    def __init__(self, question: Question, advance: Advance) -> None:
        if question.first is not None:
            raise BadInput("expected none: a metrics page has no first requests", field="--first", value=question.first)
        if len(question.factors) > 1:
            expected = "expected one: means tell one factor, and not which of several it belongs to"
            raise BadInput(expected, field="--factors", value=",".join(question.factors))
        self._advance = advance
        self._pages = read_scrapes(question.run, question.since)
        pages = self._pages
        middle = len(pages) // 2 if len(pages) > 2 else len(pages) - 1
        self._early = between(pages[0], pages[middle])
        self._late = between(pages[middle], pages[-1]) if middle < len(pages) - 1 else None
        metric = next((name for name in ("itl.mean", "tpot.mean") if name in self._early.means), None)
        if metric is None:
            expected = "expected vllm:inter_token_latency_seconds or vllm:request_time_per_output_token_seconds"
            raise BadInput(expected, file=pages[0].source)
        self.metric = metric
        meta = {"cache_config": cache_settings(pages[-1].text)}
        settings, self._settings, self.notes = read_settings(question, meta, "the metrics page")
        self._plan = plan_of(question, settings)
        self.scenario = self._plan.scenario
        self.step_time = one_step_time(self._plan)

    def estimate(self, names: Sequence[str]) -> Posterior:
        plan, early, metric = self._plan, self._early, self.metric
        self._advance("simulating")
        runs = [_simulate(plan, i) for i in range(REALISATIONS)]
        _require_lengths(runs, early)
        self._before = [_summary(run, plan) for run in runs]
        logs = np.log([_of(summary, metric) for summary in self._before])
        measured, share = math.log(early.means[metric]), plan.requests / early.finished
        posterior = _estimate(plan, names, metric, measured, logs, share, self._advance)
        self.notes += _load_notes(early, self._before)
        for name, score in zip(names, posterior.estimate.tolist(), strict=True):
            if abs(score) > UNLIKELY:
                self.notes.append(f"{name} moved by {score:+.1f} of its deviations: something else may be wrong")
        return posterior

    def errors(self, refined: RefinedStepTime) -> dict[str, Any]:
        plan = self._plan
        after_plan, draws = plan.with_step_time(refined), []
        after = [_summary(_simulate(after_plan, i), plan) for i in range(REALISATIONS)]
        for i in range(DRAWS):
            self._advance("drawing")
            model = refined.draw(np.random.default_rng([self.scenario.seed, i, 2]))
            draws.append(_summary(_simulate(plan.with_step_time(model), 0), plan))
        parts = {
            name: None if part is None else prediction_errors(part.means, self._before, after, draws)
            for name, part in (("fit", self._early), ("rest", self._late))
        }
        return {**parts, "buckets": _buckets(self._late or self._early, self._before, after)}

    def fields(self) -> dict[str, Any]:
        return {
            "fitted": self._early.finished, "held_out": self._late.finished if self._late else 0,
            "settings": self._settings, "learned_from": self.metric, "pages": len(self._pages),
            "gauges": mean_gauges(self._pages),
        }  # fmt: skip


def _estimate(
    plan: ServingPlan, names: Sequence[str], metric: str, measured: float, logs: Floats, share: float, advance: Advance
) -> Posterior:
    """The posterior of one number: scores s with y = f(s) + ε, by Gauss and Newton's method.

    `measured`: y, the logarithm of the mean; `logs`: those of realisations at the estimates. `share`: a realisation's
    requests over the server's, whose own sampling is smaller the more there were.
    """
    sampling = float(logs.std(ddof=1))
    noise = math.sqrt(sampling**2 * (1 / len(logs) + share) + SERVER**2)
    aside = float(logs.mean() - logs[0])  # the first realisation is simulated at other scores, for all
    scores, gradient = np.zeros(len(names)), np.zeros(len(names))
    for _ in range(SEARCH):
        advance("simulating")
        value, gradient = _linearised(plan, names, scores, metric)
        residual = measured - (value + aside) + float(gradient @ scores)
        aim = gradient * residual / (noise**2 + float(gradient @ gradient))
        shift, scores = float(np.abs(aim - scores).max()), aim
        if shift < CLOSE:
            break
    information = np.outer(gradient, gradient) / noise**2
    covariance = np.linalg.inv(information + np.eye(len(names)))
    return Posterior(scores, (covariance + covariance.T) / 2, information, {}, SEARCH)


def _linearised(plan: ServingPlan, names: Sequence[str], scores: Floats, metric: str) -> tuple[float, Floats]:
    """The logarithm of the mean at scores, and its derivatives: those of all time in which requests decode."""
    by_name = named_scores(names, scores)
    steps = StepDerivatives(plan, names, by_name)
    pools = [pool.at(by_name) for pool in plan.pools]
    slow = plan.scenario.model_copy(update={"detail": "requests", "fast_forward": False})
    run = Simulation(replace(plan, scenario=slow, pools=pools), watch=steps.watch).run()
    table: dict[str, Any] = run.columns.table()
    first, last, engines = (np.asarray(table[name]) for name in ("first_token", "last_token", "replica"))
    total = np.zeros(len(names))
    for engine in np.unique(engines).tolist():
        rows = engines == engine
        total += steps.between(engine, first[rows], last[rows]).sum(axis=0)
    return math.log(_of(_summary(run, plan), metric)), total / max(float((last - first).sum()), 1e-9)


def _simulate(plan: ServingPlan, realisation: int) -> Run:
    scenario = plan.scenario.model_copy(update={"detail": "requests"})
    return Simulation(replace(plan, scenario=scenario), realisation).run()


def _summary(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """Metrics that a page has, too. A server counts from the arrival of a request."""
    summary = summarise(run, plan.scenario.measure)
    return {name: summary[name] for name in (*LATENCIES, "output_throughput", "request_throughput")}


def _of(summary: Mapping[str, Any], metric: str) -> float:
    value = flatten(dict(summary)).get(metric)
    if not value:
        raise BadInput("expected answers of more than one token", field="workload.decode")
    return value


def _require_lengths(runs: Sequence[Run], means: Means) -> None:
    """Refuse a scenario whose requests are longer or shorter than the server's."""
    tables: list[dict[str, Any]] = [run.columns.table() for run in runs]
    for name, field in (("prompt_tokens", "prefill"), ("output_tokens", "decode")):
        simulated = float(np.mean([np.mean(table[name]) for table in tables]))
        measured = means.means.get(name)
        if measured and abs(simulated / measured - 1) > LENGTHS:
            expected = f"expected the server's requests, of {measured:.4g} {name.replace('_', ' ')} on average"
            raise BadInput(expected, field=f"workload.{field}", value=f"{simulated:.4g}")


def _load_notes(means: Means, summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note where the simulated load differs, on which queues and batches depend."""
    simulated, measured = (
        float(np.mean([summary["request_throughput"] for summary in summaries])),
        means.means["request_throughput"],
    )
    if abs(simulated / measured - 1) <= LENGTHS:
        return []
    return [
        f"the scenario answers {simulated:.3g} requests a second, the server answered {measured:.3g}: batches differ"
    ]


def _buckets(
    means: Means, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Quantiles that a page knows up to a bucket, and predicted ones."""
    before_means, after_means = (flatten(combine(summaries)[0]) for summaries in (before, after))
    return {
        name: {
            "low": low,
            "high": high if math.isfinite(high) else None,
            "before": before_means[name],
            "after": after_means[name],
        }
        for name, (low, high) in means.bounds.items()
        if after_means.get(name) is not None
    }
