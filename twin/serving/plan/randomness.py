"""The random parts of a run, which differ between replications, and draws of what is not known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from latency_models.unknowns import Unknown, draw_scores
from scenarios.pools import router_name
from scenarios.serving import ServingScenario
from scenarios.serving_workload import ClosedLoopSpec
from schedulers.routing import draws

if TYPE_CHECKING:
    from workloads.generator import Workload
    from workloads.recorded_sessions import RecordedSessions
    from workloads.sessions import DrawnSessions

STEP_TIME = "step_time"
"""The name of the random part that `--draws` varies, beside those that replications vary."""


Draw: TypeAlias = int | tuple[str, float] | None
"""The number of a draw of all unknowns; one unknown's name and score, the others at their estimates; None: all at
their estimates."""


def scores_of(unknowns: Iterable[Unknown], seed: int, draw: Draw) -> dict[str, float]:
    """The scores of a draw; empty where all unknowns are at their estimates."""
    if draw is None:
        return {}
    if isinstance(draw, int):
        return draw_scores(unknowns, np.random.default_rng([seed, draw, 1]))
    name, score = draw
    return {name: score}


def random_parts(
    scenario: ServingScenario, workload: Workload | DrawnSessions | RecordedSessions, largest_group: int
) -> tuple[str, ...]:
    """Names of the parts that differ between replications: parts of the workload, `routing`,
    `think_times` and `speculation`.

    Empty if all replications are the same run. `largest_group`: the most engines that a router chooses from.
    """
    arrivals = scenario.workload.arrivals
    thinking = isinstance(arrivals, ClosedLoopSpec) and bool(arrivals.think and arrivals.think_cv)
    routed = largest_group > 1 and draws(router_name(scenario.system.routing))
    drafted = any(pool.engine.speculative_config for pool in scenario.pools)
    parts = {"routing": routed, "think_times": thinking, "speculation": drafted}
    return tuple(dict.fromkeys((*workload.random, *(name for name, random in parts.items() if random))))
