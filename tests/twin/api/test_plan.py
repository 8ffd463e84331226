"""Plans from Python: the answer and its DataFrames, two of them side by side, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import twin
from latency_models.io.config_io import write_yaml
from tests.twin.planning.scenarios import document, kind
from tests.twin.serving.scenarios import scenario


@pytest.fixture
def file(tmp_path: Path) -> Path:
    engines = [kind("one", 1, 2.0, 1.0), kind("two", 2, 2.0, 1.8)]
    file = tmp_path / "plan.yaml"
    file.write_text(write_yaml(document(vary={}, layouts=["colocated"], engines=engines, limits={"engines": 3})))
    return file


def test_a_plan_is_that_of_the_command_with_frames_and_figures(file: Path, tmp_path: Path) -> None:
    plan = twin.plan(file, rate=40, what=["rate=2x"], brief=True, jobs=1)
    best = plan.document["recommendation"]
    assert plan.feasible
    assert repr(plan) == f"<small: {plan.answer}>"
    first = plan.deployments.iloc[0]
    assert (first["name"], first["gpus"], first["role"]) == (best["name"], best["gpus"], "recommended")
    assert first["ttft_p99"] == best["goals"][0]["value"]
    assert len(plan.candidates) == len(plan.document["ledger"])
    for suffix, magic in (("pdf", b"%PDF"), ("png", b"\x89PNG"), ("svg", b"<?xml")):
        plan.plot("capacity").savefig(tmp_path / f"figure.{suffix}")
        assert (tmp_path / f"figure.{suffix}").read_bytes().startswith(magic)
    rates = pd.DataFrame(plan.document["capacity"]).groupby("family")["rate"]
    assert rates.apply(lambda rate: rate.is_monotonic_increasing).all()
    assert (plan.save(tmp_path / "run") / "summary.json").is_file()
    (faster,) = plan.document["what_if"]
    sides = twin.compare(plan, replace(plan, document={**plan.document, "recommendation": faster["recommendation"]}))
    assert sides.loc["gpus", "second"] == faster["recommendation"]["gpus"]
    assert sides.loc["gpus", "change"] == faster["recommendation"]["gpus"] / best["gpus"] - 1


def test_two_simulations_are_compared_metric_by_metric(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(write_yaml(scenario()))
    base, slower = twin.simulate(file), twin.simulate(file, {"step_time.overhead": 0.008})
    sides = twin.compare(base, slower)
    assert sides.loc["tpot.mean", "change"] > 0.5
    assert sides.loc["tpot.mean", "first"] == base.summary.loc["tpot.mean", "value"]
    assert "TTFT" in repr(base)


def test_what_is_missing_or_impossible_is_said(file: Path) -> None:
    with pytest.raises(twin.BadInput, match="expected a scenario, or model, gpu and slo"):
        twin.plan(model="qwen3-4b", gpu="h100")
    hopeless = twin.plan(file, {"plan.limits.gpus": 1}, slo={"ttft_p99": "12ms"}, jobs=1)
    assert not hopeless.feasible
    assert repr(hopeless).startswith("<small: No candidate meets")
    with pytest.raises(twin.BadInput, match="first"):
        twin.compare(hopeless, hopeless)
