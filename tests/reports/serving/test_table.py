"""Tables for a terminal: every number in its place and unit."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from reports.serving.table import change, footnote, headline, simulation_table, sweep_table, warnings
from tests.reports.serving.documents import measured, replicated, simulation, spread, sweep


def shown(table: RenderableType) -> list[list[str]]:
    """Words of each line."""
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return [line.split() for line in text.getvalue().splitlines()]


def line(lines: list[list[str]], *start: str) -> str:
    """What follows in the one line that starts so."""
    (found,) = [each for each in lines if each[: len(start)] == list(start)]
    return " ".join(found[len(start) :])


def test_the_answer_in_one_sentence() -> None:
    assert headline(simulation()) == (
        "chats & judges: 40 requests, 813 output tokens/s of the whole system, TTFT 120 ms, TPOT 25 ms on average"
    )
    summary = simulation()["summary"] | {"goodput": 3.14159, "tpot": None, "output_throughput": None}
    assert headline(simulation(summary=summary)) == "chats & judges: 40 requests, goodput 3.14 requests/s"


def test_latencies_in_milliseconds() -> None:
    lines = shown(simulation_table(simulation()))
    assert line(lines, "mean") == "p50 p90 p95 p99"
    assert line(lines, "TTFT") == "120 ms 108 ms 180 ms 210 ms 300 ms"
    assert line(lines, "TPOT").startswith("25 ms ")
    assert line(lines, "ITL").endswith(" 65 ms")
    assert line(lines, "E2E").startswith("1500 ms 1350 ms ")
    assert line(lines, "prefill", "tokens") == "5120, cached tokens 640, preemptions 3, steps 77"


def test_ten_seconds_are_not_told_in_milliseconds() -> None:
    summary = simulation()["summary"] | {"e2e": spread(12.0)}
    lines = shown(simulation_table(simulation(summary=summary)))
    assert line(lines, "E2E").startswith("12 s 10.8 s ")


def test_a_latency_that_nobody_had_has_no_row() -> None:
    lines = shown(simulation_table(simulation(summary=simulation()["summary"] | {"tpot": None})))
    assert [each[0] for each in lines if each and each[0] in ("TTFT", "TPOT", "ITL", "E2E")] == ["TTFT", "ITL", "E2E"]


def test_intervals_stand_below_their_metric() -> None:
    lines = shown(simulation_table(replicated()))
    assert line(lines, "expectation") == "110 ms to 130 ms"
    assert line(lines, "another", "run") == "90 ms to 150 ms"
    assert footnote(replicated()).endswith("kernel tables (h200.yaml). 8 runs; 95 % intervals.")
    assert footnote(simulation()).endswith("(h200.yaml). One run; --replications gives intervals.")


def test_a_measured_run_stands_beside() -> None:
    lines = shown(simulation_table(measured()))
    assert ["beside", "rtx/requests.jsonl"] in lines
    assert line(lines, "ttft.mean") == "125 ms 120 ms -4.00 %"
    assert line(lines, "output_throughput") == "800 812.6 +1.57 %"


def test_a_sweep_compares_each_row_with_the_first() -> None:
    lines = shown(sweep_table(sweep()))
    assert line(lines, "2", "fcfs") == "120 ms 300 ms 20 ms 65 ms 50.0 tok/s 400"
    assert line(lines, "4", "fcfs") == "120 ms 300 ms 25 ms 65 ms 40.0 tok/s -20.0 % 600 +50.0 %"
    assert line(lines, "2", "priority") == "120 ms 300 ms 16 ms 65 ms 62.5 tok/s +25.0 % 440 +10.0 %"
    assert line(lines, "4", "priority") == "– – – – – –"


def test_what_lies_outside_is_said_once() -> None:
    told = "extrapolated: kv_tokens up to 70000 lies outside what the step times were measured for"
    document = sweep()
    document["points"][0]["outside"] = {"kv_tokens": 70000.0}
    assert warnings(document["points"][0]) == [told]
    assert shown(sweep_table(document)).count(told.split()) == 1
    assert warnings(simulation()) == []
    assert told.split() in shown(simulation_table(simulation(outside={"kv_tokens": 70000.0})))


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [(3.0, 2.0, "+50.0 %"), (1.0, 2.0, "-50.0 %"), (2.0, 2.0, ""), (None, 2.0, ""), (2.0, None, ""), (2.0, 0.0, "")],
)
def test_changes(value: Any, reference: Any, text: str) -> None:
    assert change(value, reference) == text
