"""The closed forms of a bundle from what its roles' profiling says: published (AFD 4), and with barrier and pipeline.

The theory knows lines: attention by its token load, the FFN by its rows, the round trip on the link. Work at the edges
of a step enters the constants: sampling and commands are time in which an attention instance serves no microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from latency_models.pass_latency import PassLatency
from scenarios.validation import BundleValidationScenario
from twin.afd.role_bundle import TOKEN_BYTES, RoleBundleConfig
from twin.afd.role_times import RoleTimes
from twin.theory.cycle import CycleModel
from twin.theory.load import load_phases
from twin.theory.paper import PaperModel
from workloads.pairs import LengthPairs

SEARCHED = 0.25, 64.0


def step_lines(times: RoleTimes, config: RoleBundleConfig, lengths: LengthPairs, largest: int) -> PassLatency:
    """Lines of a whole decode step; the coordinator's work is counted at `largest` attention instances."""
    batch, layers, link, mean = config.batch_size, config.layers, config.link, times.mean
    entering = batch / lengths.mean_decode
    stage = mean("attention.stage", (batch, 0))
    per_token = mean("attention.stage", (batch, padding(lengths, batch))) - stage
    edges = mean("attention.begin", (batch, 0, entering)) - stage + mean("attention.end", (batch, entering))
    command = mean("coordinator.collect", (batch,))
    command += mean("coordinator.decide", (batch * largest, entering * largest, entering * largest))
    command += (largest - 1) / 2 * (mean("coordinator.receive", (batch,)) + mean("coordinator.send", (entering,)))
    command += link.seconds(TOKEN_BYTES * batch) + link.seconds(0)
    attention = layers * (stage + mean("attention.wait", ())) + edges + command
    per_row = mean("ffn.stage", (1,)) - mean("ffn.stage", (0,))
    per_instance = mean("ffn.receive", (batch,)) + mean("ffn.send", (batch,))
    constant = max(mean("ffn.stage", (0,)) + mean("ffn.wait", ()) - per_instance, 0.0)
    row_seconds = config.sizes.row / link.bandwidth
    return PassLatency(
        attention=(layers * per_token, attention),
        ffn=(layers * (per_row + per_instance / batch), layers * constant),
        communication=(2 * layers * row_seconds, 2 * layers * link.latency),
    )


def padding(lengths: LengthPairs, batch_size: int) -> float:
    """The mean of the largest of B slots' loads over the mean load: attention on a CPU pads requests to the longest."""
    pmf = lengths.slot_load_pmf()
    largest = np.cumsum(pmf) ** batch_size
    return float((len(pmf) - 1 - largest[:-1].sum()) / lengths.renewal_load())


def theory_curves(
    times: RoleTimes, scenario: BundleValidationScenario, config: RoleBundleConfig, ratios: Sequence[int]
) -> dict[str, Any]:
    """Throughput per instance of both theories at each ratio, and their best ratios."""
    lengths, batch = scenario.workload.lengths(None), config.batch_size
    latency = step_lines(times, config, lengths, max(ratios))
    paper = PaperModel(latency, batch, lengths.mean_prefill, lengths.mean_decode)
    cycle = CycleModel(latency, batch, config.microbatches, load_phases(lengths, batch, in_step=False), "independent")
    return {
        "lines": {
            "attention": list(latency.attention),
            "ffn": list(latency.ffn),
            "communication": list(latency.communication),
        },
        "published": {"throughput": [paper.throughput(x) for x in ratios], "r_star": paper.r_star},
        "barrier": {
            "throughput": [cycle.throughput(x) for x in ratios],
            "r_star": cycle.best_ratio(*SEARCHED),
        },
    }
