"""Fleets for a day: the cheapest fixed size and the cheapest autoscaled fleet that hold goals in most minutes.

Candidates come in families, each a list from the cheapest to the dearest: fixed sizes, and autoscaling policies by a
parameter. More engines are assumed to hold goals in no fewer minutes, so the first value of a family that holds them is
found by bisection. All candidates have the same requests, and engines of the same number the same outages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.planning.day_question import DayQuestion, Fleet
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.report import NOTE
from twin.sweeps.one_run import simulate
from twin.sweeps.serving_sweep import Document

SCHEMA = "twin.day-plan/1"

TARGETS = tuple(round(0.95 - 0.05 * step, 2) for step in range(18))
"""Shares of an engine's `max_num_seqs` that a policy aims at, the cheapest first."""

MARGINS = (0.0, 0.2, 0.4, 0.6)
"""Of the goals, for a policy that predicts latencies."""

HEADROOMS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5)
"""Of a schedule: its engines over those that the fixed fleet has for the same rate."""

MINUTE = 60.0
SMOOTHED = 5
"""Minutes whose rates a schedule takes together."""


@dataclass(frozen=True)
class DayTask:
    """One run of a fleet."""

    key: str
    plan: ServingPlan
    replication: int


def run_day(task: DayTask) -> Document:
    """Simulate a day; returns the parts of its report that count here."""
    report = simulate(task.plan, task.replication).report
    summary = report["summary"]
    scaled, minutes = summary["autoscaling"], report["autoscaling"]["minutes"]
    return {
        "cost": scaled["cost"], "gpu_hours": scaled["gpu_hours"], "engine_hours": scaled["engine_hours"],
        "kwh": (summary.get("energy") or {}).get("kwh"), "started": scaled["started"],
        "most_engines": max(pool["most_engines"] for pool in scaled["pools"].values()),
        "missed_minutes": scaled["missed_minutes"], "requests": minutes["requests"],
        **{f"{name}_p99": (summary[name] or {}).get("p99") for name in task.plan.scenario.measure.slo},
    }  # fmt: skip


