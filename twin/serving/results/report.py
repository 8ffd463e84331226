"""The report of a run with its energy, and the document `twin.simulation/1` of a plan that was run once.

Energy follows from the power limits of the devices and the tokens that a step computes: in a step a device draws a
share of its limit that grows with each doubling of the step's tokens. Its two points are an H100 SXM of 700 W that
decodes: 300 W with one sequence and 600 W with 128 (ML.ENERGY Benchmark v3.0), and what it draws with more. Between
steps it draws its idle power. `python -m benchmarks.power` compares it with measured engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

from reports.run_directory import fingerprint
from scenarios.engine import DeviceSpec
from scenarios.reading import Settings, plugin_digest
from twin.serving.plan.plan import ServingPlan, describe
from twin.serving.plan.pools import cost_per_million_tokens, describe_devices, devices_of
from twin.serving.results.client_summary import summarise_clients, summarise_pools
from twin.serving.results.run import Run
from twin.serving.results.summary import engine_summaries, link_summaries, outages, overload, summarise

ONE_TOKEN = 300 / 700
MANY_TOKENS, MANY = 600 / 700, 128

IDLE = 0.15
"""Share of the limit that a device with loaded weights draws between steps, where its own is not stated."""

ERROR = 0.12
"""Median relative error of the power of 565 measured engines on H100 and B200 (docs/accuracy.md)."""


def step_share(tokens: float) -> float:
    """The share of its power limit that a device draws in steps of so many tokens."""
    return ONE_TOKEN + (MANY_TOKENS - ONE_TOKEN) * log2(min(max(tokens, 1.0), MANY)) / log2(MANY)


def idle_watts(device: DeviceSpec) -> float:
    """What one device draws between steps."""
    assert device.power_limit is not None, "its power limit is stated"
    return IDLE * device.power_limit if device.idle_power is None else device.idle_power


def energy_summary(run: Run, plan: ServingPlan) -> dict[str, Any] | None:
    """The energy of all devices while they are paid for; None where a pool's devices have no power limit."""
    joules = 0.0
    engines = {engine.name: (engine, log) for engine, log in zip(run.engines, run.logs, strict=True)}
    for pool in plan.pools:
        device = devices_of(pool)
        if device is None or device.power_limit is None:
            return None
        for name in pool.names:
            engine, log = engines[name]
            decoded = sum(int(decodes @ repeats) for _, decodes, repeats in log.step_parts(1 << 20))
            tokens = engine.counters.prefill_tokens + decoded
            watts = device.power_limit * step_share(tokens / log.num_steps) if log.num_steps else 0.0
            idle = max(run.engine_seconds(name) - log.busy, 0.0)
            joules += device.count / pool.spec.engines_per_device * (log.busy * watts + idle * idle_watts(device))
    output_tokens = sum(run.columns.output_tokens)
    return {
        "kwh": joules / 3.6e6,
        "mean_kw": joules / run.end / 1e3 if run.end else None,
        "joules_per_output_token": joules / output_tokens if output_tokens else None,
        "error": ERROR,
    }


Document = dict[str, Any]

SCHEMA = "twin.simulation/1"
NOTE = "Simulated (discrete events, no hardware)."


def report_run(run: Run, plan: ServingPlan) -> Document:
    """The report of a run, which is kept without its records."""
    summary = summarise(run, plan.scenario.measure)
    if run.columns.clients:
        summary |= summarise_clients(run, plan)
    if len(plan.pools) > 1:
        summary |= summarise_pools(run, plan, summary["duration"])
    devices, throughput = describe_devices(plan.pools), summary["output_throughput"]
    scaled: Document = {}
    if run.scaling is not None:
        from twin.serving.results.scaling_summary import mean_devices, scaling_document, scaling_summary

        devices = mean_devices(run, plan.pools)
        summary["autoscaling"] = scaling_summary(run, plan)
        scaled = {"autoscaling": scaling_document(run, plan)}
    if plan.scenario.failures:
        from twin.serving.results.scaling_summary import around_outages

        summary["outages"] = around_outages(run, plan.scenario.measure)
    energy = energy_summary(run, plan)
    if energy is not None:
        summary["energy"] = energy
    cost = None if devices is None else cost_per_million_tokens(devices, throughput)
    if devices is not None and throughput is not None:
        summary |= {"output_throughput_per_device": throughput / devices["total"]}
    return {
        "summary": summary if cost is None else summary | {"cost_per_million_output_tokens": cost},
        "engines": engine_summaries(run),
        "links": link_summaries(run),
        "outages": outages(run),
        "overload": overload(run, plan),
        "outside": run.outside,
        **scaled,
    }


def run_document(plan: ServingPlan, settings: Settings, report: Document) -> Document:
    """The document of a plan that was run once. `settings`: fields changed in its scenario."""
    return {
        "schema": SCHEMA,
        "name": plan.scenario.name,
        "simulated": True,
        "note": NOTE,
        "settings": settings,
        **describe(plan),
        "replications": 1,
        "draws": 0,
        "summary": report["summary"],
        "intervals": {},
        "assumptions": [],
        "engines": report["engines"],
        "links": report["links"],
        "outages": report["outages"],
        "outside": report["outside"],
        "saturated": report["overload"] is not None,
        "overload": report["overload"],
        **({"autoscaling": report["autoscaling"]} if "autoscaling" in report else {}),
    }


def run_inputs(plans: Sequence[ServingPlan], replications: int, draws: int | None) -> Document:
    """The entries of the manifest of runs."""
    return {
        "scenarios": [plan.scenario.model_dump(mode="json", by_alias=True) for plan in plans],
        "replications": replications,
        "draws": draws,
        "seed": plans[0].scenario.seed,
        "step_time": [plan.scenario.step_time.provenance() for plan in plans],
        "trace": plans[0].trace_name,
    }


def run_fingerprint(
    plans: Sequence[ServingPlan], version: str, replications: int, draws: int | None, *more: object
) -> str:
    """A digest of `version` and of everything that the results of runs depend on."""
    identity = [
        [
            plan.scenario.model_dump(mode="json"),
            str(plan.base),
            plan.trace_digest,
            plugin_digest(plan.scenario.plugins, plan.base),
        ]
        for plan in plans
    ]
    return fingerprint([version, identity, replications, draws, *more])
