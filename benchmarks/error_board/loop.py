"""The closed loop of a measured row, simulated with its engine's scheduler.

Clients of InferenceX send ten requests for each in flight, the first of which come at once, to engines that are set as
`scripts` says. Rows of equal lengths come from AIConfigurator's own runs, and are taken to have the settings that its
generator writes; its rounds are not stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.error_board.rows import Row
from benchmarks.error_board.scripts import MANY, MAX_SEQS, batch_wait, script
from benchmarks.silicon import RANDOM_RANGE_MEAN
from latency_models.step_time import StepTime
from scenarios.serving import ServingScenario
from twin.serving.plan.plan import make_plan
from twin.serving.run.simulation import Simulation

ROUNDS = 10
"""Requests that a client sends, over those in flight."""

SCHEDULERS = {"vllm": "vllm-0.33", "sglang": "sglang", "trtllm": "tensorrt-llm"}

RANGE = (0.8, 1.0)
"""Drawn lengths over the stated one."""

BLOCK = 16

SPARE = 1500
"""Tokens a step that AIConfigurator's generator of settings adds to requests in flight and one prompt."""

DELAY = 30
"""Steps for which prompts of SGLang's replicas wait for one another (`--enable-prefill-delayer`)."""


@dataclass(frozen=True, slots=True)
class Means:
    """Mean TTFT and TPOT in seconds, as the engine's times have them."""

    ttft: float
    tpot: float


def settings(row: Row, chip: str) -> dict[str, Any]:
    """The engine's settings that are known of a row, beyond its scheduler's defaults."""
    clients, replicas = math.ceil(row.in_flight), row.decode.data_parallel
    stated: dict[str, Any] = {}
    if row.engine != "vllm" and replicas > 1:
        stated["attention_dp_timeout_iters"] = DELAY if row.engine == "sglang" else 60
    if not row.drawn:
        tokens = clients + math.ceil(row.isl) + SPARE
        return {**stated, "max_num_batched_tokens": tokens, "max_num_seqs": min(clients, MAX_SEQS)}
    set_to = script(row, chip)
    prompt, tokens = math.ceil(row.isl / RANDOM_RANGE_MEAN), set_to.tokens
    if row.engine == "sglang":
        stated["max_prefill_tokens"] = max(tokens, 16384)
        if replicas == 1:
            stated["scheduler_recv_interval"] = set_to.few if row.in_flight < MANY else set_to.many
    elif row.engine == "trtllm":
        tokens = max(tokens, clients + prompt + 64)
        stated["batch_wait_timeout_iters"], stated["batch_wait_max_tokens_ratio"] = batch_wait(row)
    elif row.model == "minimax-m2.5" and set_to.cache == "fp8":
        tokens = 2 * prompt
    return {
        **stated,
        "max_num_batched_tokens": max(tokens, min(clients, set_to.sequences)),
        "max_num_seqs": set_to.sequences,
    }


def simulated(row: Row, step_time: StepTime, kv_tokens: float, chip: str, seed: int = 0) -> Means:
    """The means of all requests that the client of a row sends to one of its engines."""
    replicas = row.decode.data_parallel
    clients = max(round(row.in_flight / row.decode.count), 1)
    document = {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "row",
        "detail": False,
        "seed": seed,
        "workload": {
            "requests": ROUNDS * clients,
            "prefill": _lengths(row.isl, row.drawn),
            "decode": _lengths(row.osl, row.drawn),
            "arrivals": {"process": "closed_loop", "concurrency": clients},
        },
        "engine": {
            "scheduler": SCHEDULERS[row.engine],
            "block_size": BLOCK,
            "num_gpu_blocks": int(kv_tokens) // BLOCK,
            "enable_prefix_caching": False,
            "async_scheduling": True,
            "data_parallel_size": replicas,
            **settings(row, chip),
        },
        "step_time": {"source": "linear", "overhead": 1.0},  # takes no part
    }
    plan = make_plan(ServingScenario.model_validate(document), Path(), None).with_step_time(step_time)
    columns = Simulation(plan).run().columns
    arrival, first, last, tokens = (
        np.array(column) for column in (columns.arrival, columns.first_token, columns.last_token, columns.output_tokens)
    )
    return Means(float(np.mean(first - arrival)), float(np.mean((last - first) / (tokens - 1))))


def _lengths(mean: float, drawn: bool) -> dict[str, Any]:
    if not drawn:
        return {"distribution": "fixed", "mean": round(mean)}
    low, high = (round(mean / RANDOM_RANGE_MEAN * share) for share in RANGE)
    return {"distribution": "uniform", "low": low, "high": high}
