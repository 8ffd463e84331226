"""Fleets for a day: the cheapest fixed size and the cheapest autoscaled fleet that hold goals in most minutes.

Candidates come in families, each a list from the cheapest to the dearest: fixed sizes, and autoscaling policies by a
parameter. More engines are assumed to hold goals in no fewer minutes, so the first value of a family that holds them is
found by bisection. All candidates have the same requests, and engines of the same number the same outages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.step_time import StepTime
from scenarios.fields import read_goals
from scenarios.overload import StartUpSpec
from scenarios.reading import Settings, with_trace
from scenarios.serving import check_scenario
from twin.serving.plan.plan import ServingPlan, make_plan
from twin.serving.plan.pools import devices_of
from twin.serving.results.report import NOTE, run_fingerprint
from twin.sweeps.one_run import simulate
from twin.sweeps.serving_sweep import Document, TraceFiles
from workloads.arrivals import Profile
from workloads.errors import BadInput

OWN_PROFILE = "profile"
"""In place of a file of rates: arrivals as the scenario has them."""


@dataclass(frozen=True)
class Outages:
    """Random outages of every engine: exponential times between them and until it is back, of these means, seconds."""

    mttf: float
    mttr: float

    def draw(self, engines: Sequence[str], until: float, seed: Sequence[int]) -> list[Document]:
        """The outages up to `until`, those of an engine independent of how many there are."""
        outages = []
        for number, engine in enumerate(engines):
            rng, now = np.random.default_rng([*seed, number]), 0.0
            while (now := now + float(rng.exponential(self.mttf))) < until:
                duration = float(rng.exponential(self.mttr))
                outages.append({"engine": engine, "at": now, "duration": duration})
                now += duration
        return outages


@dataclass(frozen=True)
class Tenure:
    """A way to rent engines: its name, the share of their price, and their outages, if they have some."""

    name: str
    price: float
    outages: Outages | None


@dataclass(frozen=True)
class Fleet:
    """A candidate: a tenure, a family, and the value of its parameter with the settings that it means."""

    tenure: Tenure
    family: str
    value: float
    settings: Settings

    @property
    def key(self) -> str:
        return f"{self.tenure.name}/{self.family}/{self.value:g}"


@dataclass(frozen=True)
class DayQuestion:
    """A scenario with a day's arrivals, goals in `measure.slo` and one autoscaled pool.

    Attributes:
        pool, scaling: the pool and its section, whose limits and start-up all candidates share.
        minutes: the share of minutes that must meet the goals. replications: days with other seeds.
        energy_price: of a kWh, part of the cost. label: what sets its runs apart from those of another question.
    """

    document: Document
    path: Path
    pool: str
    scaling: Document
    tenures: Sequence[Tenure]
    minutes: float
    replications: int
    trace: Path | None = None
    energy_price: float = 0.0
    label: str = ""

    @property
    def most(self) -> int:
        return int(self.scaling["max_replicas"])

    @cached_property
    def _files(self) -> tuple[TraceFiles, dict[str, StepTime]]:
        return TraceFiles(self.path.parent), {}

    @cached_property
    def base(self) -> ServingPlan:
        """The plan of the largest fixed fleet, without outages."""
        return self._plan(self.fixed(self.most))

    @property
    def stated(self) -> Document:
        """Inputs of the result besides the scenario."""
        fields = {"minutes": self.minutes, "energy_price": self.energy_price, "scaling": self.scaling}
        return fields | {"tenures": [asdict(tenure) for tenure in self.tenures]}

    def fingerprint(self, version: str) -> str:
        """A digest of `version` and of everything that the result depends on."""
        return run_fingerprint([self.base], version, self.replications, None, self.stated)

    def plan(self, fleet: Fleet, number: int) -> ServingPlan:
        """The plan of a candidate on one of the days."""
        settings = dict(fleet.settings)
        if fleet.tenure.outages is not None:
            engines = next(pool.names for pool in self.base.pools if pool.spec.name == self.pool)
            engines = engines[: int(settings[f"system.autoscaling.{self.pool}"]["max_replicas"])]
            arrivals = self.document["workload"]["arrivals"]
            seconds = self.base.requests / arrivals["rate"] if "rate" in arrivals else 86400.0
            seed = [self.base.scenario.seed, number]
            settings["failures"] = fleet.tenure.outages.draw(engines, seconds, seed)
        return self._plan(settings)

    def _plan(self, settings: Settings) -> ServingPlan:
        traces, step_times = self._files
        scenario = check_scenario(with_trace(self.document, self.trace), settings, self.path)
        return make_plan(scenario, self.path.parent, traces.read(scenario.workload), step_times, self.path)

    def fixed(self, size: int) -> Settings:
        """The settings of a fleet of fixed size."""
        return self.scaled(size, policy="scheduled", schedule=[[0, size]], max_replicas=size, min_replicas=size)

    def scaled(self, initial: int, **policy: Any) -> Settings:
        """The settings of a fleet that a policy scales, with `initial` engines at first."""
        shared = ("min_replicas", "max_replicas", "sync_period", "start_up", "scale_up", "scale_down")
        section = {name: self.scaling[name] for name in shared if name in self.scaling} | policy
        pools = "pools" in self.document.get("system", {})
        replicas = f"system.pools.{self.pool}.replicas" if pools else "system.replicas"
        return {f"system.autoscaling.{self.pool}": section, replicas: initial}

    def within(self, max_kw: float | None) -> DayQuestion:
        """The same question with no more engines than draw `max_kw` at their power limits, which must be known."""
        device = next(devices_of(pool) for pool in self.base.pools if pool.spec.name == self.pool)
        if device is None or device.power_limit is None:
            raise BadInput("expected power_limit of the devices", field=f"system.pools.{self.pool}.device")
        if max_kw is None:
            return self
        most = min(int(max_kw * 1e3 // (device.count * device.power_limit)), self.most)
        if most < self.scaling.get("min_replicas", 1):
            raise BadInput("expected room for min_replicas engines", field="--max-kw", value=max_kw)
        return replace(self, scaling=self.scaling | {"max_replicas": most})

    @property
    def start_up(self) -> float:
        """Seconds until an engine that is started takes requests."""
        return StartUpSpec(**self.scaling.get("start_up", {})).seconds


def prepare_day(
    document: Document,
    path: Path,
    day: str,
    goals: Mapping[str, float | str],
    mttf: float | None = None,
    mttr: float | None = None,
    spot: tuple[float, float] | None = None,
    minutes: float = 0.95,
    replications: int = 3,
    trace: Path | None = None,
    energy_price: float | None = None,
    max_kw: float | None = None,
) -> DayQuestion:
    """Check the question of a day; `BadInput` names the field, flag or file that cannot be used.

    Args:
        document: a scenario of kind serving, settings applied. day: a file of rates, or `OWN_PROFILE`.
        goals: limits of 99th percentiles; none: those in the scenario's `measure.slo`.
        mttf, mttr: of engines, seconds; mttr None: the time that an engine takes to start. spot: the share of the price
            and the mttf of engines that are rented so.
    """
    if not 0 < minutes <= 1:
        raise BadInput("expected a share above 0, at most 1", field="--minutes", value=minutes)
    document = {name: section for name, section in document.items() if name != "plan"}
    document |= {"workload": dict(document["workload"]), "measure": dict(document.get("measure") or {})}
    if day != OWN_PROFILE:
        points = read_rates(Path(day))
        requests = sum((end - begin) * (first + last) / 2 for (begin, first), (end, last) in pairwise(points))
        shape = {"rate": requests / points[-1][0], "profile": {"points": [list(point) for point in points]}}
        arrivals = document["workload"]["arrivals"] | shape
        document["workload"] |= {"arrivals": arrivals, "requests": max(round(requests), 1)}
    for goal in read_goals(goals):
        if goal.quantile != 0.99 or goal.of is not None or goal.metric == "itl":
            expected = "expected ttft_p99, tpot_p99 or e2e_p99 with --day: the goals of each minute"
            raise BadInput(expected, field="--slo", value=goal.name)
    if goals:
        document["measure"]["slo"] = {goal.metric: goal.limit for goal in read_goals(goals)}
    if not document["measure"].get("slo"):
        raise BadInput("expected goals with --day, or measure.slo in the scenario", field="--slo", file=path)
    sections = document.get("system", {}).get("autoscaling") or {}
    if len(sections) != 1:
        expected = "expected the section of one pool with --day: its limits and start_up"
        raise BadInput(expected, field="system.autoscaling", value=", ".join(sections) or None, file=path)
    ((pool, scaling),) = sections.items()
    check_scenario(with_trace(document, trace), {}, path)
    if mttr is not None and mttf is None and spot is None:
        raise BadInput("expected --mttf or --spot beside it", field="--mttr", value=mttr)
    back = max(StartUpSpec(**scaling.get("start_up", {})).seconds, 1.0) if mttr is None else mttr
    tenures = [Tenure("on demand", 1.0, None if mttf is None else Outages(mttf, back))]
    if spot is not None:
        tenures.append(Tenure("spot", spot[0], Outages(spot[1], back)))
    question = DayQuestion(document, path, pool, scaling, tenures, minutes, replications, trace, energy_price or 0.0)
    return question if energy_price is None and max_kw is None else question.within(max_kw)


def read_rates(path: Path) -> list[tuple[float, float]]:
    """Rows (seconds, requests/s) of a CSV file with the header `time,rate`; straight lines join them.

    `BadInput` names the file, and the line of what is no number.
    """
    try:
        header, *lines = path.read_text().split() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"expected a file of rates: {error}", field="--day", value=str(path)) from None
    if header != "time,rate":
        raise BadInput("expected the header time,rate", file=path, line=1, value=header)
    points: list[tuple[float, float]] = []
    for number, line in enumerate(lines, 2):
        try:
            time, rate = map(float, line.split(","))
        except ValueError:
            raise BadInput("expected seconds,requests per second", file=path, line=number, value=line) from None
        points.append((time, rate))
    try:
        Profile.of_points(points, "ramps")
    except BadInput as error:
        raise error.in_file(path) from None
    return points


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
        self.runs = self._points, self._simulate = points, simulate

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
    question, seconds = search.question, search.question.start_up
    result: Document = {"seconds": seconds}
    for name, changed in (("sooner", max(seconds - MINUTE, 0.0)), ("later", seconds + MINUTE)):
        scaling = question.scaling | {"start_up": {"warm_up": changed}}
        changed_question = replace(question, scaling=scaling, label=f"start-up {changed:g}/")
        variant = Search(changed_question, *search.runs)
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
