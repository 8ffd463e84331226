"""The random parts of a run, which differ between replications, and draws of the step-time model."""

from __future__ import annotations

import numpy as np

from latency_models.step_time import StepTime
from scenarios.serving import ServingScenario
from scenarios.serving_workload import ClosedLoopSpec
from workloads.generator import Workload

STEP_TIME = "step_time"
"""The name of the random part that `--draws` varies, beside those that replications vary."""


def drawn(step_time: StepTime, seed: int, draw: int | None) -> StepTime:
    """Draw number `draw` of a step-time model. The model itself if `draw` is None or the model has no distribution."""
    return step_time if draw is None else step_time.draw(np.random.default_rng([seed, draw, 1]))


DETERMINISTIC_ROUTERS = ("least_loaded", "round_robin")
"""Routers that draw nothing. A plug-in's may, so its replications are run."""


def random_parts(scenario: ServingScenario, workload: Workload, largest_group: int) -> tuple[str, ...]:
    """Names of the parts that differ between replications: parts of the workload, `routing` and `think_times`.

    Empty if all replications are the same run. `largest_group`: the most engines that a router chooses from.
    """
    arrivals = scenario.workload.arrivals
    thinking = isinstance(arrivals, ClosedLoopSpec) and bool(arrivals.think and arrivals.think_cv)
    routed = scenario.system.routing not in DETERMINISTIC_ROUTERS and largest_group > 1
    others = {"routing": routed, "think_times": thinking}
    return (*workload.random, *(name for name, random in others.items() if random))
