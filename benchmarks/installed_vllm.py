"""Simulates scenarios with the installed vLLM's own scheduler and with ours, and compares all records bit for bit.

    python -m benchmarks.installed_vllm [--scenarios N] [--requests N]
    python -m benchmarks.installed_vllm --costs

Scenarios are examples with drawn settings. Prints how many are equal in every row of requests and steps, and requests a
second of CPU time. `--costs`: what recording and a chunk policy add to a step of vLLM's scheduler, CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

import twin
from schedulers.engine_config import INSTALLED_VLLM, EngineConfig
from tests.vllm_parity.compare import scheduler_for
from twin.serving.engine.installed_vllm import InstalledScheduler, vllm_version
from workloads.request import Request

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


POLICY = {
    "chunking": {"policy": "slo", "slo_seconds": 0.05},
    "step_time": {
        "source": "roofline", "model": "llama-3.1-70b", "hardware": "h200-sxm", "tensor_parallel": 4, "weights": "bf16",
    },
}  # fmt: skip
"""Chunks by predicted step times, which cost more than a table's."""

COST_STEPS = 150


class Stopwatch:
    """CPU seconds within the two methods of a scheduler, or of its class, which it wraps."""

    def __init__(self, owner: Any) -> None:
        self.seconds = 0.0
        for name in ("schedule", "update_from_output"):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            result = method(*args, **kwargs)
            self.seconds += time.process_time() - begin
            return result

        return run


def step_seconds(kind: Any, settings: dict[str, Any], decodes: int, inner: Stopwatch) -> tuple[float, float]:
    """CPU seconds of a step's `schedule` and `update_from_output` beside a prompt under way, medians.

    Args:
        kind: a scheduler class of `live.vllm.schedulers`. settings: its settings. inner: times vLLM's own methods.

    Returns:
        Those of vLLM's own methods, and what the class adds.
    """
    config = EngineConfig(25_000, max_num_batched_tokens=2048, max_num_seqs=512, enable_prefix_caching=False)
    host = InstalledScheduler(config, async_scheduling=False)
    plain = host.scheduler
    plain.vllm_config.additional_config = {"serving_twin": settings}
    plain.vllm_config.model_config.model = "model"
    host.scheduler = kind(plain.vllm_config, plain.kv_cache_config, plain.structured_output_manager, config.block_size)
    outer = Stopwatch(host.scheduler)
    for number in range(decodes):
        host.add(Request(number, 0.0, 7, 1000), 1000)
    for _ in range(3):
        host.schedule()
        host.end_step(set())
    host.add(Request(decodes, 0.0, 280_000, 1), 1)
    own, added = [], []
    for _ in range(COST_STEPS):
        inner.seconds = outer.seconds = 0.0
        host.schedule()
        host.end_step(set())
        own.append(inner.seconds)
        added.append(outer.seconds - inner.seconds)
    return statistics.median(own), statistics.median(added)


def costs() -> None:
    """Print what scheduler classes add to a step of vLLM's scheduler, in microseconds."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from live.vllm.schedulers import PolicyScheduler, RecordingScheduler

    inner = Stopwatch(Scheduler)
    for decodes in (16, 64, 256):
        with tempfile.TemporaryDirectory() as folder:
            own, recording = step_seconds(RecordingScheduler, {"step_log": f"{folder}/steps.csv"}, decodes, inner)
        _, policy = step_seconds(PolicyScheduler, POLICY, decodes, inner)
        added = f"recording adds {1e6 * recording:.0f}, a chunk policy {1e6 * policy:.0f}"
        print(f"vLLM {vllm_version()}, {decodes} decodes: {1e6 * own:.0f} µs a step, {added}", flush=True)


def main() -> int:
    """Compare, and print a line for each difference. Returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=100, help="scenarios (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=60, help="requests in each (default: %(default)s)")
    parser.add_argument("--costs", action="store_true", help="measure what our classes add to vLLM's scheduler")
    arguments = parser.parse_args()
    if arguments.costs:
        costs()
        return 0
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
