"""The cliff of the prefix cache: coding agents on Kimi-K2.5, predicted beside twenty measured half hours.

    python -m benchmarks.agents --trace requests.csv.xz --measured kimi_k25_mi355x.csv [--replications 3] [--write]

Runs `examples/agents-kimi-k2.5-mi355x.yaml` with 1 to 64 agents, without and with host memory for KV blocks. Two
numbers are fitted, to the one point named by `FITTED`: a factor on the device's data-sheet rates (to the mean ITL), and
the seconds of a request before the engine may take it (to the mean TTFT). Pauses of at most 12 s are those of the
measured clients (agents × seconds / requests − mean E2E). Which sessions they played, and from where, is not known.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.provenance import provenance
from latency_models.io.config_io import read_yaml
from twin.serving.results.report import report_run
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "agents-kimi-k2.5-mi355x.yaml"
HARDWARE = ROOT / "latency_models" / "data" / "hardware" / "mi355x.yaml"
RESULT = ROOT / "benchmarks" / "results" / "agents.json"

FITTED = ("none", 8)
"""The measured point to which step times and the front end are fitted: offloading and agents."""

HOST = {"bytes_per_token": 70272, "host": {"capacity": 2e12, "bandwidth": 50e9, "latency": 50e-6}}
"""Host memory for KV blocks; its size and PCIe's rate are assumed. Latents of 61 layers take 70,272 bytes a token."""

SECONDS = 1800.0


class Agents:
    """The example with a number of agents, at given step times."""

    def __init__(self, trace: Path, folder: Path, replications: int) -> None:
        self._trace = trace
        self._folder = folder
        self._replications = replications

    def mean(self, offloading: str, agents: int, slowdown: float, route: float) -> dict[str, float]:
        """Means over replications of: requests (finished in half an hour), ttft, itl, e2e (s), prompt, hits, loaded."""
        runs = [self._run(offloading, agents, slowdown, route, seed) for seed in range(1, self._replications + 1)]
        return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}

    def _run(self, offloading: str, agents: int, slowdown: float, route: float, seed: int) -> dict[str, float]:
        document = read_yaml(EXAMPLE)
        document["seed"] = seed
        document["workload"]["trace"]["path"] = str(self._trace)
        document["workload"]["arrivals"]["concurrency"] = agents
        document["step_time"]["hardware"] = str(self._hardware(slowdown))
        document["system"] = {"frontend": {"route": route}}
        if offloading != "none":
            document["engine"]["kv_offloading"] = HOST
        plan = prepare(document, EXAMPLE).cases[0].plan
        run = Simulation(plan).run()
        table, summary = run.request_table(), report_run(run, plan)["summary"]
        done = table["last_token"] <= SECONDS
        ttft, e2e = (table[name][done] - table["arrival"][done] for name in ("first_token", "last_token"))
        tokens, prompts = table["output_tokens"][done], table["prompt_tokens"][done]
        tiers = summary.get("kv_tiers", {}).get("host")
        loaded = tiers["loaded_share"] if tiers else 0.0
        return {
            "requests": float(done.sum()),
            "ttft": float(ttft.mean()),
            "itl": float((e2e - ttft).sum() / (tokens - 1).sum()),
            "e2e": float(e2e.mean()),
            "prompt": float(prompts.mean()),
            "hits": float(table["cached_tokens"][done].sum() / prompts.sum()) - loaded,
            "loaded": loaded,
        }

    def _hardware(self, slowdown: float) -> Path:
        """The data sheet with all rates divided by `slowdown`."""
        path = self._folder / f"mi355x-{slowdown:.4f}.yaml"
        if not path.exists():
            sheet = read_yaml(HARDWARE)
            for name in ("peak_flops", "network"):
                sheet[name] = {key: float(rate) / slowdown for key, rate in sheet[name].items()}
            sheet["memory_bandwidth"] = float(sheet["memory_bandwidth"]) / slowdown
            path.write_text(yaml.safe_dump(sheet))
        return path


def fit(agents: Agents, measured: dict[str, float]) -> tuple[float, float]:
    """The slowdown at which the mean ITL of the fitted point is met, and then the seconds of the front end."""
    low, high, route = 1.0, 4.0, 0.0
    for _ in range(3):  # the front end's seconds change how many agents are in the engine, and so the ITL
        for _ in range(6):
            middle = (low * high) ** 0.5
            slower = agents.mean(*FITTED, middle, route)["itl"] < measured["itl"]
            low, high = (middle, high) if slower else (low, middle)
        slowdown = (low * high) ** 0.5
        route = max(route + measured["ttft"] - agents.mean(*FITTED, slowdown, route)["ttft"], 0.0)
        low, high = slowdown / 1.2, slowdown * 1.2
    return slowdown, route


def read_measured(path: Path) -> dict[tuple[str, int], dict[str, float]]:
    """The measured points by offloading and number of agents."""
    names = {
        "requests": "requests", "ttft": "ttft_mean_s", "itl": "itl_mean_s", "e2e": "e2e_mean_s",
        "prompt": "input_tokens_mean", "hits": "server_gpu_cache_hit_rate",
    }  # fmt: skip
    with path.open() as file:
        rows = list(csv.DictReader(file))
    points = {}
    for row in rows:
        point = {name: float(row[column]) for name, column in names.items()}
        point["requests"] *= SECONDS / float(row["duration_s"])
        points[row["offloading"], int(row["conc"])] = point
    return points


def main() -> None:
    """Fit, predict all points, print a table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--replications", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    measured = read_measured(options.measured)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        agents = Agents(options.trace.resolve(), Path(folder), options.replications)
        slowdown, route = fit(agents, measured[FITTED])
        print(
            f"fitted to {FITTED[1]} agents, offloading {FITTED[0]}: rates / {slowdown:.2f}, front end {route:.2f} s\n"
        )
        print("| offloading | agents | requests: measured, simulated | error | hit rate | loaded | TTFT, s | ITL, ms |")
        print("|---|---|---|---|---|---|---|---|")
        for (offloading, count), point in measured.items():
            simulated = agents.mean(offloading, count, slowdown, route)
            rows.append({"offloading": offloading, "agents": count, "measured": point, "simulated": simulated})
            print(line(rows[-1]), flush=True)
    errors = [row["simulated"]["requests"] / row["measured"]["requests"] - 1 for row in rows]
    within = sum(abs(error) <= 0.2 for error in errors)
    print(f"\nrequests within 20 %: {within} of {len(rows)}; median error {100 * np.median(np.abs(errors)):.0f} %")
    if options.write:
        head = provenance("benchmarks.agents/1")
        fitted = {"point": FITTED, "slowdown": slowdown, "route": route, "replications": options.replications}
        RESULT.write_text(json.dumps(head | {"fitted": fitted, "points": rows}, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    real, twin = row["measured"], row["simulated"]
    cells = [
        row["offloading"],
        str(row["agents"]),
        f"{real['requests']:.0f}, {twin['requests']:.0f}",
        f"{100 * (twin['requests'] / real['requests'] - 1):+.0f} %",
        f"{real['hits']:.2f}, {twin['hits']:.2f}",
        f"{twin['loaded']:.2f}",
        f"{real['ttft']:.1f}, {twin['ttft']:.1f}",
        f"{1000 * real['itl']:.0f}, {1000 * twin['itl']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
