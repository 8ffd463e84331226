"""A scenario's workload to send to a live server, and a verdict on each goal by what the server did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reports.blocks import Report, Text
from reports.layout import table, time_text
from scenarios.goals import THROUGHPUTS, Goal
from scenarios.reading import read_scenario
from twin.refinement.measured_run import MeasuredRun
from twin.serving.run.simulation import realisation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput
from workloads.trace import IdLists, Trace


def scenario_trace(path: Path) -> Trace:
    """The requests of a serving scenario's first replication, with their common prefixes."""
    plan = prepare(read_scenario(path, "serving"), path, [{}]).cases[0].plan
    requests, answers = zip(*realisation(plan, 0), strict=True)
    size = plan.workload.prefix_block_tokens
    return Trace(
        path.stem,
        np.array([request.arrival for request in requests]),
        np.array([request.prompt_tokens for request in requests]),
        np.array([min(answer, request.max_tokens) for request, answer in zip(requests, answers, strict=True)]),
        None if size is None else IdLists.of([request.prefix_blocks for request in requests]),
        size,
    )


def check_replayable(goals: Sequence[Goal]) -> None:
    """Refuse goals of single tokens, tasks and goodput, which the times of whole requests do not decide."""
    for goal in goals:
        if not goal.of_whole_requests:
            expected = "expected goals of ttft, tpot, e2e, output_throughput or request_throughput, of all requests"
            raise BadInput(expected, field="--slo", value=goal.name)


def value_of(goal: Goal, run: MeasuredRun) -> float:
    seconds = float(run.last.max() - run.start.min())
    if goal.metric in THROUGHPUTS:
        return (float(run.answers.sum()) if goal.metric == "output_throughput" else len(run)) / seconds
    several = run.answers > 1
    values = {"ttft": run.ttft, "e2e": run.last - run.start,
              "tpot": run.decoding[several] / np.maximum(run.answers[several] - 1, 1)}[goal.metric]  # fmt: skip
    if not len(values):
        raise BadInput("expected answers of more than one token", field="--slo", value=goal.name)
    return float(values.mean() if goal.quantile is None else np.quantile(values, goal.quantile))


def verdicts(goals: Sequence[Goal], run: MeasuredRun) -> tuple[Report, bool]:
    """A table with a verdict on each goal, and whether all are met."""
    rows = table("goal", "limit", "measured", "of the limit", "")
    met = True
    for goal in goals:
        value = value_of(goal, run)
        ratio = goal.ratio(value)
        met = met and ratio <= 1
        show = time_text if goal.at_most else "{:.4g}/s".format
        sign = "≤" if goal.at_most else "≥"
        verdict = "met" if ratio <= 1 else "missed"
        rows.add_row(goal.name, f"{sign} {show(goal.limit)}", show(value), f"{100 * ratio:.0f} %", verdict)
    verdict = "all goals are met" if met else "not all goals are met"
    return Report("replay", [Text(f"{len(run)} requests: {verdict}", "answer"), rows]), met
