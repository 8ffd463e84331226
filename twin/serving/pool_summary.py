"""The summary of a run by pool, where routers choose among engines of several."""

from __future__ import annotations

from typing import Any

import numpy as np

from reports.metrics import PERCENTILES, spread
from twin.serving.devices import cost_per_million_tokens, describe_devices
from twin.serving.plan import ServingPlan
from twin.serving.simulation import Run
from twin.serving.summary import LATENCIES, Floats, in_measured_window, request_latency


def summarise_pools(run: Run, plan: ServingPlan, seconds: float) -> dict[str, Any]:
    """Requests, latencies, throughput over `seconds`, work and cost of each pool whose engines finish requests.

    Empty with one such pool, and without detail, where records do not say which engine finished a request.
    """
    pools = [pool for pool in plan.pools if pool.spec.role != "prefill"]
    columns, measure = run.columns, plan.scenario.measure
    if len(pools) < 2 or not columns.detail:
        return {}
    latencies = {name: request_latency(name, columns, measure) for name in LATENCIES}
    counted = in_measured_window(columns, measure)
    replica = np.array(columns.replica, dtype=np.int64)
    output = np.array(columns.output_tokens, dtype=np.int64)
    busy = {log.name: log.busy / run.end if run.end else 0.0 for log in run.logs}
    nothing = dict.fromkeys(("mean", *(f"p{point}" for point in PERCENTILES)))
    found: dict[str, Any] = {}
    for pool in pools:
        names = pool.names
        here = counted & np.isin(replica, [columns.replicas[name] for name in names if name in columns.replicas])
        throughput = float(output[here].sum()) / seconds if seconds else None
        devices = describe_devices([pool]) if run.scaling is None else None
        found[pool.spec.name] = {
            "engines": len(names),
            "requests": int(here.sum()),
            "share": float(here.sum() / counted.sum()) if counted.any() else None,
            **{name: spread(_known(values[here])) or nothing for name, values in latencies.items()},
            "output_throughput": throughput,
            "busy": sum(busy.get(name, 0.0) for name in names) / len(names),
            "cost_per_hour": devices and devices["cost_per_hour"],
            "cost_per_million_output_tokens": cost_per_million_tokens(devices, throughput),
        }
    return {"pools": found}


def _known(values: Floats) -> Floats:
    """The values that are not NaN: an answer of one token has no TPOT."""
    return values[~np.isnan(values)]
