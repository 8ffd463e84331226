"""A measured run read from files, and compared with a prediction, against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twin.serving.results.report import compare, read_reference_run
from workloads.errors import BadInput

ROWS = [(10.0, 10.5, 12.5, 5), (11.0, 12.0, 12.0, 1), (12.0, 13.5, 14.5, 3)]
"""Queued, first token and last token in seconds, and output tokens."""


def write(folder: Path, rows: list[tuple[Any, ...]]) -> Path:
    file = folder / "measured" / "requests.jsonl"
    file.parent.mkdir(exist_ok=True)
    names = ("queued_ts", "first_token_ts", "last_token_ts", "output_toks")
    file.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows) + "\n\n")
    return file


def test_metrics(tmp_path: Path) -> None:
    reference = read_reference_run(write(tmp_path, ROWS))
    assert (reference["source"], reference["requests"]) == ("measured/requests.jsonl", 3)
    summary = reference["summary"]
    assert summary["ttft"]["mean"] == pytest.approx((0.5 + 1.0 + 1.5) / 3)
    assert summary["tpot"]["mean"] == pytest.approx((2 / 4 + 1 / 2) / 2)
    assert summary["e2e"]["mean"] == pytest.approx((2.5 + 1.0 + 2.5) / 3)
    assert summary["e2e"]["p50"] == 2.5
    # Nine tokens from the first request's queueing to the last answer.
    assert summary["output_throughput"] == pytest.approx(9 / 4.5)
    curves = reference["quantiles"]
    assert curves["p"] == pytest.approx([i / 100 for i in range(101)])
    assert curves["ttft"] == pytest.approx([0.5 + i / 100 for i in range(101)])
    assert "time" not in reference


def test_time_series(tmp_path: Path) -> None:
    series = tmp_path / "series.csv"
    series.write_text("waiting,t,running\n0,0.5,1\n3,1.5,2\n")
    reference = read_reference_run(write(tmp_path, ROWS), series)
    assert (reference["time"], reference["running"], reference["waiting"]) == ([0.5, 1.5], [1.0, 2.0], [0.0, 3.0])
    series.write_text("t,running\n0,1\n")
    with pytest.raises(BadInput, match="columns t, running and waiting"):
        read_reference_run(write(tmp_path, ROWS), series)


@pytest.mark.parametrize(
    ("line", "number"), [("[1, 2]", 4), ('{"queued_ts": 1, "first_token_ts": 2, "last_token_ts": 3}', 4), ("{", 4)]
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, number: int) -> None:
    file = write(tmp_path, ROWS)
    file.write_text(file.read_text().rstrip("\n") + f"\n{line}\n")
    with pytest.raises(BadInput, match="expected a JSON object") as refused:
        read_reference_run(file)
    assert refused.value.line == number


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at least one request"):
        read_reference_run(write(tmp_path, []))


def test_relative_errors_of_metrics_that_both_have() -> None:
    predicted = {"ttft": {"mean": 0.9, "p50": 0.4}, "tpot": {"mean": None}, "output_throughput": 110.0}
    measured = {"ttft": {"mean": 1.0, "p99": 3.0}, "tpot": {"mean": 0.1}, "e2e": {"mean": 0.0}}
    assert compare(predicted, {**measured, "output_throughput": 100.0}) == {
        "ttft.mean": {"measured": 1.0, "predicted": 0.9, "error": pytest.approx(-0.1)},
        "output_throughput": {"measured": 100.0, "predicted": 110.0, "error": pytest.approx(0.1)},
    }
