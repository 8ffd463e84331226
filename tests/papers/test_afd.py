"""`twin reproduce afd`: what it makes of the printed ratios, and that every claim is worked out from the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from papers.afd import reproduction as afd
from twin.cli import run


def test_printed_ratios_beside_computed() -> None:
    rows = {(row["published"]): row for row in afd.compare_ratios()}
    assert [rows[value]["prints_the_same"] for value in (9.30, 17.25, 2.17)] == [True] * 3
    assert rows[7.08]["computed"] == pytest.approx(7.0745, abs=1e-4)
    assert rows[7.08]["within_rounding"] is True
    assert rows[10.31]["computed"] == pytest.approx(10.2234, abs=1e-4)
    assert rows[10.31]["within_rounding"] is False
    assert rows[9.34]["within_rounding"] is False


def test_the_whole_reproduction_on_short_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(afd.BASELINE, "requests_per_instance", 600)
    monkeypatch.setattr(afd, "RATIOS", "1,2,3,8,9,16,32")
    assert run(["reproduce", "afd", "--json", "--jobs", "1"]) == 0
    summary = json.loads(capsys.readouterr().out)
    claims = {(claim["where"], claim["what"]): claim for claim in summary["claims"]}
    assert len(claims) == len(summary["claims"]) == 12
    base = [point for point in summary["sweep"]["points"] if point["configuration"] == 0]
    idle = claims["figure 5", "attention idle at r = 32"]
    assert idle["found"] == f"{100 * base[-1]['idle_attention']:.1f} %"
    assert idle["agrees"] == (base[-1]["idle_attention"] > 0.6)
    assert claims["figures 6, 7", "simulation-optimal r, μ_D = 100"]["agrees"] is False
    capsys.readouterr()
    assert run(["reproduce", "afd", "--jobs", "1"]) == 0
    output = capsys.readouterr().out
    assert "What disagrees" in output
    assert "no rounding of Table 4 explains it" in output
