"""Short runs of Llama-3.1-8B on an H100, and `twin calibrate refine` of what was recorded of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scenarios.reading import read_scenario
from twin import cli
from twin.serving.plan.plan import ServingPlan
from twin.sweeps.serving_sweep import prepare

ROOFLINE = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h100-sxm"}
Lengths = tuple[float, float]


def short_run(requests: int, rate: float, prefill: Lengths, decode: Lengths, max_num_seqs: int = 64) -> dict[str, Any]:
    """A scenario whose lengths are lognormal, with these means and coefficients of variation."""
    (prompts, answers) = ({"distribution": "lognormal", "mean": mean, "cv": cv} for mean, cv in (prefill, decode))
    arrivals = {"process": "poisson", "rate": rate}
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "short-run",
        "workload": {"requests": requests, "prefill": prompts, "decode": answers, "arrivals": arrivals},
        "engine": {"num_gpu_blocks": 20000, "max_num_seqs": max_num_seqs},
        "step_time": ROOFLINE,
    }


def plan_of(folder: Path, **settings: Any) -> ServingPlan:
    """The plan of the folder's scenario, with changed fields."""
    source = folder / "scenario.yaml"
    return prepare(read_scenario(source, "serving"), source, [settings]).cases[0].plan


def refine(folder: Path, *words: str, run: str = "run") -> int:
    """The exit code of the command on the folder's scenario and one of its runs."""
    paths = ["--run", str(folder / run), "-o", str(folder / "refined.yaml")]
    return cli.run(["calibrate", "refine", str(folder / "scenario.yaml"), *paths, *words])


@pytest.fixture
def refined(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str]]:
    """The same with `--json`: the document, and what is said beside it."""

    def call(folder: Path, *words: str, run: str = "run") -> tuple[Any, str]:
        assert refine(folder, *words, "--json", run=run) == 0
        output = capsys.readouterr()
        return json.loads(output.out), output.err

    return call


@pytest.fixture
def refine_refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of the command for input that it refuses; its last line says what was expected."""

    def call(folder: Path, *words: str, run: str = "run") -> str:
        capsys.readouterr()
        assert refine(folder, *words, run=run) == 2
        return capsys.readouterr().err

    return call
