"""Sweeps of AFD bundles: every ratio of every configuration, simulated and compared with theory."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from reports.run_directory import fingerprint, write_bytes
from scenarios.afd import Topology, check_scenario, parse_ratios
from scenarios.fields import BUNDLE_REQUESTS, RUNS, SLOTS
from scenarios.reading import Settings, in_words, with_trace
from twin.afd.plan import BundlePlan, curves, make_plan, simulation_summary, theory_summary
from twin.afd.point import run_point
from twin.sweeps.serving_sweep import Case, Document, Sweep, TraceFiles
from twin.theory.paper import NAMES
from workloads.errors import BadInput

SCHEMA = "twin.sweep/1"
NOTE = "Every point is simulated (discrete events, no hardware); the curves are closed forms."


@dataclass(frozen=True)
class Task:
    """One point to run. `requests`: keep every request's times."""

    key: str
    configuration: int
    plan: BundlePlan
    topology: Topology
    requests: bool = False


@dataclass(frozen=True)
class RatioSweep(Sweep[Task]):
    """A checked sweep, the ratios of each case; nothing is simulated until `run`.

    `keep_requests`: write a Parquet file of every point's requests, `requests/<configuration>-<x>A-<y>F.parquet`.
    """

    cases: Sequence[Case[BundlePlan]]
    topologies: Sequence[Topology]
    keep_requests: bool = False

    def inputs(self) -> Document:
        first = self.cases[0].plan
        return {
            "requests": self.keep_requests,
            "scenarios": [case.plan.scenario.model_dump(mode="json", by_alias=True) for case in self.cases],
            "ratios": [str(topology.ratio) for topology in self.topologies],
            "seed": first.scenario.seed,
            "calibration": first.calibration.name,
            "calibration_hash": first.calibration.content_hash(),
            "trace": None if first.trace is None else first.trace.name,
        }

    def fingerprint(self, version: str) -> str:
        places: Any = {"workload": {"trace": {"path"}}, "calibration": True}
        identity = [
            [
                case.plan.scenario.model_dump(mode="json", exclude=places),
                case.plan.calibration.content_hash(),
                case.plan.trace_digest,
                asdict(case.plan.cards),
                None if case.plan.memory is None else asdict(case.plan.memory),
            ]
            for case in self.cases
        ]
        ratios = [str(topology.ratio) for topology in self.topologies]
        return fingerprint([f"{version} {self.keep_requests}", identity, ratios])

    @property
    def tasks(self) -> list[Task]:
        tasks = [
            Task(f"{index}/{topology.ratio}", index, case.plan, topology, self.keep_requests)
            for index, case in enumerate(self.cases)
            for topology in self.topologies
        ]
        return sorted(tasks, key=lambda task: -task.topology.attention_instances)

    def label(self, task: Task) -> str:
        return f"r = {float(task.topology.ratio):g}"

    def work(self) -> Callable[[Task], tuple[Document, bytes | None]]:
        return run_task

    def keep_result(self, task: Task, result: tuple[Document, bytes | None], folder: Path | None) -> Document:
        point, requests = result
        if folder is not None and requests is not None:
            write_bytes(folder / "requests" / f"{task.configuration}-{task.topology}.parquet", requests)
        return {"configuration": task.configuration, **point}

    def prepare_summary(self) -> None:
        _ = self.theory

    @cached_property
    def theory(self) -> list[tuple[Document, dict[str, list[float]]]]:
        """Closed forms and their curves, of each configuration."""
        ratios = [float(topology.ratio) for topology in self.topologies]
        return [(theory_summary(case.plan), curves(case.plan, ratios)) for case in self.cases]

    def summarise(self, documents: dict[str, Document]) -> Document:
        """The document `twin.sweep/1`. With one configuration its theory stands at the top as well."""
        keys = [f"{index}/{topology.ratio}" for index in range(len(self.cases)) for topology in self.topologies]
        points = [documents[key] for key in keys if key in documents]
        configurations = [self._configuration(index, points) for index in range(len(self.cases))]
        single = configurations[0] if len(configurations) == 1 else None
        first = self.cases[0].plan
        return {
            "schema": SCHEMA,
            "name": first.scenario.name,
            "simulated": True,
            "note": NOTE,
            "time_unit": first.calibration.time_unit,
            "calibration": {
                "name": first.calibration.name,
                "method": first.calibration.provenance.method,
                "hash": first.calibration.content_hash(),
            },
            "theory": None if single is None else single["theory"],
            "simulation": None if single is None else single["simulation"],
            "configurations": configurations,
            "points": points,
            "gap_names": NAMES,
        }

    def _configuration(self, index: int, points: list[Document]) -> Document:
        case = self.cases[index]
        theory, theory_curves = self.theory[index]
        simulated = [point for point in points if point["configuration"] == index]
        return {
            "settings": case.settings,
            "scenario": case.plan.scenario.model_dump(mode="json", by_alias=True),
            "cards": asdict(case.plan.cards),
            "memory": None if case.plan.memory_check is None else case.plan.memory_check.describe(),
            "theory": theory,
            "simulation": simulation_summary(simulated, theory),
            "curves": theory_curves,
        }


