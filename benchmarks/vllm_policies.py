"""SPEAR's and Prelude's claims on a real vLLM on one CPU thread, beside the twin's prediction.

    python -m benchmarks.vllm_policies --steps runs/…/engine-steps.yaml [--claims spear,prelude] [--repeats 3]

The step times are those that `twin validate examples/validate-vllm-cpu.yaml` fitted to random requests. The same
requests are replayed on vLLM with and without a policy, in turns, and simulated. Prints a JSON document. Needs the
environment of docs/how-to/validate-vllm.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from live.vllm.environment import prepare_process
from scenarios.reading import read_scenario
from scenarios.validation import check_validation
from twin.serving.results.summary import pooled_gaps
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from twin.validation.recordings import Recording
from twin.validation.run import requests_of

EXAMPLE = Path(__file__).parent.parent / "examples" / "validate-vllm-cpu.yaml"

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=Path, required=True, help="engine-steps.yaml of a validation")
    parser.add_argument("--claims", default="spear,prelude")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    prepare_process()
    claims = {name: run_claim(name, given.steps, given.repeats) for name in given.claims.split(",")}
    print(json.dumps(provenance("twin.vllm-policies/1") | {"claims": claims}, indent=2))


if __name__ == "__main__":
    main()
