"""A whole small sweep, as it was when it was last looked at. To write it anew: python tests/golden/test_afd_sweep.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from papers.afd.reproduction import BASELINE
from scenarios.reading import apply
from twin.executors.executor import Processes
from twin.sweeps.ratio_sweep import prepare

GOLDEN = Path(__file__).with_name("afd_sweep.json")


def document() -> dict[str, Any]:
    """The summary of a small sweep, through JSON as a user gets it."""
    scenario = apply(BASELINE, {"batch_size": 32, "requests_per_instance": 1000, "workload.decode.mean": 60.0})
    sweep = prepare(scenario, Path("afd"), "1,5/2,6")
    points: dict[str, dict[str, Any]] = {}
    for _ in sweep.run(points, lambda key, point: None, Processes(1)):
        pass
    summary = sweep.summarise(points)
    summary["configurations"][0]["curves"] = {
        name: curve[::16] for name, curve in summary["configurations"][0]["curves"].items()
    }
    loaded: dict[str, Any] = json.loads(json.dumps(summary))
    return loaded


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every value of a nested document by its path."""
    if isinstance(value, dict):
        return {key: leaf for name, inner in value.items() for key, leaf in leaves(inner, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {
            key: leaf for index, inner in enumerate(value) for key, leaf in leaves(inner, f"{path}[{index}]").items()
        }
    return {path: value}


def test_the_sweep_is_what_it_was() -> None:
    expected, actual = leaves(json.loads(GOLDEN.read_text())), leaves(document())
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, float):
            # Sums of many floats may differ in the last digits between machines; a decision may not.
            assert actual[path] == pytest.approx(value, rel=1e-9, abs=1e-12), path
        else:
            assert actual[path] == value, path


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(document(), indent=1) + "\n")
