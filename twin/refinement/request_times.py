"""Simulated requests beside measured ones: the durations that a plan predicts at given scores of its unknowns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.step_time import StepTime
from schedulers.batches import Batch
from schedulers.lockstep import GroupBatch
from twin.refinement.measured_run import MeasuredRun
from twin.refinement.posterior import Observations
from twin.serving.engine import Engine, Watch
from twin.serving.plan import ServingPlan
from twin.serving.simulation import Simulation

Floats = NDArray[np.float64]
TTFT, DECODING = 0, 1
"""Kinds of observations."""

STEP = 0.25
"""Half the width of a central difference, in scores."""


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Simulated times of requests, shape (n,), in their order of arrival."""

    start: Floats
    first: Floats
    last: Floats
    engine: NDArray[np.str_]


def simulate_requests(
    plan: ServingPlan, scores: Mapping[str, float], requests: int, watch: Watch | None = None
) -> RequestTimes:
    """Times of the first requests of a plan, at these scores of its unknowns. `watch`: see `Simulation`."""
    pools = [pool.at(scores) for pool in plan.pools]
    changes = {"detail": "requests"} | ({"fast_forward": False} if watch else {})
    scenario = plan.scenario.model_copy(update=changes)
    run = Simulation(replace(plan, scenario=scenario, pools=pools, requests=requests), watch=watch).run()
    table: dict[str, Any] = run.columns.table()
    order = np.argsort(table["id"], kind="stable")
    start = table["queued" if plan.scenario.measure.start == "queued" else "arrival"]
    return RequestTimes(start[order], table["first_token"][order], table["last_token"][order], table["replica"][order])


class StepDerivatives:
    """Derivatives of step times by the scores, collected while a simulation runs.

    A request's durations are the steps between its events, and the time for which the engine was idle. With the steps
    that ran, each of them as much longer as its batch says, durations are smooth in the scores; those of two
    simulations differ by the phase of a step here and there. What is left out is that slower steps gather larger
    batches: effects are rather too small, deviations rather too large.

    Args:
        plan: of the simulation. names: the unknowns. scores: at which the simulation runs.
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
        columns = [np.interp(end, instants, each) - np.interp(begin, instants, each) for each in grown.T]
        return np.array(columns).T


def _seconds(model: StepTime, batch: Batch | GroupBatch) -> float:
    return model.group_seconds(batch) if isinstance(batch, GroupBatch) else model.seconds(batch)


def observe(run: MeasuredRun, first: int) -> Observations:
    """Time to first token, and from the first to the last, of the first requests of a run.

    A request waits for the end of a step, which the model knows only as well as all steps before: half a step's
    length is below what it can say.
    """
    several = np.flatnonzero(run.answers[:first] > 1)
    between = run.decoding[:first][several] / (run.answers[:first][several] - 1)
    phase = 0.5 * (float(np.median(between)) if len(between) else 0.0)
    ttft, decoding = run.ttft[:first], run.decoding[:first][several]
    usable = decoding > 0
    several, decoding = several[usable], decoding[usable]
    begin = np.concatenate([run.start[:first], run.first[several]])
    return Observations(
        measured=np.log(np.concatenate([ttft, decoding])),
        kinds=np.repeat([TTFT, DECODING], [len(ttft), len(decoding)]),
        begin=begin,
        end=np.concatenate([run.first[:first], run.last[several]]),
        floor=phase / np.concatenate([ttft, decoding]),
    )


def compared(run: MeasuredRun, first: int, warm_up: int) -> NDArray[np.bool_]:
    """Mask of the durations that `observe` lists: those of requests after the first `warm_up`."""
    several = np.flatnonzero((run.answers[:first] > 1) & (run.decoding[:first] > 0))
    return np.asarray(np.concatenate([np.arange(first), several]) >= warm_up)


def predicted(times: RequestTimes, run: MeasuredRun, first: int) -> Floats:
    """Logarithms of the simulated durations that `observe` lists."""
    several = np.flatnonzero((run.answers[:first] > 1) & (run.decoding[:first] > 0))
    ttft, decoding = (times.first - times.start)[:first], (times.last - times.first)[several]
    durations: Floats = np.maximum(np.concatenate([ttft, decoding]), 1e-9)
    return np.asarray(np.log(durations), dtype=np.float64)


def derivatives(times: RequestTimes, steps: StepDerivatives, run: MeasuredRun, first: int) -> Floats:
    """Derivatives of the logarithms that `predicted` lists."""
    several = np.flatnonzero((run.answers[:first] > 1) & (run.decoding[:first] > 0))
    engines = np.concatenate([times.engine[:first], times.engine[several]])
    begin = np.concatenate([times.start[:first], times.first[several]])
    end = np.concatenate([times.first[:first], times.last[several]])
    found = [steps.between(engine, begin, end) for engine in np.unique(engines).tolist()]
    chosen = np.select([engines[:, None] == engine for engine in np.unique(engines)], found)
    return np.asarray(chosen / np.maximum(end - begin, 1e-9)[:, None], dtype=np.float64)


def requests_before(run: MeasuredRun, first: int) -> int:
    """Number of requests that came before the last of the first ones was answered: later ones cannot change these."""
    return max(int((run.start <= run.last[:first].max()).sum()), first)


def summary(start: Floats, first: Floats, last: Floats, answers: NDArray[np.int64]) -> dict[str, Any]:
    """Mean latencies and throughput of some requests."""
    several = answers > 1
    seconds = float(last.max() - start.min())
    found: dict[str, Any] = {
        "ttft": {"mean": float((first - start).mean())},
        "e2e": {"mean": float((last - start).mean())},
        "output_throughput": float(answers.sum()) / seconds if seconds else None,
    }
    if several.any():
        found["tpot"] = {"mean": float(((last - first)[several] / (answers[several] - 1)).mean())}
    return found
