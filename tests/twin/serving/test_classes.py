"""Percentiles by class of request: of two tasks or models, and none of one class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import twin
from latency_models.io.config_io import write_yaml
from tests.twin.serving.scenarios import scenario
from twin.cli import run


def test_classes_split_the_requests_and_have_their_own_percentiles() -> None:
    result = twin.simulate("examples/prelude-judges.yaml", {"workload.requests": 200})
    classes = result.document["series"]["classes"]
    assert set(classes) == {"generate", "score"}
    requests = result.requests
    assert sum(row["requests"] for row in classes.values()) == len(requests) == 200
    for name, one_shot in (("generate", False), ("score", True)):
        e2e = requests.loc[requests["one_shot"] == one_shot, "e2e"]
        assert classes[name]["requests"] == len(e2e)
        assert classes[name]["e2e"]["p99"] == pytest.approx(np.percentile(e2e, 99), rel=1e-12)
        assert classes[name]["quantiles"]["e2e"][-1] == pytest.approx(e2e.max(), rel=1e-12)
    assert classes["score"]["tpot"] is None


def test_requests_written_while_they_finish_are_classed_as_well(tmp_path: Path) -> None:
    line = ["simulate", "examples/prelude-judges.yaml", "--set", "workload.requests=200", "--runs", str(tmp_path)]
    assert run(line) == 0
    (folder,) = tmp_path.iterdir()
    content = json.loads((folder / "summary.json").read_text())["series"]["classes"]
    result = twin.simulate("examples/prelude-judges.yaml", {"workload.requests": 200})
    assert content == result.document["series"]["classes"]
    assert "By class of request" in (folder / "report.html").read_text()


def test_one_class_is_none(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(write_yaml(scenario()))
    assert twin.simulate(tmp_path / "s.yaml").document["series"]["classes"] is None
