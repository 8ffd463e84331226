"""Speed of the simulation compared with other simulators, on the same requests, in turns on one machine.

    python -m benchmarks.peers [--python PATH …] [--repeat 3] [--million] [--out FILE]

The workload is that of `benchmarks.serving_speed`: Poisson 5/s, 512 tokens in and 256 out, one engine. Each peer is
run by the first interpreter that has it installed (`--python`, which may be repeated; else this one), in a process of
its own. Nothing is installed, and a peer that is absent or fails is named with the reason.

Two times are taken of each: the whole process, start-up included, and the simulation alone inside it; both as elapsed
seconds and as CPU seconds, which other programs on the machine disturb less. A ratio is the median of the ratios of
each turn; below 1, ours is faster. `mean_itl` shows how close the step times are, hence how close the work is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import serving_speed
from benchmarks.provenance import provenance
from benchmarks.serving_speed import children_cpu

PROGRAMS = Path(__file__).parent / "peer_programs"

SIZES = (10_000, 100_000)
"""Numbers of requests."""

LIMIT = 900
"""Seconds that a peer's process may take."""


@dataclass(frozen=True)
class Peer:
    """Another simulator.

    Attributes:
        name: as printed. program: the file in `peer_programs` that runs it.
        module: the top-level module that it needs, to say that it is absent.
        most: the most requests that it is run with, None for any; a number where more would take many minutes.
        what: what its program does, where that is not a simulation of all requests.
    """

    name: str
    program: str
    module: str
    most: int | None = None
    what: str = "simulates the requests"


PEERS = (
    Peer("DynoSim", "dynosim.py", "dynamo"),
    Peer("Vidur", "vidur_loop.py", "vidur", most=10_000),
    Peer("AIConfigurator", "aiconfigurator_estimate.py", "aiconfigurator", most=10_000,
         what="one closed-form estimate of a fixed batch; no requests are simulated"),
)  # fmt: skip


def workload(requests: int) -> dict[str, Any]:
    """The workload and engine as the peers' programs read them."""
    scenario = serving_speed.SCENARIO
    engine = scenario["engine"]
    prompt, answer = (scenario["workload"][part]["mean"] for part in ("prefill", "decode"))
    rate = scenario["workload"]["arrivals"]["rate"]
    times = scenario["step_time"]
    return {
        "requests": requests,
        "prompt": prompt,
        "answer": answer,
        "rate": rate,
        "block_size": 16,  # the default of `engine.block_size`
        **{name: engine[name] for name in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens")},
        "step_time": {name: times[name] for name in ("overhead", "per_token", "per_kv_token")},
    }


def run_peer(peer: Peer, interpreter: str, work: Mapping[str, Any]) -> dict[str, Any]:
    """Run a peer once: what its program prints, with the seconds of the whole process as `process`.

    Returns:
        `absent` with the reason in place of times where the package is not there, `error` where the program fails.
    """
    line = [interpreter, str(PROGRAMS / peer.program), json.dumps(work)]
    start, cpu = time.perf_counter(), children_cpu()
    try:
        process = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT, cwd=PROGRAMS)
    except OSError as error:
        return {"absent": f"{interpreter}: {error.strerror}"}
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {LIMIT} s"}
    seconds, cpu = time.perf_counter() - start, children_cpu() - cpu
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        missing = "ModuleNotFoundError" in last and f"'{peer.module}" in last
        return {"absent" if missing else "error": last}
    result: dict[str, Any] = json.loads(process.stdout.strip().splitlines()[-1])
    return {**result, "process": seconds, "process_cpu": cpu}


def find(interpreters: list[str]) -> tuple[dict[Peer, str], list[dict[str, str]]]:
    """The peers that run, each with its interpreter; and the others, each with the reason."""
    homes: dict[Peer, str] = {}
    missing = []
    small = {**workload(20), "concurrent": 2}
    for peer in PEERS:
        reasons = []
        for interpreter in interpreters:
            result = run_peer(peer, interpreter, small)
            if "seconds" in result:
                homes[peer] = interpreter
                break
            reasons.append(f"fails: {result['error']}" if "error" in result else f"absent: {result['absent']}")
        else:  # a failure says more than the absence elsewhere
            missing.append({"peer": peer.name, "reason": next((r for r in reasons if r.startswith("f")), reasons[0])})
    return homes, missing


