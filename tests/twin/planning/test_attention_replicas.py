"""Estimates of engines whose attention replicas share experts, compared with simulated ones."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.fields import read_goal
from tests.twin.planning.scenarios import estimated
from tests.twin.serving.scenarios import reported, run, scenario
from twin.planning.engine_estimates import bound

REPLICAS = 4


def replicated(prompt: int, answer: int, **workload: Any) -> dict[str, Any]:
    means = {"prefill": prompt, "decode": answer}
    lengths = {name: {"distribution": "fixed", "mean": mean} for name, mean in means.items()}
    engine = {"num_gpu_blocks": 10**5, "max_num_batched_tokens": 512, "max_num_seqs": 32}
    document = scenario(workload={**lengths, **workload}, engine=engine | {"data_parallel_size": REPLICAS})
    step_time = {"source": "roofline", "model": "qwen3-30b-a3b", "hardware": "h100-sxm"}
    return document | {"step_time": step_time | {"data_parallel": REPLICAS, "expert_parallel": True}}


@pytest.mark.parametrize("prompt", [300, 1200])
def test_a_prompt_alone_brings_only_its_own_rows_to_the_experts(prompt: int) -> None:
    """A goal is refused for any number of engines if one request alone misses it: the bound must hold."""
    document = replicated(prompt, 1, requests=1)
    ttft = reported(run(document), document)["summary"]["ttft"]["mean"]
    estimate = estimated(document, prompt, 1)
    assert estimate.prompt_seconds(prompt) == pytest.approx(ttft, rel=1e-9)
    assert bound(read_goal("ttft_mean", 1.0), estimate, estimate) == pytest.approx(ttft, rel=1e-9)


def test_requests_are_spread_over_the_replicas() -> None:
    document = replicated(256, 24, requests=700, arrivals={"process": "closed_loop", "concurrency": 120})
    served = reported(run(document), document)["summary"]["request_throughput"]
    assert served / 1.1 < estimated(document, 256, 24).capacity < 1.6 * served
