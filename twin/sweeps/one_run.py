"""One run of a plan, from the fields of a scenario to its report: `simulate(read_plan(document, path))`.

Engines that are independent run apart, each group on its own, in one or several processes.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scenarios.reading import Settings, with_trace
from scenarios.serving import check_scenario
from twin.executors.executor import Processes
from twin.serving.plan.plan import Draw, ServingPlan, make_plan, widest
from twin.serving.records.engine_log import Backlog, Counters, EngineLog, StepFile
from twin.serving.records.requests import Sink
from twin.serving.results.report import Document, report_run
from twin.serving.results.summary import EngineAtEnd, Run
from twin.serving.run.independent_engines import (
    IndependentEngines,
    Rows,
    in_order,
    independent_groups,
    merged_run,
    simulate_apart,
)
from twin.serving.run.simulation import Simulation
from workloads.errors import BadInput

WORTH_A_PROCESS = 10_000
"""Requests of a run for which another process gains more than it costs."""


@dataclass(frozen=True)
class _Share:
    """One process's share of a run, and the files for its results."""

    plan: ServingPlan
    replication: int
    draw: Draw
    number: int
    shares: int
    folder: Path

    def file(self, kind: str) -> Path:
        """The file of its requests, or of its steps."""
        return self.folder / f"{self.number}.{kind}"


def _simulate_in_processes(plan: ServingPlan, replication: int, draw: Draw, sink: Sink | None, processes: int) -> Run:
    """Run groups of engines in processes, which leave requests and steps in files: long runs take little memory."""
    with tempfile.TemporaryDirectory(prefix="twin-") as folder:
        shares = [_Share(plan, replication, draw, number, processes, Path(folder)) for number in range(processes)]
        engines: list[EngineAtEnd] = []
        outsides = [plan.outside()]
        with Processes(processes).each_as_done(_simulate_share, shares) as results:
            for share, (ends, outside) in results:
                steps = share.file("steps")
                file = StepFile(steps, new=False) if steps.exists() else None
                engines += [
                    EngineAtEnd(name, blocks, seqs, Counters(**counters), Backlog(*backlog), EngineLog.load(log, file))
                    for name, blocks, seqs, counters, backlog, log in ends
                ]
                outsides.append(outside)
        spans = zip(*map(_finished_parts, shares), strict=True)
        together = ({name: np.concatenate([rows[name] for rows in span]) for name in span[0]} for span in spans)
        return merged_run(plan, map(in_order, together), sink, lambda: engines, widest(outsides))


def _simulate_share(share: _Share) -> tuple[list[tuple[Any, ...]], dict[str, float]]:
    """Simulate a share into files; returns the ends of its engines as plain objects, and `ServingPlan.outside`."""
    part = IndependentEngines(
        share.plan, share.replication, share.draw, share.number, share.shares, lambda: StepFile(share.file("steps"))
    )
    with share.file("requests").open("wb") as file:
        for rows in part.finished_parts():
            pickle.dump(rows, file, pickle.HIGHEST_PROTOCOL)
    ends = [
        (
            engine.name, engine.blocks, engine.max_num_seqs, asdict(engine.counters),
            (engine.backlog.first, engine.backlog.last), engine.log.dump(),
        )
        for engine in part.engines.values()
    ]  # fmt: skip
    return ends, share.plan.outside()


def _finished_parts(share: _Share) -> Iterator[Rows]:
    """The requests that `_simulate_share` has written, span by span."""
    with share.file("requests").open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


@dataclass(frozen=True)
class Result:
    """A run of a plan. `run`: its requests, and its engines at the end. `report`: what is kept of it (`report_run`)."""

    plan: ServingPlan
    run: Run
    report: Document


def read_plan(document: Document, path: Path, settings: Settings = {}, trace: Path | None = None) -> ServingPlan:  # noqa: B006
    """Check a scenario with `settings` applied, and read its files; a trace takes the place of its lengths."""
    scenario = check_scenario(with_trace(document, trace), settings, path)
    try:
        return make_plan(scenario, path.parent, scenario.workload.read_trace(path.parent), file=path)
    except BadInput as error:
        raise error.in_file(path) from None


def simulate(
    plan: ServingPlan, replication: int = 0, draw: Draw = None, sink: Sink | None = None, processes: int = 1
) -> Result:
    """Run a plan and report it; arguments and errors are those of `run_plan`."""
    run = run_plan(plan, replication, draw, sink, processes)
    return Result(plan, run, report_run(run, plan))


def run_plan(
    plan: ServingPlan, replication: int = 0, draw: Draw = None, sink: Sink | None = None, processes: int = 1
) -> Run:
    """Run a plan, as `Simulation` does; in several processes if engines are independent and the run is long."""
    try:
        groups = len(independent_groups(plan)) if sum(map(len, plan.groups)) > 1 else 1
        if groups == 1:
            return Simulation(plan, replication, draw, sink=sink).run()
        plan, processes = plan.for_one_run(), min(processes, groups, plan.requests // WORTH_A_PROCESS)
        if processes <= 1:
            return simulate_apart(plan, replication, draw, sink)
        return _simulate_in_processes(plan, replication, draw, sink, processes)
    except BadInput as error:
        raise error.in_file(plan.file) from None
    except (TypeError, AttributeError, AssertionError) as error:
        if not plan.scenario.plugins:
            raise
        expected = f"expected policies that return what their protocols say: {type(error).__name__}: {error}"
        raise BadInput(expected, field="plugins", value=plan.scenario.plugins, file=plan.file) from error
