"""`twin.simulate`: the same numbers, files and figures as the command line, as DataFrames."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import twin
from twin import BadInput, Result
from twin.cli import run


@pytest.fixture
def result(file: Path) -> Result:
    return twin.simulate(file)


def test_the_document_and_the_files_are_the_command_lines(file: Path, result: Result, printed) -> None:
    output = printed("simulate", str(file), "--events")
    cli_folder = file.parent / output["run"]["directory"]
    ours = result.save(file.parent / "kept" / "here", events=True)
    assert ours == file.parent / "kept" / "here"
    del output["run"]
    assert json.loads(json.dumps(result.document)) == output
    names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in (ours, cli_folder)]
    assert names[0] == names[1]
    for name in ("figures/latencies.svg", "figures/over-time.svg"):
        assert (ours / name).read_text() == (cli_folder / name).read_text()
    pd.testing.assert_frame_equal(*(pd.read_parquet(folder / "requests.parquet") for folder in (ours, cli_folder)))
    manifest = json.loads((ours / "manifest.json").read_text())
    assert (manifest["complete"], manifest["id"]) == (True, "here")
    assert manifest["command"].startswith("twin.simulate(")
    (ours / "report.html").unlink()
    assert run(["report", str(ours)]) == 0
    assert (ours / "report.html").exists()


def test_a_folder_with_something_in_it_is_refused(result: Result, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected an empty folder") as error:
        result.save(tmp_path)
    assert error.value.field == "folder"
    assert [item.name for item in tmp_path.iterdir()] == ["s.yaml"]


def test_requests_say_what_the_summary_says(result: Result) -> None:
    requests, summary = result.requests, result.summary["value"]
    assert len(requests) == 60
    assert requests["counted"].all()
    for name in ("ttft", "tpot", "e2e"):
        assert requests[name].mean() == pytest.approx(summary[f"{name}.mean"], rel=1e-12)
        assert requests[name].quantile(0.99) == pytest.approx(summary[f"{name}.p99"], rel=1e-12)
    assert requests["tpot"].isna().equals(requests["output_tokens"] < 2)
    order = ["arrival", "queued", "scheduled", "first_token", "last_token"]
    assert (np.diff(requests[order].to_numpy(), axis=1) >= 0).all()
    assert requests["last_token"].is_monotonic_increasing


def test_requests_outside_the_measured_window_are_there_but_not_counted(file: Path) -> None:
    result = twin.simulate(file, {"measure.after": 0.5, "measure.before": 1.2, "measure.start": "queued"})
    requests = result.requests
    within = (requests["last_token"] >= 0.5) & (requests["last_token"] < 1.2)
    assert 0 < within.sum() < 60 == len(requests)
    assert requests["counted"].equals(within.rename("counted"))
    assert requests["ttft"].equals((requests["first_token"] - requests["queued"]).rename("ttft"))
    assert requests.loc[within, "ttft"].mean() == pytest.approx(result.summary["value"]["ttft.mean"])


def test_steps_are_all_there_whether_fast_forwarded_or_not(file: Path, result: Result) -> None:
    steps, one_by_one = result.steps, twin.simulate(file, {"fast_forward": False}).steps
    assert steps["fast_forwarded"].sum() > 20
    assert not one_by_one["fast_forwarded"].any()
    both = [frame.drop(columns="fast_forwarded") for frame in (steps, one_by_one)]
    pd.testing.assert_frame_equal(*both, rtol=1e-12)
    summary = result.summary["value"]
    assert (len(steps), steps["prefill_tokens"].sum()) == (summary["steps"], summary["prefill_tokens"])
    assert (steps["start"].to_numpy()[1:] >= steps["end"].to_numpy()[:-1]).all()
    assert (steps["end"] > steps["start"]).all()
    assert set(steps["kind"]) == {"decode", "mixed"}
    assert (steps["prefill_tokens"] > 0).equals(steps["kind"] == "mixed")
    busy = (steps["end"] - steps["start"]).sum() / steps["end"].max()
    assert busy == pytest.approx(result.engines["busy"][0])


def test_steps_of_several_engines(file: Path) -> None:
    result = twin.simulate(file, {"system": {"layout": "colocated", "replicas": 2}})
    assert list(result.engines["name"]) == ["engine-0", "engine-1"]
    assert result.steps.groupby("engine").size().to_dict() == dict(result.engines[["name", "steps"]].to_numpy())
    assert set(result.requests["replica"]) == {"engine-0", "engine-1"}


def test_one_run_reports_what_a_sweep_of_one_does(file: Path) -> None:
    point = twin.sweep(file).document["points"][0]
    document = twin.simulate(file).document
    assert {name: document[name] for name in point} == point
    assert list(point) == [name for name in document if name in point]


def test_intervals_stand_beside_values(file: Path) -> None:
    one, several = twin.simulate(file).summary, twin.simulate(file, replications=4, jobs=1)
    assert one.filter(like="confidence").isna().all(axis=None)
    row = several.summary.loc["ttft.p99"]
    ends = row[["prediction_low", "confidence_low", "value", "confidence_high", "prediction_high"]]
    assert ends.is_monotonic_increasing
    assert ends.is_unique
    assert (row["unit"], several.summary.loc["output_throughput", "unit"]) == ("s", "tokens/s")
    assert (several.summary["unit"] != "").all()
    assert len(several.points) == 3


def test_a_run_without_detail_has_fewer_columns_and_no_steps(file: Path, result: Result) -> None:
    short = twin.simulate(file, {"detail": False})
    assert set(result.requests) - set(short.requests) == {
        "id", "scheduled", "prompt_tokens", "cached_tokens", "preemptions", "attempts", "model", "replica",
    }  # fmt: skip
    pd.testing.assert_frame_equal(short.requests, result.requests[list(short.requests)])
    refused: list[Any] = [lambda: short.steps, lambda: short.timeseries, lambda: short.plot()]
    for reader in refused:
        with pytest.raises(BadInput) as error:
            reader()
        assert (error.value.field, error.value.value) == ("detail", False)


def test_figures_are_matplotlibs_and_need_no_display(result: Result) -> None:
    figure = result.plot("over-time")
    assert [axes.get_ylabel() for axes in figure.axes] == ["requests", "KV blocks in use, %"]
    assert len(result.plot().axes) == 4
    figure.savefig(image := io.BytesIO(), format="png")
    assert image.getvalue().startswith(b"\x89PNG")
    with pytest.raises(BadInput, match="expected one of latencies, over-time") as error:
        result.plot("latency")
    assert (error.value.field, error.value.value) == ("kind", "latency")


def test_time_series_and_notebooks(result: Result) -> None:
    series = result.timeseries
    assert series["time"].is_monotonic_increasing
    assert series["time"].iloc[-1] == pytest.approx(result.steps["end"].max())
    assert series["kv_used"].between(0, 1).all()
    assert "ttft.p99" in result._repr_html_()


def test_values_may_be_numpys_and_paths(file: Path, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "10,5\n" * 4)
    overrides = {"seed": np.int64(3), "workload.requests": 4}
    result = twin.simulate(file, overrides, trace=Path("lengths.csv"))
    assert result.document["settings"] == {"seed": 3, "workload.requests": 4}
    assert set(result.requests["prompt_tokens"]) == {10}
