"""Prefixes that are longer than the prompts that they are part of are refused, however the prompts are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import twin
from workloads.errors import BadInput

FIXED = {"distribution": "fixed", "mean": 8}
ARRIVALS = {"process": "poisson", "rate": 1.0}


def refused(workload: dict[str, Any], tmp_path: Path) -> str:
    document = {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "prefixes",
        "workload": {"requests": 20, "arrivals": ARRIVALS, **workload},
        "engine": {"num_gpu_blocks": 4000},
        "step_time": {"source": "linear", "overhead": 0.01},
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(document))
    try:
        twin.simulate(tmp_path / "scenario.yaml", jobs=1)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("prompts", "mean"),
    [
        ({"distribution": "fixed", "mean": 200}, 200),
        ({"distribution": "lognormal", "mean": 200}, 200),
        ({"distribution": "uniform", "low": 100, "high": 300}, 200),
    ],
)
def test_a_prefix_is_at_most_as_long_as_the_mean_prompt(prompts: dict[str, Any], mean: int, tmp_path: Path) -> None:
    def refusal_of(tokens: int) -> str:
        return refused({"prefill": prompts, "decode": FIXED, "prefixes": {"groups": 2, "tokens": tokens}}, tmp_path)

    assert refusal_of(mean) == ""
    expected = f"expected at most the mean prompt ({mean} tokens), which includes the prefix"
    assert refusal_of(mean + 1).endswith(f"workload.prefixes.tokens: got {mean + 1}, {expected}")


def test_every_task_has_room_for_it(tmp_path: Path) -> None:
    tasks = [
        {"task": "generate", "weight": 1.0, "prefill": {"distribution": "fixed", "mean": 900}, "decode": FIXED},
        {"task": "classify", "weight": 1.0, "prefill": {"distribution": "fixed", "mean": 80}},
    ]
    assert "mean prompt (80 tokens)" in refused({"tasks": tasks, "prefixes": {"groups": 2, "tokens": 100}}, tmp_path)


def test_so_have_the_prompts_of_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("num_prefill_tokens,num_decode_tokens\n" + "200,4\n100,4\n" * 10)
    workload = {"trace": {"path": "trace.csv"}, "prefixes": {"groups": 1, "tokens": 160}}
    assert "mean prompt (150 tokens)" in refused(workload, tmp_path)
    assert refused(workload | {"prefixes": {"groups": 1, "tokens": 150}}, tmp_path) == ""
