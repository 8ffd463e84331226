"""The question of a day of fleets: a scenario, the ways to rent its engines, and the candidates' scenarios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from twin.serving.results.report import run_fingerprint
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
        """What the result depends on beside the scenario."""
        names = ("minutes", "energy_price", "scaling")
        return {name: getattr(self, name) for name in names} | {"tenures": [asdict(tenure) for tenure in self.tenures]}

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

    def with_start_up(self, seconds: float) -> DayQuestion:
        """The same question if an engine starts in so many seconds."""
        scaling = self.scaling | {"start_up": {"warm_up": seconds}}
        return replace(self, scaling=scaling, label=f"start-up {seconds:g}/")

    def within(self, max_kw: float | None) -> DayQuestion:
        """The same question with no more engines than draw `max_kw` at their power limits.

        Raises:
            BadInput: devices have no power limit, or one engine draws more.
        """
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
    """Check the question of a day.

    Args:
        document: a scenario of kind serving, settings applied. day: a file of rates, or `OWN_PROFILE`.
        goals: limits of 99th percentiles; none: those in the scenario's `measure.slo`.
        mttf, mttr: of engines, seconds; mttr None: the time that an engine takes to start. spot: the share of the price
            and the mttf of engines that are rented so.

    Raises:
        BadInput: naming the field, flag or file that cannot be used.
    """
    if not 0 < minutes <= 1:
        raise BadInput("expected a share above 0, at most 1", field="--minutes", value=minutes)
    document = {**document, "workload": dict(document["workload"]), "measure": dict(document.get("measure") or {})}
    document.pop("plan", None)
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

    Raises:
        BadInput: naming the file, and the line of what is no number.
    """
    try:
        header, *lines = path.read_text().split() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"expected a file of rates: {error}", field="--day", value=str(path)) from None
    if header != "time,rate":
        raise BadInput("expected the header time,rate", file=path, line=1, value=header)
    points = []
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
