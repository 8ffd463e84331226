"""A live server: a workload to send to it, a verdict on each goal by what it did, and a watch on its metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reports.blocks import Report, Text, table, time_text
from scenarios.fields import THROUGHPUTS, Goal
from scenarios.reading import read_scenario
from twin.recording.server_pages import Upstream, is_scrapes, key_headers, read_scrapes, write_page
from twin.refinement.question import MeasuredRun
from twin.refinement.watch import DRIFTED, Watch
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


def judge_folder(watch: Watch, folder: Path, since: float) -> dict[str, Any]:
    """The verdict on the pages of a folder; `BadInput` for fewer than two."""
    if not folder.is_dir():
        raise BadInput("expected a folder of metrics pages", field="--pages", value=str(folder))
    return watch.judge(read_scrapes(folder, since))


def follow(
    watch: Watch,
    server: Upstream,
    folder: Path,
    since: float,
    every: float,
    duration: float | None,
    note: Callable[[str], object],
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """Add a page each `every` seconds and judge all so far, until a drift, after `duration` seconds, or on Ctrl-C.

    A server that stops answering later is waited for; `OSError` if it does not answer the first time.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInput("expected a folder, found a file", field="--pages", value=str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    earlier = is_scrapes(folder)
    headers, started = key_headers(), time.monotonic()
    new = write_page(server, folder, headers)
    pages = [replace(page, text="", buckets={}) for page in (read_scrapes(folder, since) if earlier else [new])]
    while True:
        document = watch.judge(pages)
        if document["verdict"] == DRIFTED or (duration is not None and time.monotonic() - started >= duration):
            return document
        try:
            sleep(every)
            pages.append(replace(write_page(server, folder, headers), text="", buckets={}))
        except KeyboardInterrupt:
            return document
        except OSError as error:
            note(f"the server does not answer /metrics ({error}); waiting for it")
