"""Small serving scenarios for tests, and a run of one."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from twin.serving.plan.plan import ServingPlan
from twin.serving.results.report import report_run, timeseries
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation, realisation
from twin.sweeps.serving_sweep import prepare

PLAIN: dict[str, Any] = {
    "schema": "twin.scenario/1",
    "kind": "serving",
    "name": "plain",
    "workload": {
        "requests": 60,
        "prefill": {"distribution": "uniform", "low": 1, "high": 90},
        "decode": {"distribution": "geometric", "mean": 20},
        "arrivals": {"process": "poisson", "rate": 40},
    },
    "engine": {"num_gpu_blocks": 400, "max_num_batched_tokens": 64, "max_num_seqs": 16},
    "step_time": {"source": "linear", "overhead": 0.004, "per_token": 2e-5, "per_kv_token": 1e-6},
}


def scenario(**sections: Any) -> dict[str, Any]:
    """`PLAIN` with sections changed: dictionaries are merged, anything else replaces."""
    document = deepcopy(PLAIN)  # tests change the parts of their documents
    for name, value in sections.items():
        old = document.get(name)
        document[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return document


def _fleet(
    replicas: int, models: int, routing: str, arrivals: dict[str, Any], fixed: bool, asynchronous: bool, caching: bool,
    fast_forward: bool, limit: int | None, blocks: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    uniform = [{"distribution": "uniform", "low": 1, "high": high} for high in (90, 60)]
    prefill, decode = [{"distribution": "fixed", "mean": mean} for mean in (48, 16)] if fixed else uniform
    return scenario(
        seed=seed, fast_forward=fast_forward, system={"layout": "colocated", "replicas": replicas, "routing": routing},
        workload={
            "prefill": prefill, "decode": decode, "arrivals": arrivals, "max_tokens": limit,
            "models": {"count": models, "zipf": 1.0}, "prefixes": {"groups": 3, "tokens": 40, "cache_suffix": True},
        },
        engine={"num_gpu_blocks": blocks, "async_scheduling": asynchronous, "enable_prefix_caching": caching},
    )  # fmt: skip


def fleets(models: list[int], caching: list[bool]) -> st.SearchStrategy[dict[str, Any]]:
    """Scenarios of several engines whose router looks at loads or at nothing."""
    rates = [{"process": "poisson", "rate": rate} for rate in (20.0, 100.0, 900.0)]
    return st.builds(
        _fleet, replicas=st.sampled_from([2, 3, 8]), models=st.sampled_from(models),
        routing=st.sampled_from(["least_loaded", "round_robin"]), caching=st.sampled_from(caching),
        arrivals=st.sampled_from([*rates, {"process": "deterministic", "rate": 62.5}]), fixed=st.booleans(),
        asynchronous=st.booleans(), fast_forward=st.booleans(), limit=st.sampled_from([None, 12, 200]),
        blocks=st.sampled_from([20, 400]), seed=st.integers(0, 10**6),
    )  # fmt: skip


def plan_for(document: dict[str, Any], *settings: dict[str, Any]) -> ServingPlan:
    """The plan of a scenario that stands in no file, with changed fields."""
    return prepare(document, Path("scenario.yaml"), settings or ({},)).cases[0].plan


def run(document: dict[str, Any], replication: int = 0) -> Run:
    """Simulate once."""
    plan = plan_for(document)
    return Simulation(plan, replication).run()


def reported(result: Run, document: dict[str, Any]) -> dict[str, Any]:
    """The parts of a document that come from a run: summary, engines, links, and the series."""
    plan = plan_for(document)
    return report_run(result, plan) | {"series": timeseries(result, plan.scenario.measure)}


def answers(document: dict[str, Any]) -> list[int]:
    """The length of each answer of the workload, within its limit."""
    plan = plan_for(document)
    return [min(answer, request.max_tokens) for request, answer in realisation(plan, 0)]


def records(result: Run) -> dict[str, Any]:
    """Everything that a run recorded, to the last bit, except how often it was woken."""
    columns = {name: values.tolist() for name, values in result.columns.table().items()}
    order = sorted(range(len(columns["id"])), key=lambda i: columns["id"][i])
    outcome: dict[str, Any] = {name: [values[i] for i in order] for name, values in columns.items()}
    for log in result.logs:
        decodes = [n for n, count in zip(log.decodes, log.repeats, strict=True) for _ in range(count)]
        outcome[log.name] = (log.ends.tolist(), decodes, sorted(log.odd_gaps))
    outcome["population"] = result.population
    return outcome


def _shed(result: Run) -> object:
    """What is kept of requests that were shed; a compiled class has no `__dict__`."""
    log = result.shed
    return log and (log.arrival, log.ended, log.client, log.clients, log.retries, log.reasons)


def run_both_ways(document: dict[str, Any]) -> tuple[Run, Run]:
    """Simulate with and without fast-forwarding; records, shedding, scaling and documents are equal to the last bit."""
    fast, slow = (run({**document, "fast_forward": mode}) for mode in (True, False))
    assert records(fast) == records(slow)
    assert _shed(fast) == _shed(slow)
    assert [log.changes for log in fast.scaling or ()] == [log.changes for log in slow.scaling or ()]
    assert reported(fast, document) == reported(slow, document)
    return fast, slow


def check_answers(result: Run) -> None:
    """Check that every request has ended once, its times in order, and that no engine has load left."""
    columns = records(result)
    assert columns["id"] == list(range(len(columns["id"])))
    for arrival, first, last in zip(columns["arrival"], columns["first_token"], columns["last_token"], strict=True):
        assert arrival < first <= last
    assert all(engine.load == 0 and engine.is_idle for engine in result.engines)
