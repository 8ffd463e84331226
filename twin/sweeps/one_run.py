"""One run of a plan, from the fields of a scenario to its report: `simulate(read_plan(document, path))`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scenarios.overrides import Settings, with_trace
from scenarios.serving import check_scenario
from twin.serving.plan.plan import Draw, ServingPlan, make_plan
from twin.serving.records.requests import Sink
from twin.serving.results.report import Document, report_run
from twin.serving.run.simulation import Run, Simulation
from workloads.errors import BadInput


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
        return _run(plan, replication, draw, sink, processes)
    except BadInput as error:
        raise error.in_file(plan.file) from None
    except (TypeError, AttributeError, AssertionError) as error:
        if not plan.scenario.plugins:
            raise
        expected = f"expected policies that return what their protocols say: {type(error).__name__}: {error}"
        raise BadInput(expected, field="plugins", value=plan.scenario.plugins, file=plan.file) from error


def _run(plan: ServingPlan, replication: int, draw: Draw, sink: Sink | None, processes: int) -> Run:
    if sum(map(len, plan.groups)) > 1:
        from twin.sweeps.in_processes import run_apart

        run = run_apart(plan, replication, draw, sink, processes)
        if run is not None:
            return run
    return Simulation(plan, replication, draw, sink=sink).run()
