"""Small documents of serving runs, written by hand."""

from __future__ import annotations

from typing import Any


def spread(mean: float) -> dict[str, float]:
    return {"mean": mean, "p50": mean * 0.9, "p90": mean * 1.5, "p95": mean * 1.75, "p99": mean * 2.5}


def simulation(**changes: Any) -> dict[str, Any]:
    """One run of 40 requests: TTFT 120 ms, TPOT 25 ms, ITL 26 ms and E2E 1.5 s in the mean, 812.6 tokens/s."""
    return {
        "schema": "twin.simulation/1",
        "name": "chats & judges",
        "note": "Simulated (discrete events, no hardware).",
        "settings": {},
        "step_time": {"source": "kernel_tables", "path": "h200.yaml"},
        "replications": 1,
        "draws": 0,
        "random": ["lengths", "arrivals"],
        "summary": {
            "requests": 40,
            "ttft": spread(0.12),
            "tpot": spread(0.025),
            "itl": spread(0.026),
            "e2e": spread(1.5),
            "output_throughput": 812.6,
            "prefill_tokens": 5120,
            "cached_tokens": 640,
            "preemptions": 3,
            "steps": 77,
            "busy": 0.625,
            "load": 0.25,
            "kv_used": 0.5,
        },
        "intervals": {},
        "engines": [{"name": "engine-0", "steps": 77, "busy": 0.625, "preemptions": 3}],
        "links": [],
        "outages": [],
        "outside": {},
        "series": {
            "quantiles": {
                "p": [0.0, 0.5, 1.0], "ttft": [0.05, 0.1, 0.3], "tpot": [0.02, 0.025, 0.03],
                "itl": [0.02, 0.026, 0.065], "e2e": [1.0, 1.4, 3.75],
            },
            "time": [0.0, 1.0, 2.0],
            "running": [0.0, 6.0, 2.0],
            "waiting": [0.0, 4.0, 0.0],
            "kv_used": [0.0, 0.75, 0.25],
        },
        "measured": None,
        "comparison": None,
        **changes,
    }  # fmt: skip


def replicated() -> dict[str, Any]:
    intervals = {
        "ttft.mean": {
            "confidence": [0.11, 0.13], "prediction": [0.09, 0.15], "parts": {"sampling": 0.051, "model": 0.12},
        },
        "output_throughput": {
            "confidence": [800.0, 825.2], "prediction": [780.0, 845.2], "parts": {"sampling": None, "model": 0.013},
        },
    }  # fmt: skip
    deviation = {"ttft.mean": 0.08, "tpot.mean": 0.03, "e2e.mean": 0.04, "output_throughput": 0.005}
    host = {"name": "overhead", "about": "host time", "basis": "assumed", "measure": "a step log"}
    return simulation(replications=4, draws=2, intervals=intervals, assumptions=[{**host, "deviation": deviation}])


def measured() -> dict[str, Any]:
    real = {
        "source": "rtx/requests.jsonl",
        "quantiles": {"p": [0.0, 1.0], "ttft": [0.06, 0.25], "tpot": [0.021, 0.029], "e2e": [1.1, 3.0]},
        "time": [0.0, 2.0],
        "running": [1.0, 2.0],
        "waiting": [0.0, 1.0],
    }
    comparison = {
        "ttft.mean": {"measured": 0.125, "predicted": 0.12, "error": -0.04},
        "output_throughput": {"measured": 800.0, "predicted": 812.6, "error": 0.01575},
    }
    return simulation(measured=real, comparison=comparison)


def sweep() -> dict[str, Any]:
    """Rates 2 and 4 under two orders; the last point answers nobody."""
    points = []
    for order, rate, tokens, mean in (
        ("fcfs", 2, 400.0, 0.02),
        ("fcfs", 4, 600.0, 0.025),
        ("priority", 2, 440.0, 0.016),
    ):
        point = simulation(settings={"workload.arrivals.rate": rate, "engine.scheduling_policy": order})
        point["summary"] |= {"output_throughput": tokens, "tpot": spread(mean)}
        del point["series"], point["measured"], point["comparison"]
        points.append(point)
    points[0]["intervals"] = {"ttft.mean": {"confidence": [0.1, 0.14], "prediction": [0.08, 0.16]}}
    empty = simulation(
        settings={"workload.arrivals.rate": 4, "engine.scheduling_policy": "priority"}, outside={"kv_tokens": 70000.0}
    )
    empty["summary"] |= {"requests": 0, "output_throughput": None} | dict.fromkeys(("ttft", "tpot", "itl", "e2e"))
    points.append(empty)
    return {"schema": "twin.serving-sweep/1", "name": "orders", "note": "Simulated.", "points": points}
