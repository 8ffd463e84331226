"""Engines that are textbook queues: a server for each seat, and steps of constant time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.twin.serving.scenarios import plan_for, scenario
from twin.serving.plan.plan import ServingPlan
from twin.serving.run.simulation import Simulation


def constant(step: float) -> dict[str, Any]:
    """Step times of so many seconds, whatever the batch."""
    return {"source": "linear", "overhead": step, "per_token": 0.0, "per_kv_token": 0.0}


def servers(seats: int, **engine: Any) -> dict[str, Any]:
    """The section `engine` of a queue with so many servers."""
    return {"num_gpu_blocks": 10**7, "max_num_seqs": seats, "enable_prefix_caching": False, **engine}


def plan_of(document: dict[str, Any] | None = None, **sections: Any) -> ServingPlan:
    """The simulation of a scenario, or of one with these sections."""
    return plan_for(document or scenario(**sections))


def simulated(plan: ServingPlan, seed: int | None = None, **changes: Any) -> dict[str, Any]:
    """The columns of a run's requests. `changes`: of fields of the plan."""
    update = {} if seed is None else {"seed": seed}
    plan = replace(plan, scenario=plan.scenario.model_copy(update=update), **changes)
    columns: dict[str, Any] = Simulation(plan).run().columns.table()
    return columns
