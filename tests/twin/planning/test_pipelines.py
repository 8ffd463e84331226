"""Plans with pipeline stages: estimates compared with simulated engines, and the kinds and commands of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.twin.planning.scenarios import estimated
from tests.twin.serving.scenarios import reported, run, scenario
from twin.planning.catalogue import CatalogueQuestion, scenario_of
from twin.planning.launch import launch_commands

LINK = {"latency": 1e-4, "bandwidth": 1e9, "bytes_per_token": 1000.0}


def pipelined(layers: list[int], prompt: int, answer: int, **workload: Any) -> dict[str, Any]:
    return scenario(
        workload={
            "prefill": {"distribution": "fixed", "mean": prompt},
            "decode": {"distribution": "fixed", "mean": answer}, **workload,
        },
        engine={
            "num_gpu_blocks": 10**5, "max_num_batched_tokens": 64, "max_num_seqs": 64,
            "pipeline_parallel_size": len(layers), "pipeline": {"layers": layers, "link": LINK},
        },
        step_time={"source": "linear", "overhead": 0.004, "per_token": 1e-4, "per_kv_token": 0.0},
    )  # fmt: skip


@pytest.mark.parametrize("layers", [[1, 1], [1, 3], [2, 1, 1, 1]])
@pytest.mark.parametrize("prompt", [64, 320])
def test_a_prompt_alone_takes_what_is_estimated(layers: list[int], prompt: int) -> None:
    """Chunks follow each other through the stages, so that five take less than five times one."""
    document = pipelined(layers, prompt, 1, requests=1)
    ttft = reported(run(document), document)["summary"]["ttft"]["mean"]
    assert estimated(document, prompt, 1).prompt_seconds(prompt) == pytest.approx(ttft, rel=1e-9)


@pytest.mark.parametrize("layers", [[1, 1], [1, 3], [1, 1, 1, 1]])
def test_the_estimated_capacity_is_near_what_a_full_engine_serves(layers: list[int]) -> None:
    """A plan gives up engines beyond 1.25 times it: it must not be much too low. Bubbles make it somewhat too high."""
    document = pipelined(layers, 32, 40, requests=1500, arrivals={"process": "closed_loop", "concurrency": 60})
    served = reported(run(document), document)["summary"]["request_throughput"]
    capacity = estimated(document, 32, 40).capacity
    assert served / 1.1 < capacity < 1.6 * served


def test_kinds_with_stages_and_their_command() -> None:
    question = CatalogueQuestion(
        "llama-3.1-70b", ["l40s"], {"ttft_p99": 6.0}, 1.0, None, 1000.0, 250.0, degrees=(2, 8), stages=(1, 4)
    )
    kinds = {kind["name"]: kind for kind in scenario_of(question)["plan"]["engines"]}
    assert list(kinds) == ["tp2", "tp2-pp4", "tp8"], "eight GPUs a node"
    kind = kinds["tp2-pp4"]
    assert kind["device"]["count"] == 8
    assert kind["step_time"]["pipeline_parallel"] == kind["engine"]["pipeline_parallel_size"] == 4
    pool = {**kind, "role": "both", "replicas": 2}
    words = launch_commands({"pools": [pool]}, Path())
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 4" in words
    assert "--no-async-scheduling" in words
