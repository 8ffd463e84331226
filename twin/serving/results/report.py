"""The report of a run, and the document `twin.simulation/1` of a plan that was run once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reports.records.run_directory import fingerprint
from scenarios.overrides import Settings
from scenarios.reading import plugin_digest
from twin.serving.plan.plan import ServingPlan, describe
from twin.serving.plan.pools import cost_per_million_tokens, describe_devices
from twin.serving.results.client_summary import summarise_clients, summarise_pools
from twin.serving.results.energy import energy_summary
from twin.serving.results.summary import engine_summaries, link_summaries, outages, overload, summarise
from twin.serving.run.simulation import Run

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
    cost = cost_per_million_tokens(devices, throughput)
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
