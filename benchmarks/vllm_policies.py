"""SPEAR's and Prelude's claims on a real vLLM on one CPU thread, beside the twin's prediction.

    python -m benchmarks.vllm_policies --steps runs/…/engine-steps.yaml [--claims spear,prelude] [--repeats 3]

The step times are those that `twin validate examples/validate-vllm-cpu.yaml` fitted to random requests. The same
requests are replayed on vLLM with and without a policy, in turns, and simulated. Prints a JSON document. Needs the
environment of docs/how-to/validate-vllm.md, whose figure is drawn from a document:

    python -m benchmarks.vllm_policies --draw benchmarks/results/vllm_policies.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from live.vllm.settings import prepare_process
from scenarios.reading import read_scenario
from scenarios.validation import check_validation
from twin.serving.results.summary import pooled_gaps
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from twin.validation.backend import Recording
from twin.validation.run import requests_of

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "validate-vllm-cpu.yaml"
FIGURE = ROOT / "docs" / "figures" / "vllm-policies.svg"

SPEAR = {
    "workload.requests": 40,
    "workload.prefill": {"distribution": "lognormal", "mean": 160, "cv": 0.8},
}
PRELUDE = {
    "workload": {
        "requests": 60,
        "tasks": [
            {
                "task": "generate", "weight": 1,
                "prefill": {"distribution": "lognormal", "mean": 64, "cv": 0.8},
                "decode": {"distribution": "geometric", "mean": 48},
            },
            {"task": "score", "weight": 2, "prefill": {"distribution": "lognormal", "mean": 64, "cv": 0.5}},
        ],
        "arrivals": {"process": "poisson"},
    },
    "engine.max_num_seqs": 4,
}  # fmt: skip

CLAIMS: dict[str, tuple[dict[str, Any], float, dict[str, dict[str, Any]]]] = {
    "spear": (SPEAR, 3.0, {"vLLM": {}, "ITL goal 60 ms": {"engine.chunking": {"policy": "slo", "slo_seconds": 0.06}}}),
    "prelude": (PRELUDE, 12.0, {"vLLM": {}, "own lane": {"engine.one_shot": {"tokens": 192, "sequences": 4}}}),
}
"""Of each claim: fields of the scenario, requests per second, and the fields of each variant."""

PANELS = [
    ("spear", ("itl_p99", "P99 of ITL, ms", 1e3)),
    ("spear", ("tokens_per_second", "tokens/s", 1.0)),
    ("prelude", ("one_shots_per_second", "one-shot requests/s", 1.0)),
    ("prelude", ("one_shot_latency", "one-shot latency, ms", 1e3)),
]
"""Panels of the figure: claim, measure, title, factor."""


def measures(columns: Mapping[str, Any], gaps: Any, weights: Any) -> dict[str, float]:
    """Latencies, seconds, and throughputs, of requests with answers and of one-shot requests.

    Args:
        gaps, weights: inter-token latencies, and the number of tokens of each.
    """
    arrival, first, last, tokens = (
        np.asarray(columns[name], dtype=float) for name in ("arrival", "first_token", "last_token", "output_tokens")
    )
    one_shot = tokens == 0
    chats = tokens > 1
    order = np.argsort(gaps)
    share = np.cumsum(np.asarray(weights)[order]) / np.sum(weights)
    result = {
        "itl_p50": float(np.asarray(gaps)[order][np.searchsorted(share, 0.5)]),
        "itl_p99": float(np.asarray(gaps)[order][np.searchsorted(share, 0.99)]),
        "ttft": float(np.mean((first - arrival)[~one_shot])),
        "tpot": float(np.mean((last - first)[chats] / (tokens[chats] - 1))),
        "tokens_per_second": float(tokens.sum() / (last.max() - arrival.min())),
    }
    if one_shot.any():
        result["one_shot_latency"] = float(np.mean((first - arrival)[one_shot]))
        result["one_shots_per_second"] = float(one_shot.sum() / (first[one_shot].max() - arrival[one_shot].min()))
    return result


def run_claim(name: str, steps: Path, repeats: int) -> dict[str, Any]:
    """Replay and predict every variant of a claim in each repeat."""
    from live.vllm.backend import VllmBackend

    fields, rate, variants = CLAIMS[name]
    document = read_scenario(EXAMPLE, "validation")
    base = EXAMPLE.parent
    backends, plans = {}, {}
    for variant, changes in variants.items():
        settings = {**fields, **changes, "profiling.in_turns": False}
        scenario = check_validation(document, settings, EXAMPLE).on_device("cpu")
        backends[variant] = VllmBackend(scenario, base)
        plans[variant] = prepare(scenario.serving(steps, rate, {}), base / "scenario").cases[0].plan
    result: dict[str, Any] = {variant: {"measured": [], "predicted": []} for variant in variants}
    for repeat in range(repeats):
        for variant, plan in plans.items():
            run = Simulation(plan, repeat).run()
            gaps = pooled_gaps(run.logs, plan.scenario.measure)
            result[variant]["predicted"].append(measures(vars_of(run.columns), *gaps))
        for variant, plan in plans.items():
            replayed = backends[variant].replay(plan.scheduler, requests_of(plan, repeat))
            columns = Recording.of(replayed, plan.scheduler.config.block_size).columns()
            result[variant]["measured"].append(measures(columns, columns["gaps"], np.ones(len(columns["gaps"]))))
    return {"rate": rate, "fields": fields, "variants": {v: {"fields": variants[v], **result[v]} for v in variants}}


def vars_of(columns: Any) -> dict[str, Any]:
    """The columns of a simulated run that `measures` reads."""
    return {name: getattr(columns, name) for name in ("arrival", "first_token", "last_token", "output_tokens")}


def draw(claims: Mapping[str, Any]) -> None:
    """Draw bars of what was measured, with the range of repeats, and a mark for what was predicted."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vllm-policies"
    from matplotlib import pyplot

    panels = [(claims[name]["variants"], *panel) for name, panel in PANELS]
    figure, rows = pyplot.subplots(1, len(panels), figsize=(2.4 * len(panels), 3.2), layout="constrained")
    for axes, (variants, key, title, factor) in zip(rows, panels, strict=True):
        for place, variant in enumerate(variants.values()):
            measured, predicted = (
                factor * np.array([row[key] for row in variant[kind]]) for kind in ("measured", "predicted")
            )
            spread = [[measured.mean() - measured.min()], [measured.max() - measured.mean()]]
            axes.bar(place, measured.mean(), width=0.6, yerr=spread, capsize=4, color=f"C{place}", label="vLLM")
            axes.plot(place, predicted.mean(), "k_", markersize=28, markeredgewidth=2, label="twin")
        axes.set_xticks(range(len(variants)), list(variants))
        axes.set_title(title, fontsize=9)
    figure.savefig(FIGURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, help="engine-steps.yaml of a validation")
    parser.add_argument("--draw", type=Path, help="draw this document")
    parser.add_argument("--claims", default="spear,prelude")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if given.draw:
        return draw(json.loads(given.draw.read_text())["claims"])
    if given.steps is None:
        parser.error("expected --steps or --draw")
    prepare_process()
    claims = {name: run_claim(name, given.steps, given.repeats) for name in given.claims.split(",")}
    print(json.dumps(provenance("twin.vllm-policies/1") | {"claims": claims}, indent=1))


if __name__ == "__main__":
    main()
