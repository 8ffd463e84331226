"""An autoscaled fleet, live or simulated: the share of goals that it met, and the engine-seconds that it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.serving import ServingScenario
from schedulers.replica_set import ScalingLog
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.scaling_summary import MISSED
from twin.serving.results.summary import summarise
from twin.serving.run.simulation import Run

Floats = NDArray[np.float64]


def fleet_summary(columns: Mapping[str, Floats], log: ScalingLog | None, scenario: ServingScenario) -> dict[str, Any]:
    """The section `fleet` of a run's summary; nothing without autoscaling.

    `goals_met`: share of the requests that meet all goals. `periods_met`: share of the times between two decisions in
    which at most 1 % of the requests that arrive miss one.
    """
    if log is None or scenario.system.autoscaling is None:
        return {}
    arrival, first, last = columns["arrival"], columns["first_token"], columns["last_token"]
    gaps = np.maximum(columns["output_tokens"] - 1, 1)
    values = {"ttft": first - arrival, "tpot": (last - first) / gaps, "e2e": last - arrival}
    good = np.all([values[name] <= limit for name, limit in scenario.measure.slo.items()], axis=0)
    periods = (arrival // scenario.system.autoscaling["engine"].sync_period).astype(np.int64)
    requests, wrong = np.bincount(periods), np.bincount(periods, ~good)
    return {
        "fleet": {
            "goals_met": float(good.mean()),
            "periods_met": float((wrong <= MISSED * requests)[requests > 0].mean()),
            "engine_seconds": sum(log.engine_seconds(float(last.max())).values()),
            "started": log.started,
        }
    }


def simulated_summary(plan: ServingPlan, run: Run) -> dict[str, Any]:
    """The summary of a simulated run, and of its fleet."""
    names = ("arrival", "first_token", "last_token", "output_tokens")
    columns = {name: np.asarray(getattr(run.columns, name), dtype=np.float64) for name in names}
    (log,) = run.scaling or (None,)
    return summarise(run, plan.scenario.measure) | fleet_summary(columns, log, plan.scenario)