def prepare(
    document: Document,
    path: Path,
    ratio: str | None = None,
    configurations: Iterable[Settings] = ({},),
    trace: Path | None = None,
    advance: Callable[[str], object] = lambda text: None,
    *,
    keep_requests: bool = False,
) -> RatioSweep:
    """Check everything that a sweep needs: `document` with each configuration's settings, at every ratio."""
    configurations = list(configurations)
    if trace is not None:
        _refuse_lengths_beside_a_trace(configurations)
    document = with_trace(document, trace, ("prefill", "decode"))
    traces = TraceFiles(path.parent)
    cases = []
    for settings in configurations:
        scenario = check_scenario(document, settings, path)
        cases.append(Case(settings, make_plan(scenario, path.parent, traces.read(scenario.workload))))
        advance(in_words(settings))
    _check_alike(cases)
    _refuse_if_none_fits(cases, path)
    topologies = parse_ratios(ratio if ratio is not None else cases[0].plan.scenario.ratio)
    _check_size(cases, topologies, path)
    return RatioSweep(cases, topologies, keep_requests)


def _check_size(cases: Sequence[Case[BundlePlan]], topologies: Sequence[Topology], path: Path) -> None:
    """Refuse a bundle, or a number of points, beyond the limits."""
    if (points := len(cases) * len(topologies)) > RUNS.maximum:
        raise BadInput(RUNS.expectation(points), field="ratio", value=points, file=path)
    largest = max(topology.attention_instances for topology in topologies)
    for scenario in (case.plan.scenario for case in cases):
        counts = {
            "batch_size": (SLOTS, scenario.batch_size * scenario.microbatches * largest),
            "requests_per_instance": (BUNDLE_REQUESTS, scenario.requests_per_instance * largest),
        }
        for field, (limit, count) in counts.items():
            if count > limit.maximum:
                expected = f"{limit.expectation(count)}; there are {count:,} with {largest:,} attention instances"
                raise BadInput(expected, field=field, value=getattr(scenario, field), file=path)


def _check_alike(cases: Sequence[Case[BundlePlan]]) -> None:
    """Refuse configurations of different time units or ratios, which do not fit into one document."""
    units = {case.plan.calibration.time_unit for case in cases}
    if len(units) > 1:
        raise BadInput(
            f"expected calibrations of one time unit, found {' and '.join(sorted(units))}", field="calibration"
        )
    if len({case.plan.scenario.ratio for case in cases}) > 1:
        raise BadInput("expected one list of ratios for all configurations: give --ratio", field="--set ratio")


def _refuse_if_none_fits(cases: Sequence[Case[BundlePlan]], path: Path) -> None:
    """Refuse a sweep that has no configuration which fits in memory; others are marked."""
    refusals = [None if case.plan.memory_check is None else case.plan.memory_check.refusal() for case in cases]
    first = refusals[0]
    if first is not None and all(refusal is not None for refusal in refusals):
        raise BadInput(first.expected, field=first.field, value=first.value, file=path)


def _refuse_lengths_beside_a_trace(configurations: Iterable[Settings]) -> None:
    for key in {key for settings in configurations for key in settings}:
        if key.startswith(("workload.prefill", "workload.decode")):
            raise BadInput("expected no synthetic lengths beside --trace", field="--set", value=key)


def run_task(task: Task) -> tuple[Document, bytes | None]:
    """Run one point, without garbage collection: a run makes millions of objects and no cycles.

    Returns the point, and a Parquet file with a row for each of its requests, if they are kept.
    """
    gc.disable()
    try:
        if not task.requests:
            return run_point(task.plan, task.topology), None
        with tempfile.TemporaryDirectory() as folder:  # of the worker, which may be on another machine
            file = Path(folder) / "requests.parquet"
            return run_point(task.plan, task.topology, file), file.read_bytes()
    finally:
        gc.enable()