class Search:
    """The candidates of one question that have been simulated.

    `points`: runs that are done, by key. `simulate`: adds those of tasks to them. `rows`: what is reported of each
    candidate, by key.
    """

    def __init__(
        self, question: DayQuestion, points: Mapping[str, Document], simulate: Callable[[Sequence[DayTask]], object]
    ) -> None:
        self.question = question
        self.rows: dict[str, Document] = {}
        self._points = points
        self._simulate = simulate

    def cheapest(self, families: Sequence[Sequence[Fleet]]) -> list[Fleet]:
        """The first fleet of each family that holds the goals, of those families whose last one does."""
        ends = [[-1, len(family)] for family in families]  # the last that fails, the first that holds
        pairs = list(zip(ends, families, strict=True))
        while probes := [(end, family[sum(end) // 2]) for end, family in pairs if end[1] - end[0] > 1]:
            self._evaluate([fleet for _, fleet in probes])
            for end, fleet in probes:
                end[self.rows[fleet.key]["holds"]] = sum(end) // 2
        return [family[end[1]] for end, family in pairs if end[1] < len(family)]

    def best(self, fleets: Iterable[Fleet]) -> Document | None:
        """The row of the least cost; the fewest engine-hours where devices have no price."""
        return min((self.rows[fleet.key] for fleet in fleets), key=lambda row: float(row["objective"]), default=None)

    def of(self, question: DayQuestion) -> Search:
        """A search of another question, with the same runs."""
        return Search(question, self._points, self._simulate)

    def demand(self, fleet: Fleet) -> list[float]:
        """The requests of each minute, the mean over the days that were simulated of a fleet."""
        days = [point["requests"] for point in self._done(fleet)]
        shortest = min(map(len, days))
        mean: list[float] = np.mean([day[:shortest] for day in days], axis=0).tolist()
        return mean

    def _evaluate(self, fleets: Sequence[Fleet]) -> None:
        """Simulate a day of each, and further days of those that hold the goals in the first."""
        days = range(self.question.replications)
        for batch in (days[:1], days[1:]):
            missing = [(fleet, day) for fleet in fleets for day in batch if self._key(fleet, day) not in self._points]
            tasks = [DayTask(self._key(fleet, day), self.question.plan(fleet, day), day) for fleet, day in missing]
            self._simulate(tasks)
            for fleet in fleets:
                self.rows[fleet.key] = self._row(fleet)
            fleets = [fleet for fleet in fleets if self.rows[fleet.key]["holds"]]

    def _key(self, fleet: Fleet, day: int) -> str:
        return f"{self.question.label}{fleet.key}/{day}"

    def _done(self, fleet: Fleet) -> list[Document]:
        keys = [self._key(fleet, day) for day in range(self.question.replications)]
        return [self._points[key] for key in keys if key in self._points]

    def _row(self, fleet: Fleet) -> Document:
        days = self._done(fleet)
        means: dict[str, Any] = {
            name: None if any(day[name] is None for day in days) else float(np.mean([day[name] for day in days]))
            for name in days[0] if name not in ("requests", "missed_minutes")
        }  # fmt: skip
        if means["cost"] is not None:
            means["cost"] = means["cost"] * fleet.tenure.price + self.question.energy_price * (means["kwh"] or 0.0)
        shares = [1 - day["missed_minutes"] for day in days]
        unpriced = means["cost"] is None
        return {
            "fleet": fleet.key, "tenure": fleet.tenure.name, "family": fleet.family, "value": fleet.value,
            "settings": fleet.settings, "days": len(days), **means,
            "objective": means["engine_hours"] * fleet.tenure.price if unpriced else means["cost"],
            "minutes": float(np.mean(shares)), "worst_day": min(shares),
            "holds": float(np.mean(shares)) >= self.question.minutes,
        }  # fmt: skip


def plan_day(
    question: DayQuestion, points: Mapping[str, Document], simulate: Callable[[Sequence[DayTask]], object]
) -> Document:
    """The document `twin.day-plan/1`; arguments are those of `Search`."""
    search, fixed, scaled = Search(question, points, simulate), list[Fleet](), list[Fleet]()
    demands: dict[str, tuple[Fleet, list[float]]] = {}
    for tenure in question.tenures:
        sizes = [Fleet(tenure, "fixed", size, question.fixed(size)) for size in range(1, question.most + 1)]
        enough = search.cheapest([sizes])
        largest = enough[0] if enough else sizes[-1]
        demands[tenure.name] = largest, search.demand(largest)
        fixed += enough
        scaled += search.cheapest(_families(question, *demands[tenure.name]))
    rates = np.array(search.demand(largest)) / MINUTE
    best = search.best(scaled)
    return {
        "schema": SCHEMA,
        "name": question.document["name"],
        "simulated": True,
        "note": NOTE,
        "question": {
            "goals": question.document["measure"]["slo"], "minutes": question.minutes, "pool": question.pool,
            "replications": question.replications, "max_engines": question.most,
            "mean_rate": float(rates.mean()), "peak_rate": float(rates.max()),
        },
        "feasible": bool(fixed or scaled),
        "unit": "engine-hours" if search.rows[largest.key]["cost"] is None else "cost",
        "fixed": search.best(fixed),
        "scaled": best,
        "start_up": best and _worth(best, search, *demands[best["tenure"]]),
        "rows": sorted(search.rows.values(), key=lambda row: (not row["holds"], row["objective"])),
    }  # fmt: skip


def _worth(best: Document, search: Search, fixed: Fleet, demand: Sequence[float]) -> Document:
    """The cheapest fleets of the best one's family if an engine starts a minute sooner, and a minute later."""
    seconds = search.question.start_up
    result: Document = {"seconds": seconds}
    for name, changed in (("sooner", max(seconds - MINUTE, 0.0)), ("later", seconds + MINUTE)):
        variant = search.of(search.question.with_start_up(changed))
        families = _families(variant.question, fixed, demand)
        fleets = variant.cheapest([family for family in families if family[0].family == best["family"]])
        result[name] = {"seconds": changed, "fleet": variant.best(fleets)}
    return result


def _families(question: DayQuestion, fixed: Fleet, demand: Sequence[float]) -> list[list[Fleet]]:
    """The families of autoscaled fleets, of the tenure of the `fixed` one. `demand`: requests of each minute.

    A schedule has the engines of the fixed fleet at the peak, and fewer in proportion to the rate, up in time.
    """
    seats = next(pool.scheduler.config.max_num_seqs for pool in question.base.pools if pool.spec.name == question.pool)
    means = _smoothed(demand)
    lead = math.ceil((question.start_up + MINUTE) / MINUTE)
    ahead = [max(means[i : i + lead + 1]) * fixed.value / max(means) for i in range(len(means))]
    initial = min(max(math.ceil(ahead[0]), question.scaling.get("min_replicas", 1)), question.most)
    goals = {f"{name}_p99": limit for name, limit in question.document["measure"]["slo"].items()}
    down = question.scaling.get("scale_down", {"stabilization_window": 300.0})

    def fleets(family: str, values: Sequence[float], policy: Callable[[float], Document]) -> list[Fleet]:
        return [Fleet(fixed.tenure, family, value, question.scaled(initial, **policy(value))) for value in values]

    def schedule(headroom: float) -> Document:
        sizes = [min(max(math.ceil(engines * headroom), 1), question.most) for engines in ahead]
        return {"policy": "scheduled", "schedule": [[MINUTE * i, size] for i, size in enumerate(sizes)]}

    def hpa(policy: str, scale: float, **parameters: str) -> Callable[[float], Document]:
        return lambda target: {"policy": policy, "target": target * scale, **parameters}

    def slo(forecast: str) -> Callable[[float], Document]:
        return lambda margin: {"policy": "slo", "goals": goals, "margin": margin, "forecast": forecast,
                               "sync_period": 30.0, "window": 120.0, "scale_down": down}  # fmt: skip

    return [
        fleets("HPA, load", TARGETS, hpa("target_utilization", 1.0, metric="load")),
        fleets("HPA, unfinished requests", TARGETS, hpa("queue_length", seats, count="unfinished")),
        fleets("slo", MARGINS, slo("constant")),
        fleets("slo, linear forecast", MARGINS, slo("linear")),
        fleets("schedule", HEADROOMS, schedule),
    ]  # fmt: skip


def _smoothed(demand: Sequence[float]) -> list[float]:
    """The mean of the minutes around each."""
    half = SMOOTHED // 2
    return [float(np.mean(demand[max(i - half, 0) : i + half + 1])) for i in range(len(demand))]
