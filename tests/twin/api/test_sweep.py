"""`twin.sweep`: serving systems and AFD bundles, one row for each point."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import twin
from twin import BadInput
from twin.cli import run


def test_every_combination_is_a_row(file: Path) -> None:
    vary = {"engine.max_num_seqs": [2, 16], "workload.arrivals.rate": [5, 40]}
    swept = twin.sweep(file, vary, overrides={"seed": 1}, jobs=1)
    points = swept.points
    assert points[list(vary)].to_numpy().tolist() == [[2, 5], [2, 40], [16, 5], [16, 40]]
    assert set(points["seed"]) == {1}
    for row in points.to_dict("records"):
        value = twin.simulate(file, {"seed": 1, **{key: row[key] for key in vary}}).summary["value"]
        assert {name: row[name] for name in value.index} == value.to_dict()
    texts = twin.sweep(file, ["engine.max_num_seqs=2,16", "workload.arrivals.rate=5,40"], overrides="seed=1", jobs=1)
    pd.testing.assert_frame_equal(texts.points[list(points)], points)


def test_a_latency_that_no_request_has_is_missing_in_each_of_its_points(file: Path) -> None:
    one_token = {"distribution": "fixed", "mean": 1}
    points = twin.sweep(file, {"workload.decode": [one_token, {"distribution": "fixed", "mean": 3}]}, jobs=1).points
    assert points["tpot.p99"].isna().tolist() == [True, False]
    assert "tpot" not in points


def test_intervals_of_replications(file: Path) -> None:
    points = twin.sweep(file, {"engine.max_num_seqs": [4, 16]}, replications=3, jobs=1).points
    assert (points["ttft.mean.low"] < points["ttft.mean"]).all()
    assert (points["ttft.mean"] < points["ttft.mean.high"]).all()


def test_a_sweep_is_saved_as_the_command_line_saves_it(file: Path, printed) -> None:
    swept = twin.sweep(file, {"engine.max_num_seqs": [4, 16]}, jobs=1)
    ours = swept.save("kept")
    output = printed("sweep", str(file), "--set", "engine.max_num_seqs=4,16", "--jobs", "1")
    cli_folder = Path(output.pop("run")["directory"])
    assert json.loads(json.dumps(swept.document)) == output
    for name in ("points.jsonl", "figures/sweep.svg"):
        assert (ours / name).read_text() == (cli_folder / name).read_text()
    assert {saved.name for saved in ours.iterdir()} == {saved.name for saved in cli_folder.iterdir()}
    assert run(["report", str(ours)]) == 0


def test_an_afd_bundle_at_each_ratio(scenario: Path, sweep) -> None:
    swept = twin.sweep(scenario, {"batch_size": [8, 16]}, ratio=[1, "7/2"], requests=True, jobs=1)
    points = swept.points
    assert points[["batch_size", "topology"]].to_numpy().tolist() == [
        [8, "1A-1F"], [8, "7A-2F"], [16, "1A-1F"], [16, "7A-2F"],
    ]  # fmt: skip
    output = sweep("--ratio", "1,7/2", "--set", "batch_size=8,16", "--requests")
    cli_folder = Path(output.pop("run")["directory"])
    assert json.loads(json.dumps(swept.document)) == output
    ours = swept.save("kept", figures=False)
    files = sorted(str(file.relative_to(cli_folder)) for file in cli_folder.rglob("*"))
    assert sorted(str(file.relative_to(ours)) for file in ours.rglob("*")) == files
    for name in (file for file in files if file.endswith("parquet")):
        pd.testing.assert_frame_equal(pd.read_parquet(ours / name), pd.read_parquet(cli_folder / name))
    counts = swept.requests.groupby("point").size().to_dict()
    assert counts == dict(zip(["0-1A-1F", "0-7A-2F", "1-1A-1F", "1-7A-2F"], points["requests"], strict=True))


def test_figures_of_an_afd_bundle(scenario: Path) -> None:
    swept = twin.sweep(scenario, ratio="1,2", jobs=1)
    assert swept.plot().axes[0].get_title(loc="left") == "Throughput: output tokens per cycle and instance"
    assert swept.plot("idle").axes[0].get_ylabel() == "idle time, %"
    with pytest.raises(BadInput, match="expected one of throughput, idle, regimes"):
        swept.plot("sweep")
    with pytest.raises(BadInput, match="requests=True"):
        _ = swept.requests
