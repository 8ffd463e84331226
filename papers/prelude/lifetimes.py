"""Judges among chats: the cost of a decode-shaped lifetime, and the savings of Prelude's one-shot class (section 3).

Five engines serve the same requests in the same order: with and without the one-shot class, each with blocks taken as
they are needed (vLLM) and with the whole answer's blocks taken at admission; and one that takes judges for chats, with
the chats' limit on the answer, and so reserves blocks that they never use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from papers.common import Task
from papers.common import scenario as read_scenario
from papers.prelude.engines import step_line
from reports.metrics import spread
from scenarios.reading import Settings
from schedulers.batches import Batch
from schedulers.engine_core import EngineCore
from schedulers.sequence import WAITING
from twin.serving.engine.engine import Engine
from twin.serving.results.summary import Run
from twin.serving.results.uncertainty import combine, flatten
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

JUDGE = 1
"""The priority of judges. Under first come, first served it orders nothing, but tells them from chats."""

REPLICATIONS = 5

VARIANTS: dict[str, Settings] = {
    "one-shot": {},
    "decode-shaped": {"engine.one_shot": None},
    "one-shot, answers reserved": {"engine.kv_reservation": "max_tokens"},
    "decode-shaped, answers reserved": {"engine.one_shot": None, "engine.kv_reservation": "max_tokens"},
    "judges as chats, answers reserved": {"engine.one_shot": None, "engine.kv_reservation": "max_tokens"},
}
COMPARED = [
    ("one-shot", "decode-shaped"),
    ("one-shot, answers reserved", "decode-shaped, answers reserved"),
    ("one-shot, answers reserved", "judges as chats, answers reserved"),
]
LOADS: dict[str, Settings] = {
    "open": {},
    "saturated": {"workload.arrivals": {"process": "closed_loop", "concurrency": 64}},
}
"""Loads: Poisson arrivals below capacity, and 64 clients that keep the engine full, which shows the capacity."""


def simulate(load: str, name: str, replication: int, requests: int) -> dict[str, Any]:
    """The metrics of one run of a variant; seconds, blocks, tokens/s, requests/s."""
    document, settings = variant(name, load, requests)
    plan = prepare(document, Path("prelude-judges"), [settings]).cases[0].plan
    meter = Meter()
    return meter.report(Simulation(plan, replication, watch=meter).run())


def scenario() -> dict[str, Any]:
    """`judges.yaml` with the device's memory and a roofline's step time."""
    hardware = load_hardware("h200-sxm")
    document = read_scenario("prelude", "judges")
    document["engine"]["kv_memory"]["memory"] = hardware.memory_capacity
    document["step_time"] |= step_line(load_model("qwen3-32b"), hardware)
    return document


def variant(name: str, load: str, requests: int) -> tuple[dict[str, Any], Settings]:
    """The scenario of one engine, and the settings that set it apart."""
    document = scenario() | {"fast_forward": False}  # the meter sees what is not passed over
    document["workload"]["requests"] = requests
    if name.startswith("judges as chats"):
        document["workload"]["tasks"][1] |= {"task": "generate", "decode": {"distribution": "fixed", "mean": 1}}
    return document, {**VARIANTS[name], **LOADS[load]}


def tasks(requests: int = 3000, replications: int = REPLICATIONS) -> list[Task]:
    """Every run. Replication i has the same requests, at the same times when open, in every variant."""
    return [
        Task(f"judges among chats, {load}, {name}", simulate, (load, name, replication, requests))
        for load in LOADS
        for name in VARIANTS
        for replication in range(replications)
    ]


def summarise_lifetimes(results: Mapping[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Means and 95 % intervals of every variant, and of differences between runs with the same requests."""
    summaries: dict[str, Any] = {}
    for load in LOADS:
        runs = {
            name: [result for arguments, result in results.items() if arguments[:2] == (load, name)]
            for name in VARIANTS
        }
        summaries[load] = {
            "variants": [{"variant": name, **combined(runs[name])} for name in VARIANTS],
            "differences": [
                {
                    "of": first,
                    "to": second,
                    **combined([_difference(a, b) for a, b in zip(runs[first], runs[second], strict=True)]),
                }
                for first, second in COMPARED
            ],
        }
    return {"scenario": scenario(), "loads": summaries}


class Meter:
    """Integrates the blocks and slots of judges, and all blocks, over a run of one engine without fast-forwarding."""

    def __init__(self) -> None:
        self.judges: set[int] = set()
        self.block_seconds = self.slot_seconds = self.all_block_seconds = 0.0
        self.peak = self.judge_peak = self.blocks = 0

    def __call__(self, engine: Engine, batch: Batch, start: float, end: float) -> None:
        """Account for one step. A request that does not wait holds its blocks, with or without a chunk in this step."""
        core = engine.core
        assert isinstance(core, EngineCore)
        judges = [
            sequence
            for sequence in core.sequences.values()
            if sequence.request.priority == JUDGE and sequence.state != WAITING
        ]
        self.judges.update(sequence.request.id for sequence in judges)
        judge_blocks = sum(core.kv_cache.num_blocks_of(sequence.blocks) for sequence in judges)
        everything = core.kv_cache.num_blocks - core.kv_cache.num_free_blocks
        self.block_seconds += judge_blocks * (end - start)
        self.all_block_seconds += everything * (end - start)
        self.slot_seconds += sum(sequence in core.running for sequence in judges) * (end - start)
        self.peak = max(self.peak, everything)
        self.judge_peak = max(self.judge_peak, judge_blocks)
        self.blocks = core.kv_cache.num_blocks

    def report(self, run: Run) -> dict[str, Any]:
        """The run's metrics, chats and judges apart."""
        table = run.columns.table()
        judge = np.isin(table["id"], list(self.judges))
        tokens, first, last = table["output_tokens"], table["first_token"], table["last_token"]
        ttft, several = first - table["arrival"], ~judge & (tokens > 1)
        tpot = (last[several] - first[several]) / (tokens[several] - 1)
        return {
            "requests_per_second": len(tokens) / run.end,
            "chat_tokens_per_second": float(tokens[~judge].sum()) / run.end,
            "chat_ttft": mean_and_tail(ttft[~judge]),
            "chat_tpot": mean_and_tail(tpot),
            "judge_ttft": mean_and_tail(ttft[judge]),
            "kv_blocks": self.blocks,
            "kv_blocks_held": self.all_block_seconds / run.end,
            "kv_blocks_peak": self.peak,
            "judge_blocks_held": self.block_seconds / run.end,
            "judge_blocks_peak": self.judge_peak,
            "judge_block_seconds": self.block_seconds / int(judge.sum()),
            "judge_slots": self.slot_seconds / run.end,
            "preemptions": int(table["preemptions"].sum()),
        }


def mean_and_tail(values: NDArray[np.float64]) -> dict[str, float]:
    """The mean and the 95th percentile of at least one value."""
    summary = spread(values)
    assert summary is not None
    return {"mean": summary["mean"], "p95": summary["p95"]}


def combined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every metric over replications, with its 95 % interval."""
    mean, intervals = combine(runs)
    return {"mean": mean, "intervals": {name: interval["confidence"] for name, interval in intervals.items()}}


def _difference(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    minuend, subtrahend = flatten(first), flatten(second)
    return {name: value - subtrahend[name] for name, value in minuend.items()}  # type: ignore[operator]  # none is missing
