"""Reports of an autoscaled run: the document, the table, the figure and the page agree with the requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

import twin
from latency_models.io.config_io import write_yaml
from tests.twin.serving.scenarios import scenario
from twin.cli import run

SECTION = {
    "policy": "scheduled", "schedule": [[0, 2], [50, 4], [100, 1]], "max_replicas": 4, "sync_period": 10,
    "start_up": {"warm_up": 5},
}  # fmt: skip


def document() -> dict[str, Any]:
    """Three minutes, with an outage."""
    result = scenario(
        workload={"requests": 1800, "arrivals": {"process": "poisson", "rate": 10}},
        engine={"max_num_seqs": 2},
        system={
            "layout": "pools",
            "pools": [{"name": "l40s", "replicas": 2, "device": {"type": "L40S", "count": 2, "price_per_hour": 0.9}}],
            "autoscaling": {"l40s": SECTION},
        },
        failures=[{"engine": "l40s-0", "at": 60.0, "duration": 20.0}],
        measure={"slo": {"ttft": 0.1}},
    )
    return result


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(write_yaml(document()))
    return tmp_path


def test_the_document_agrees_with_the_requests(workspace: Path, printed) -> None:
    output = printed("simulate", "s.yaml")
    folder = workspace / output["run"]["directory"]
    table = parquet.read_table(folder / "requests.parquet").to_pandas()
    arrival, minutes = table["arrival"].to_numpy(), output["autoscaling"]["minutes"]
    ttft = table["first_token"].to_numpy() - arrival
    for i, start in enumerate(minutes["start"]):
        mask = (arrival >= start) & (arrival < start + 60)
        assert minutes["requests"][i] == mask.sum()
        assert minutes["missed"][i] == (ttft[mask] > 0.1).sum()
        assert minutes["ttft_p99"][i] == pytest.approx(np.quantile(ttft[mask], 0.99))
    summary, pools = output["summary"]["autoscaling"], output["autoscaling"]["pools"]["l40s"]
    missed = np.array(minutes["missed"]) > 0.01 * np.array(minutes["requests"])
    assert summary["missed_minutes"] == missed.mean()
    assert missed.any()
    states, end = ("up", "starting", "draining", "failed"), max(table["last_token"])
    seconds = np.diff([*pools["time"], end]) @ sum(np.array(pools[name]) for name in states)
    assert summary["gpu_hours"] == pytest.approx(2 * seconds / 3600)
    assert summary["engine_hours"] == pytest.approx(seconds / 3600)
    assert summary["cost"] == pytest.approx(0.9 * summary["gpu_hours"])
    tokens = output["summary"]["output_throughput"] * end
    assert output["summary"]["cost_per_million_output_tokens"] == pytest.approx(1e6 * summary["cost"] / tokens)
    assert summary["pools"]["l40s"]["most_engines"] == max(pools["up"]) == 4
    assert 0 < output["summary"]["busy"] <= 1
    assert all(0 < engine["busy"] <= 1 for engine in output["engines"])
    assert output["outages"] == [{"engine": "l40s-0", "start": 60.0, "end": 80.0}]
    during = (arrival >= 60) & (arrival < 80)
    around = output["summary"]["outages"]
    assert around["during"]["requests"] == during.sum()
    assert around["during"]["ttft"]["p99"] == pytest.approx(np.quantile(ttft[during], 0.99))
    assert around["during"]["goodput_share"] == pytest.approx((ttft[during] <= 0.1).mean())
    after = (arrival >= 80) & (arrival < 100)
    assert around["after"]["requests"] == after.sum()
    series = output["series"]["engines"]
    at = np.searchsorted(pools["time"], output["series"]["time"], side="right") - 1
    for name in states:
        assert series[name] == np.array(pools[name])[at].tolist()
    svg = (folder / "figures" / "autoscaling.svg").read_text()
    for text in ("requests/s", "engines", "P99 TTFT, s", "starting", "failed"):
        assert text in svg
    page = (folder / "report.html").read_text()
    assert "Autoscaling" in page
    assert "Engines, outages shaded" in page


def test_the_table_says_what_it_costs(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "s.yaml", "--no-figures"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "GPU-hours for" in out
    assert "l40s:" in out
    assert "of minutes missed" in out
    assert "P99 TTFT during outages" in out
    assert "at most 8 × L40S: at most 7.20 an hour" in out


def test_runs_without_autoscaling_have_none_of_it(workspace: Path, printed) -> None:
    without = ("--set", "system.autoscaling=null", "--set", "failures=[]")
    output = printed("simulate", "s.yaml", "--no-figures", *without)
    assert "autoscaling" not in output
    assert not {"autoscaling", "outages"} & output["summary"].keys()
    assert "engines" not in output["series"]


def test_data_frames_have_engines_and_units(workspace: Path) -> None:
    result = twin.simulate(
        "s.yaml", {"workload.requests": 300, "failures": [{"engine": "l40s-0", "at": 5, "duration": 9}]}
    )
    assert {"up", "starting", "draining", "failed"} < set(result.timeseries)
    units = result.summary["unit"]
    names = [name for name in units.index if name.startswith(("autoscaling.", "outages."))]
    assert units["outages.during.ttft.p99"] == "s"
    assert units["autoscaling.gpu_hours"] == "h"
    assert {name for name in names if not units[name]} == {"autoscaling.cost"}
