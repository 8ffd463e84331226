"""Evidence of requests: durations of measured ones, compared with those that a plan predicts at scores of its
unknowns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.refined import RefinedStepTime
from latency_models.step_time import StepTime
from latency_models.wrapped import ScaledStepTime
from scenarios.reading import Settings
from scenarios.serving import ReplaySpec, ServingScenario, check_scenario
from schedulers.batches import Batch
from schedulers.parallel_cores import GroupBatch
from twin.refinement.posterior import Observations, Posterior, estimate, log_mean_factor
from twin.refinement.question import (
    MAX_FITTED,
    Advance,
    Evidence,
    MeasuredRun,
    Question,
    RequestTimes,
    named_scores,
    one_step_time,
    prediction_errors,
    read_measured_run,
    read_settings,
)
from twin.serving.engine.engine import Engine
from twin.serving.engine.engine_state import Watch
from twin.serving.plan.plan import ServingPlan, make_plan
from twin.serving.run.simulation import Simulation
from workloads.errors import BadInput
from workloads.trace import Trace

Floats = NDArray[np.float64]
TTFT, DECODING = 0, 1
"""Kinds of observations."""

STEP = 0.25
"""Half the width of a central difference, in scores."""

SHARE = 0.2
"""The first requests that are fitted, unless stated."""

WARM_UP = 10
"""First requests of a run that are not compared, at most a quarter of the fitted ones: an engine's first steps are
slower."""

DRAWS = 12
"""Draws of the refined model for its intervals of the held-out requests."""

SECANTS, CLOSE = 4, 0.002
"""Steps of the search for a factor at most; the relative error of mean TPOT that ends it."""

GROUP = 10
"""Successive requests that are fitted together where these are spread over the run."""


class RequestEvidence(Evidence):
    """The first requests of a run, or groups of them spread over it; the rest is predicted."""

    kind = "requests"
    metric = "tpot.mean"
    noise_kinds = ("ttft", "decoding")

    def __init__(self, question: Question, advance: Advance) -> None:
        self._advance = advance
        run = self._run = read_measured_run(question.run)
        self._plan, self._settings, self.notes = _plan(question, run)
        self.scenario = self._plan.scenario
        self.step_time = one_step_time(self._plan)
        default = max(round(SHARE * len(run)), min(10, len(run)))
        self._fitted = default if question.first is None else question.first
        if not 2 <= self._fitted <= len(run):
            expected = f"expected a number from 2 to {len(run)}, the requests of the run"
            raise BadInput(expected, field="--first", value=self._fitted)
        self._warm_up = min(WARM_UP, self._fitted // 4)
        self.notes.append(f"the first {self._warm_up} requests are left out as the engine's warm-up")
        self._rows = np.arange(self._fitted)
        self._spread = question.spread
        if self._spread:
            groups = np.arange(len(run)) // GROUP
            self._rows = np.flatnonzero(groups % max(round(len(run) / self._fitted), 1) == 0)[: self._fitted]
        # Durations are those to the first token, then those from the first to the last.
        self._several = self._rows[(run.answers[self._rows] > 1) & (run.decoding[self._rows] > 0)]
        self._compared = np.concatenate([self._rows, self._several]) >= self._warm_up
        if (count := int(self._compared.sum())) > MAX_FITTED:
            expected = f"expected fewer requests to fit: {count} durations, at most {MAX_FITTED}"
            raise BadInput(expected, field="--first", value=self._fitted)

    def estimate(self, names: Sequence[str]) -> Posterior:
        # Later requests cannot change those that were answered before they came.
        count = max(int((self._run.start <= self._run.last[self._rows].max()).sum()), int(self._rows[-1]) + 1)

        def linearise(scores: Floats) -> tuple[Floats, Floats]:
            self._advance("simulating")
            by_name = named_scores(names, scores)
            steps = StepDerivatives(self._plan, names, by_name)
            times = simulate_requests(self._plan, by_name, count, steps.watch)
            begin, end, engines = self._intervals(times)
            by_engine = {engine: steps.between(engine, begin, end) for engine in np.unique(engines).tolist()}
            rows = np.select([engines[:, None] == engine for engine in by_engine], list(by_engine.values()))
            seconds = np.maximum(end - begin, 1e-9)
            return np.log(seconds)[self._compared], (rows / seconds[:, None])[self._compared]

        return estimate(self._observe().where(self._compared), linearise, len(names))

    def _intervals(self, times: RequestTimes) -> tuple[Floats, Floats, NDArray[np.str_]]:
        """Begin and end of each duration, and the engine of simulated ones."""
        rows, several = self._rows, self._several
        begin = np.concatenate([times.start[rows], times.first[several]])
        end = np.concatenate([times.first[rows], times.last[several]])
        engines = times.engine if isinstance(times, SimulatedRequests) else np.zeros(len(times), dtype=np.str_)
        return begin, end, np.concatenate([engines[rows], engines[several]])

    def _observe(self) -> Observations:
        """The measured durations, known to half a step's length: requests wait for the end of a step."""
        run, rows = self._run, self._rows
        several = rows[run.answers[rows] > 1]
        gaps = run.decoding[several] / (run.answers[several] - 1)
        phase = 0.5 * (float(np.median(gaps)) if len(gaps) else 0.0)
        begin, end, _ = self._intervals(run)
        durations = np.concatenate([run.ttft[rows], run.decoding[self._several]])
        kinds = np.repeat([TTFT, DECODING], [len(rows), len(self._several)])
        return Observations(np.log(durations), kinds, begin, end, phase / durations)

    def mean_factor(self, typical: RefinedStepTime) -> tuple[float, float] | None:
        """The factor that lengthens the simulated mean TPOT of the fitted requests as their noise does.

        Slower steps gather larger batches, so TPOT grows by more than steps do: the secant method finds by how much.
        """
        self._advance("simulating")
        times = self._simulate(typical)
        if self._worsens(times):
            return None
        rows = self._several[self._several >= self._warm_up]
        if not len(rows):
            return 0.0, 0.0
        tokens = self._run.answers[rows] - 1

        def tpot(simulated: RequestTimes) -> Floats:
            return simulated.decoding[rows] / tokens

        predicted = tpot(times)
        missing, deviation = log_mean_factor(self._run.decoding[rows] / tokens, predicted)
        aim = math.log(predicted.mean()) + missing
        log_factor, slope = 0.0, 1.0
        for _ in range(SECANTS):
            if abs(missing) < CLOSE:
                break
            step, before = missing / slope, missing
            log_factor += step
            self._advance("simulating")
            slower = self._simulate(ScaledStepTime(typical, math.exp(log_factor)))
            missing = aim - math.log(tpot(slower).mean())
            slope = max((before - missing) / step, 1.0)
        return log_factor, deviation / slope

    def _worsens(self, fitted: RequestTimes) -> bool:
        """True if a fit is further from the means of its own requests than the step times before it."""
        errors = self._part(self._rows[self._rows >= self._warm_up], fitted, [])
        rows = [errors[name] for name in ("ttft.mean", "tpot.mean") if name in errors]
        distances = [sum(abs(math.log1p(row[f"{when}_error"])) for row in rows) for when in ("before", "after")]
        return distances[1] > distances[0]

    def errors(self, refined: RefinedStepTime) -> dict[str, Any]:
        """Mean latencies of the compared requests and of the rest, before and after, with 95 % intervals after."""
        after = self._simulate(refined)
        draws = []
        for i in range(DRAWS):
            self._advance("drawing")
            draws.append(self._simulate(refined.draw(np.random.default_rng([self.scenario.seed, i, 2]))))
        others = np.setdiff1d(np.arange(len(self._run)), self._rows)
        return {
            "fit": self._part(self._rows[self._rows >= self._warm_up], after, draws),
            "rest": self._part(others, after, draws) if len(others) else None,
        }

    def _simulate(self, step_time: StepTime) -> RequestTimes:
        return simulate_requests(self._plan.with_step_time(step_time), {}, len(self._run))

    @cached_property
    def _before(self) -> RequestTimes:
        """The requests as simulated before the refinement."""
        return self._simulate(self.step_time)

    def _part(self, rows: NDArray[np.int64], after: RequestTimes, draws: Sequence[RequestTimes]) -> dict[str, Any]:
        """Errors of the mean latencies of some requests."""

        def means(times: RequestTimes) -> dict[str, Any]:
            return _summary(
                RequestTimes(times.start[rows], times.first[rows], times.last[rows]), self._run.answers[rows]
            )

        return prediction_errors(
            means(self._run), [means(self._before)], [means(after)], [means(draw) for draw in draws]
        )

    def fields(self) -> dict[str, Any]:
        fitted = len(self._rows)
        counts = {"fitted": fitted, "warm_up": self._warm_up, "held_out": len(self._run) - fitted}
        return {**counts, "spread": self._spread, "settings": self._settings}