def compare(requests: int, interpreters: Mapping[Peer, str], repeat: int) -> list[dict[str, Any]]:
    """Time ours and the peers in turns; a row for each, ours first."""
    peers = [peer for peer in interpreters if peer.most is None or requests <= peer.most]
    ours: list[dict[str, Any]] = []
    peer_runs: dict[Peer, list[dict[str, Any]]] = {peer: [] for peer in peers}
    for turn in range(repeat):
        print(f"\r{requests} requests: turn {turn + 1} of {repeat} ", end="", file=sys.stderr, flush=True)
        loop, command = serving_speed.loop(requests, 1), serving_speed.command(requests, 1)
        ours.append({**loop, "process": command.seconds, "process_cpu": command.cpu})
        # Little's law: requests under way = rate × time in the system, most of which is decoding.
        concurrent = round(workload(requests)["rate"] * loop["mean_itl"] * workload(requests)["answer"])
        for peer in peers:
            peer_runs[peer].append(run_peer(peer, interpreters[peer], {**workload(requests), "concurrent": concurrent}))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    rows = [{"simulator": "twin", "requests": requests, "version": twin_version(), **medians(ours)}]
    for peer, results in peer_runs.items():
        row: dict[str, Any] = {"simulator": peer.name, "requests": requests, "what": peer.what}
        failed = [result["error"] for result in results if "error" in result]
        if failed:
            rows.append({**row, "error": failed[0]})
            continue
        row |= {"version": results[0]["version"], **medians(results)}
        row["ratios"] = {
            "process_to_process": ratio(ours, "process", results, "process"),
            "process_to_call": ratio(ours, "process", results, "seconds"),
            "call_to_call": ratio(ours, "seconds", results, "seconds"),
        }
        row["cpu_ratios"] = {
            "process_to_process": ratio(ours, "process_cpu", results, "process_cpu"),
            "process_to_call": ratio(ours, "process_cpu", results, "cpu"),
            "call_to_call": ratio(ours, "cpu", results, "cpu"),
        }
        rows.append(row)
    return rows


def medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median seconds of the process and of the simulation in it, and what was simulated."""
    names = {"process": "process", "process_cpu": "process_cpu", "call": "seconds", "call_cpu": "cpu"}
    return {
        **{name: statistics.median(result[key] for result in results) for name, key in names.items()},
        "mean_itl": results[0].get("mean_itl"),
        "simulated_seconds": results[0].get("simulated_seconds"),
    }


def ratio(ours: list[dict[str, Any]], of: str, peer_runs: list[dict[str, Any]], to: str) -> float:
    """The median over the turns of one of our times divided by one of a peer's."""
    return statistics.median(a[of] / b[to] for a, b in zip(ours, peer_runs, strict=True))


def twin_version() -> str:
    """The output of `twin --version`: the version, and whether the hot modules run compiled."""
    line = [sys.executable, "-m", "twin", "--version"]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    head = f"{row['requests']:>8} requests, {row['simulator']:<15}"
    if "error" in row:
        print(f"{head} fails: {row['error']}")
        return
    token = f", mean ITL {1e3 * row['mean_itl']:.1f} ms" if row["mean_itl"] is not None else ""
    print(f"{head} process {row['process']:.2f} s (CPU {row['process_cpu']:.2f}), "
          f"simulation {row['call']:.2f} s (CPU {row['call_cpu']:.2f}){token}; {row['version']}")  # fmt: skip
    if "ratios" in row:
        for name, by in (("elapsed", row["ratios"]), ("CPU", row["cpu_ratios"])):
            text = ", ".join(f"{pair.replace('_', ' ')} {value:.2f}" for pair, value in by.items())
            print(f"{'ours to its, ' + name:>28}: {text}")
        if row["what"] != Peer.what:
            print(f"{'':>28}  {row['what']}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter that has peers installed")
    parser.add_argument("--repeat", type=int, default=3, help="turns")
    parser.add_argument("--million", action="store_true", help="also 1,000,000 requests, once")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat: expected at least 1, found {arguments.repeat}")
    interpreters, missing = find(arguments.python or [sys.executable])
    for peer in missing:
        print(f"{peer['peer']}: {peer['reason']}")
    turns = [(requests, arguments.repeat) for requests in SIZES] + ([(1_000_000, 1)] if arguments.million else [])
    rows: list[dict[str, Any]] = []
    for requests, repeat in turns:
        for row in compare(requests, interpreters, repeat):
            show(row)
            rows.append(row)
    if arguments.out:
        document = {**provenance("twin.benchmark-peers/1"), "repeat": arguments.repeat, "rows": rows, "others": missing}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
