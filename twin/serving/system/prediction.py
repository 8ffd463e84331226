"""Predictions for autoscaling: what latencies would a number of engines give to the load of the last minutes?

The answer is a short simulation, with the scheduler, step times and router of the pool. At its start there are the
requests that are in the system now. Then the requests of the last minutes come again, at the same intervals, and the
latencies of these count. With a linear forecast the intervals are shorter by the growth of the rate until an engine
that is started now is up. Answers that are not finished have lengths drawn from those that are; of an answer that has
begun, half is taken to be left. Prefix caches are empty at first. A prefill pool is simulated up to the first token, a
decode pool from there on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from reports.metrics import quantiles
from scenarios.goals import Goal
from scenarios.overload import AutoscalingSpec
from twin.environment import Alarm, Environment, Priority
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.plan.pools import PlannedPool
from twin.serving.records.requests import UNSET, RequestRecord
from twin.serving.system.topologies import Parts
from workloads.request import Request


class Predictor:
    """Predicts latencies of the engines of one pool that serve the same models.

    Args:
        plan, draw: of the simulation. pool, models, names: the pool, and the models and engines of it.
        spec: the pool's section. present: the unfinished requests that the engines have, or wait for one of them.
        env: for the time. seed: of draws.
    """

    def __init__(
        self,
        plan: ServingPlan,
        pool: PlannedPool,
        models: Sequence[str],
        names: Sequence[str],
        spec: AutoscalingSpec,
        present: Callable[[], Iterable[RequestRecord]],
        env: Environment,
        draw: Draw,
        seed: int,
    ) -> None:
        scenario = plan.scenario.model_copy(update={"detail": False})
        self._plan = replace(plan, scenario=scenario, pools=[pool]).for_one_run()  # notes steps outside of measurements
        self._models = list(models)
        self._names = list(names)
        self._spec = spec
        self._env = env
        self._draw = draw
        self._seed = seed
        self._goals = spec.latency_goals
        self._role = pool.spec.role
        self._lead = 0.0 if spec.forecast == "constant" else spec.start_up.seconds + spec.sync_period
        self._present = present
        self._records: deque[RequestRecord] = deque()  # of the window, in order of arrival
        self._asked_at = -1.0
        self._load: list[_Coming] = []
        self._found: dict[int, dict[str, float]] = {}

    def arrived(self, record: RequestRecord) -> None:
        """Note a request, if it is for these models."""
        if record.request.model in self._models:
            self._records.append(record)
            self._forget()

    def latencies(self) -> dict[str, float]:
        """The latencies of requests of the window by goal, as far as they are known; seconds."""
        self._forget()
        if not self._goals:
            return {}
        return latencies_of([*self._records], self._goals)

    def predict(self, engines: int) -> Mapping[str, float]:
        if self._asked_at != self._env.now:
            self._asked_at = self._env.now
            self._forget()
            self._load = self._coming()
            self._found = {}
        if engines not in self._found:
            self._found[engines] = self._simulate(engines)
        return self._found[engines]

    def _forget(self) -> None:
        """Let requests that came before the window go."""
        records, start = self._records, self._env.now - self._spec.window
        while records and records[0].request.arrival < start:
            records.popleft()

    def _coming(self) -> list[_Coming]:
        """The requests of a prediction, in order."""
        now, decodes = self._env.now, self._role == "decode"
        lengths = [record.output_tokens for record in self._records if record.last_token != UNSET]
        rng = np.random.default_rng([self._seed, round(1e6 * now)])

        def answer(record: RequestRecord) -> int:
            if record.last_token != UNSET:
                return record.output_tokens
            length = lengths[int(rng.integers(len(lengths)))] if lengths else record.request.max_tokens
            return min(length, record.request.max_tokens)

        pending: list[_Coming] = []
        for record in self._present():
            begun, tokens = record.first_token != UNSET, answer(record)
            pending.append(_Coming(0.0, record.request, max(tokens // 2, 2) if begun else tokens, begun, judged=False))
        times = [(record.first_token if decodes else record.request.arrival, record) for record in self._records]
        again = sorted(
            (entry for entry in times if entry[0] != UNSET), key=lambda entry: (entry[0], entry[1].request.id)
        )
        recent = again[-self._spec.max_requests :]
        begin = max(now - self._spec.window, 0.0)
        start = begin if len(recent) == len(again) else recent[0][0]
        growth = 1.0
        if self._lead and now >= self._spec.window:  # a part of a window says little about growth
            growth = growth_until([time for time, _ in again], begin, now, now + self._lead)
        for time, record in recent:
            tokens = answer(record)
            if not decodes or tokens > 1:
                pending.append(_Coming(max(time - start, 0.0) / growth, record.request, tokens, decodes, judged=True))
        return pending

    def _simulate(self, engines: int) -> dict[str, float]:
        """Latencies by goal with a number of engines; none without requests."""
        if not any(pending.judged for pending in self._load):
            return {}
        env, names = Environment(), tuple(self._names[:engines])
        pool = replace(self._plan.pools[0], engines={model: list(names) for model in self._models})
        parts = Parts(replace(self._plan, pools=[pool]), env, np.random.default_rng(self._seed), self._draw)
        parts.make_engines()
        (served,) = {id(pool): pool for pool in parts.make_pools(dict.fromkeys(self._models, names)).values()}.values()
        alarm = Alarm(Priority.ARRIVAL, _never)
        judged: list[RequestRecord] = []
        for number, pending in enumerate(self._load):
            record = pending.record(number)
            if pending.judged:
                judged.append(record)
            if pending.time:
                env.run_to(alarm, pending.time)
            engine = served.choose(record.request)
            assert engine is not None, "engines of a prediction do not fail"
            max_tokens = 1 if self._role == "prefill" and not record.request.one_shot else None
            engine.submit(record, max_tokens=max_tokens, remote_prefill=pending.begun)
        env.run()
        return latencies_of(judged, self._goals)


class _Coming:
    """A request of a prediction.

    Attributes:
        time: when it comes, seconds. tokens: of its answer. begun: whether it has its first token. judged: whether its
            latencies count.
    """

    __slots__ = ("begun", "judged", "request", "time", "tokens")

    def __init__(self, time: float, request: Request, tokens: int, begun: bool, *, judged: bool) -> None:
        self.time = time
        self.request = request
        self.tokens = tokens
        self.begun = begun
        self.judged = judged

    def record(self, number: int) -> RequestRecord:
        request = replace(self.request, id=number, arrival=self.time)
        record = RequestRecord(request, self.tokens)
        if self.begun:
            record.first_token = self.time
        return record


MOST_GROWTH = 4.0
"""The rate is forecast to grow, or to shrink, by this factor at most."""


def growth_until(times: Sequence[float], begin: float, end: float, until: float) -> float:
    """The rate at `until` over the mean rate of a window, by a straight line through the rates of its two halves."""
    half = (end - begin) / 2
    late = sum(time >= begin + half for time in times)
    if not times or not half:
        return 1.0
    early = len(times) - late
    growth = 1 + (late - early) / len(times) * (until - begin - half) / half
    return min(max(growth, 1 / MOST_GROWTH), MOST_GROWTH)


def latencies_of(records: Sequence[RequestRecord], goals: Sequence[Goal]) -> dict[str, float]:
    """Latencies by goal, seconds, of the requests that have them."""
    merged: dict[str, float] = {}
    for goal in goals:
        values = np.array([value for record in records if (value := _latency(record, goal.metric)) is not None])
        if len(values):
            merged[goal.name] = float(
                values.mean() if goal.quantile is None else quantiles(values, np.array([goal.quantile]))[0]
            )
    return merged


def _latency(record: RequestRecord, metric: str) -> float | None:
    if metric == "ttft":
        return None if record.first_token == UNSET else record.first_token - record.request.arrival
    if record.last_token == UNSET:
        return None
    if metric == "e2e":
        return record.last_token - record.request.arrival
    gaps = record.output_tokens - 1
    return (record.last_token - record.first_token) / gaps if gaps > 0 else None


def _never(time: float) -> None:
    raise AssertionError("the alarm marks how far to run, and does not ring")