def _plan(question: Question, run: MeasuredRun) -> tuple[ServingPlan, Settings, list[str]]:
    """The plan of the run: the scenario with the engine's own settings, and the run's requests."""
    settings, settings_read, notes = read_settings(question, run.meta or {}, "the run's meta.json")
    scenario = check_scenario(question.document, question.settings, question.path)
    if not run.meta:
        notes.append("no meta.json beside the run: the engine's settings are those of the scenario")
    trace = _own_trace(scenario, question.path.parent, run)
    document = question.document
    if trace is None:
        notes.append("the workload is the run's own requests, without prefix ids")
        settings = {key: value for key, value in settings.items() if not key.startswith("workload.")}
        document = {**document, "workload": {"trace": {"path": str(run.source)}, "arrivals": {"process": "replay"}}}
        trace = run.trace
    if run.by_client and scenario.measure.start == "queued":
        settings["measure.start"] = "submitted"
    plan = make_plan(check_scenario(document, settings, question.path), question.path.parent, trace)
    return plan, settings_read, notes


def _own_trace(scenario: ServingScenario, base: Path, run: MeasuredRun) -> Trace | None:
    """The scenario's trace if it has the run's requests, in this order; it may have prefix ids besides."""
    spec = scenario.workload
    if spec.trace is None or spec.sessions is not None or not isinstance(spec.arrivals, ReplaySpec):
        return None
    trace = spec.read_trace(base)
    if trace is None or trace.arrivals is None or len(trace) != len(run):
        return None
    same = np.array_equal(trace.prefill_tokens, run.prompts) and np.array_equal(trace.decode_tokens, run.answers)
    return trace if same else None


