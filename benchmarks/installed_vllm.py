"""Simulates scenarios with the installed vLLM's own scheduler and with ours, and compares all records bit for bit.

    python -m benchmarks.installed_vllm [--scenarios N] [--requests N]

Scenarios are examples with drawn settings. Prints how many are equal in every row of requests and steps, and requests a
second of CPU time.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd

import twin
from schedulers.vllm_versions import INSTALLED_VLLM
from tests.vllm_parity.compare import scheduler_for
from twin.serving.engine.installed_vllm import vllm_version

EXAMPLES = {"tiny-llama-cpu": 60, "chat-sessions": 700, "roofline-h200-llama-70b": 2000, "tenants": 900}
"""Examples, and for each the KV blocks below which requests may not fit."""

Overrides = dict[str, Any]


def drawn_settings(number: int, requests: int) -> tuple[Path, Overrides]:
    """Scenario number `number`: an example's file and changed fields."""
    draw = random.Random(number)
    name = list(EXAMPLES)[number % len(EXAMPLES)]
    seqs = draw.choice((4, 16, 64))
    settings: Overrides = {
        "seed": number, "detail": True, "workload.requests": requests,
        "engine.max_num_seqs": seqs,
        "engine.max_num_batched_tokens": max(seqs, draw.choice((64, 256, 2048))),
        "engine.num_gpu_blocks": EXAMPLES[name] * draw.choice((1, 1, 1, 2, 10)),
        "engine.async_scheduling": draw.random() < 0.5,
        "engine.enable_prefix_caching": draw.random() < 0.7,
        "engine.scheduler_reserve_full_isl": draw.random() < 0.7,
        "engine.scheduling_policy": draw.choice(("fcfs", "priority")),
    }  # fmt: skip
    if name == "chat-sessions":
        settings |= {"workload.arrivals.concurrency": 12, "measure.after": 0, "workload.sessions.max_model_len": 8192}
    else:
        settings["workload.arrivals.rate"] = draw.choice((2.0, 30.0))
    return Path("examples") / f"{name}.yaml", settings


def _decided(result: twin.Result) -> pd.DataFrame:
    """The steps, without how they were simulated."""
    return result.steps.drop(columns="fast_forwarded")


def main() -> int:
    """Compare, and print a line for each difference. Returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=100, help="scenarios (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=60, help="requests in each (default: %(default)s)")
    arguments = parser.parse_args()
    schedulers = (scheduler_for(vllm_version()), INSTALLED_VLLM)
    seconds = dict.fromkeys(schedulers, 0.0)
    equal = requests = steps = preemptions = 0
    numbers = range(arguments.first, arguments.first + arguments.scenarios)
    for number in numbers:
        path, settings = drawn_settings(number, arguments.requests)
        results = []
        for scheduler in schedulers:
            begin = time.process_time()
            results.append(twin.simulate(path, settings | {"engine.scheduler": scheduler}, jobs=1))
            seconds[scheduler] += time.process_time() - begin
        ours, theirs = results
        same = ours.requests.equals(theirs.requests) and _decided(ours).equals(_decided(theirs))
        if not same:
            print(f"scenario {number} differs: {path.stem} {settings}")
        equal += same
        requests += len(ours.requests)
        steps += len(ours.steps)
        preemptions += int(ours.requests.preemptions.sum())
    print(f"vLLM {vllm_version()}: {equal} of {len(numbers)} scenarios equal in every row of requests and steps")
    print(f"{requests} requests, {steps} steps, {preemptions} preemptions")
    for scheduler in schedulers:
        print(f"{scheduler}: {requests / seconds[scheduler]:.0f} requests a second of CPU time")
    return 0 if equal == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
