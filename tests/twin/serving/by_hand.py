"""Runs small enough to work out on paper: stated requests, and steps that take a tick for every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scenarios.fields import MeasureSpec
from tests.twin.serving.scenarios import plan_for, scenario
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation
from workloads.generator import Workload
from workloads.mixes import ModelMix
from workloads.traces import Trace

TICK = 1 / 64
"""Seconds. A power of two, so that sums of ticks are exact."""

STEP = {"overhead": 0.0, "per_token": TICK, "per_kv_token": 0.0}
"""A step takes a tick for every prompt token and every decode."""

Row = tuple[int, int, int]
"""Arrival in ticks, prompt tokens, answer tokens."""


def plan_of(
    rows: Sequence[Row],
    prefixes: tuple[tuple[int, ...], ...] | None = None,
    max_tokens: int | None = None,
    models: ModelMix | None = None,
    **sections: Any,
) -> ServingPlan:
    """A plan that plays exactly `rows`; `prefixes` are the ids of their leading blocks of 16 tokens."""
    document = scenario(**{"step_time": STEP, **sections})
    plan = plan_for(document)
    arrivals, prompts, answers = (np.array(column) for column in zip(*rows, strict=True))
    trace = Trace("rows", arrivals * TICK, prompts, answers, prefixes, None if prefixes is None else 16)
    workload = Workload.replay(trace, models=models, max_tokens=max_tokens)
    return replace(plan, workload=workload, requests=len(rows))


def play(rows: Sequence[Row], **settings: Any) -> Run:
    """Simulate exactly `rows` (see `plan_of`)."""
    return Simulation(plan_of(rows, **settings)).run()


def requests(run: Run) -> dict[str, list[Any]]:
    """The columns of the run's requests in the order of their ids, times in ticks."""
    table = {name: values.tolist() for name, values in run.columns.table().items()}
    order = sorted(range(len(table["id"])), key=table["id"].__getitem__)
    times = ("arrival", "queued", "scheduled", "first_token", "last_token")
    return {name: [values[i] / TICK if name in times else values[i] for i in order] for name, values in table.items()}


def measured(**fields: Any) -> MeasureSpec:
    """A `measure` section; `after`, `before` and the goals of `slo` are in ticks."""
    for name in ("after", "before"):
        if name in fields:
            fields[name] *= TICK
    slo = {name: goal * TICK for name, goal in fields.pop("slo", {}).items()}
    return MeasureSpec(slo=slo, **fields)