@dataclass(frozen=True, eq=False)
class SimulatedRequests(RequestTimes):
    """Simulated times, with the engine of each request."""

    engine: NDArray[np.str_]


def simulate_requests(
    plan: ServingPlan, scores: Mapping[str, float], requests: int, watch: Watch | None = None
) -> SimulatedRequests:
    """Times of the first requests of a plan, at these scores of its unknowns. `watch`: see `Simulation`."""
    pools = [pool.at(scores) for pool in plan.pools]
    changes = {"detail": "requests"} | ({"fast_forward": False} if watch else {})
    scenario = plan.scenario.model_copy(update=changes)
    run = Simulation(replace(plan, scenario=scenario, pools=pools, requests=requests), watch=watch).run()
    table: dict[str, Any] = run.columns.table()
    order = np.argsort(table["id"], kind="stable")
    start = "queued" if plan.scenario.measure.start == "queued" else "arrival"
    return SimulatedRequests(*(table[name][order] for name in (start, "first_token", "last_token", "replica")))


class StepDerivatives:
    """Derivatives of step times by the scores, collected while a simulation runs.

    A request's durations are the steps between its events and idle time. With the steps that ran, each as much longer
    as its batch says, they are smooth in the scores; two simulations differ by the phase of a step here and there. That
    slower steps gather larger batches is left out: effects are too small, deviations too large.
    """

    def __init__(self, plan: ServingPlan, names: Sequence[str], scores: Mapping[str, float]) -> None:
        self._models: dict[str, list[tuple[StepTime, StepTime]]] = {}
        for pool in plan.pools:
            ends = [
                (pool.step_time.vary({**scores, name: scores[name] - STEP}),
                 pool.step_time.vary({**scores, name: scores[name] + STEP}))
                for name in names
            ]  # fmt: skip
            self._models.update(dict.fromkeys(pool.names, ends))
        self._steps: dict[str, list[list[float]]] = {engine: [] for engine in self._models}

    def watch(self, engine: Engine, batch: Batch, start: float, end: float) -> None:
        """Keep the derivatives of a step."""
        row = [start, end]
        for low, high in self._models[engine.name]:
            row.append((_seconds(high, batch) - _seconds(low, batch)) / (2 * STEP))
        self._steps[engine.name].append(row)

    def between(self, engine: str, begin: Floats, end: Floats) -> Floats:
        """Derivatives of the time that an engine's steps take between two instants each, shape (m, n)."""
        steps = np.array(self._steps[engine])
        instants = steps[:, :2].ravel()  # in order, since steps follow each other
        grown = np.zeros((len(instants), steps.shape[1] - 2))
        sums = np.cumsum(steps[:, 2:], axis=0)
        grown[1::2], grown[2::2] = sums, sums[:-1]
        columns = [np.interp(end, instants, values) - np.interp(begin, instants, values) for values in grown.T]
        return np.array(columns).T


def _seconds(model: StepTime, batch: Batch | GroupBatch) -> float:
    return model.group_seconds(batch) if isinstance(batch, GroupBatch) else model.seconds(batch)


def _summary(times: RequestTimes, answers: NDArray[np.int64]) -> dict[str, Any]:
    several = answers > 1
    seconds = float(times.last.max() - times.start.min())
    means: dict[str, Any] = {
        "ttft": {"mean": float(times.ttft.mean())},
        "e2e": {"mean": float((times.last - times.start).mean())},
        "output_throughput": float(answers.sum()) / seconds if seconds else None,
    }
    if several.any():
        means["tpot"] = {"mean": float((times.decoding[several] / (answers[several] - 1)).mean())}
    return means
