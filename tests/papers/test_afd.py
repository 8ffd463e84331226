"""`twin reproduce afd`: what it makes of the printed ratios, and that every claim is worked out from the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from papers.afd import reproduction as afd
from papers.afd.reproduction import tables
from tests.reports.rendering import lines_of
from twin.cli import run
from workloads.pairs import JointEmpirical


def test_printed_ratios_beside_computed() -> None:
    rows = {(row["published"]): row for row in afd.compare_ratios()}
    assert [rows[value]["prints_the_same"] for value in (9.30, 17.25, 2.17)] == [True] * 3
    assert rows[7.08]["computed"] == pytest.approx(7.0745, abs=1e-4)
    assert rows[7.08]["within_rounding"] is True
    assert rows[10.31]["computed"] == pytest.approx(10.2234, abs=1e-4)
    assert rows[10.31]["within_rounding"] is False
    assert rows[9.34]["within_rounding"] is False


@pytest.mark.slow  # CI runs the whole command, installed
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
    output = "\n".join(lines_of(tables(summary)))
    assert "What disagrees" in output
    assert "no rounding of Table 4 explains it" in output


def test_geometric_lengths_fit_and_others_do_not() -> None:
    """A sample of the law itself is no farther from its fit than most; two lengths in equal parts are, by hand."""
    drawn = afd.geometric_fit(np.random.default_rng(4).geometric(1 / 60, 4000))
    assert drawn["p_value"] > 0.05
    assert drawn["distance"] < 0.03
    two = afd.geometric_fit(np.array([2, 4] * 50))
    p = 1 / 3
    assert two["p"] == pytest.approx(p)
    # The trace's function has steps at 2 and 4, the fit's is 1 - (1 - p)^k: both ends of each step are candidates.
    fitted = [1 - (1 - p) ** length for length in range(1, 5)]
    assert two["distance"] == pytest.approx(max(fitted[0], abs(0.5 - fitted[1]), abs(fitted[2] - 0.5), 1 - fitted[3]))
    assert two["p_value"] == pytest.approx(1 / 200)
    assert [row["trace"] for row in two["quantiles"] if row["level"] in (0.25, 0.9)] == [2, 4]


def test_ratios_of_a_trace_follow_its_own_load() -> None:
    """Prompts of 10 go with answers of 1, and of 90 with 9: a slot is at the long ones 9 of 10 steps."""
    rows = afd.ratios(JointEmpirical([10, 90], [1, 9]))
    together = (10 * 1 + 90 * 9) / 10 + (1 * 0 + 9 * 8) / (2 * 10)
    apart = 50 + (1 * 0 + 9 * 8) / (2 * 10)
    assert [row["slot_load"] for row in rows] == pytest.approx([50 + 4, apart, together])
    assert rows[-1]["throughput"] == 1.0
    assert all(row["throughput"] <= 1 for row in rows)


def test_figure_3_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{100 + i},{1 + i % 7}\n" for i in range(70)))
    arguments = ["reproduce", "afd", "--trace", str(trace), "--runs", str(tmp_path)]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["requests"]) == ("twin.reproduction-afd/1", 70)
    folder = Path(document["run"]["directory"])
    assert {file.name for file in (folder / "figures").iterdir()} == {"latencies.svg", "lengths.svg"}
    output = "\n".join(lines_of(tables(document)))
    assert "closely follow a geometric distribution" in output
    assert f"{document['ratios'][0]['r_star']:.2f}" in output
    trace.write_text("num_prefill_tokens,num_decode_tokens\n1,x\n")
    assert run(arguments) == 2
