"""Hit rates and their bounds, loads, and TTFT, by capacity of host memory for KV blocks and by router.

    python -m benchmarks.kv_offloading [--trace mooncake_conversation.jsonl.gz] [--requests N]

Runs `examples/kv-offloading.yaml`, with `--trace` on its requests at their times in place of drawn sessions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from latency_models.io.config_io import read_yaml
from twin.serving.results.report import report_run
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "kv-offloading.yaml"

ROUTERS: dict[str, Any] = {
    "least_loaded": "least_loaded",
    "prefix_aware, weight 1": "prefix_aware",
    "prefix_aware, weight 4": {"policy": "prefix_aware", "weight": 4.0},
    "session_affinity": "session_affinity",
    "consistent_hashing": "consistent_hashing",
}

CAPACITIES = (0.0, 100e9, 400e9)
"""Bytes of host memory for one engine."""


def main() -> None:
    """Run all combinations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--replicas", type=int, default=4)
    options = parser.parse_args()
    print("| router | host memory | hit rate | LRU | Belady | infinite | loaded | P99 load | mean TTFT | P99 TTFT |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for router, routing in ROUTERS.items():
        if options.trace and router == "session_affinity":
            continue  # the trace names no sessions
        for capacity in CAPACITIES:
            print(row(router, capacity, simulate(options, routing, capacity)), flush=True)


def simulate(options: argparse.Namespace, routing: Any, capacity: float) -> dict[str, Any]:
    """The summary of one run."""
    document = read_yaml(EXAMPLE)
    document["system"] |= {"routing": routing, "replicas": options.replicas}
    if capacity:
        document["engine"]["kv_offloading"]["host"]["capacity"] = capacity
    else:
        document["engine"]["kv_offloading"] = None
    if options.trace:
        document["workload"] = {"trace": {"path": str(options.trace)}, "arrivals": {"process": "replay"}}
    if options.requests:
        document["workload"]["requests"] = options.requests
    plan = prepare(document, EXAMPLE).cases[0].plan
    summary: dict[str, Any] = report_run(Simulation(plan).run(), plan)["summary"]
    return summary


def row(router: str, capacity: float, summary: dict[str, Any]) -> str:
    """One line of the table."""
    cache, host, load = summary["prefix_cache"], summary.get("kv_tiers", {}).get("host"), summary.get("kv_load")
    bounds = cache.get("all", cache["device"])
    cells = [
        router,
        f"{capacity / 1e9:.0f} GB",
        *(f"{100 * share:.1f} %" for share in (cache["hit_rate"], bounds["lru"], bounds["belady"], cache["infinite"])),
        f"{100 * host['loaded_share']:.1f} %" if host else "",
        f"{1000 * load['p99']:.0f} ms" if load else "",
        f"{summary['ttft']['mean']:.2f} s",
        f"{summary['ttft']['p99']:.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
