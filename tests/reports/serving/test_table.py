"""Tables for a terminal: every number in its place and unit."""

from __future__ import annotations

from typing import Any

import pytest

from reports.fields import in_words, varying
from reports.serving_sentences import change, footnote, headline, warnings
from tests.reports.rendering import lines_of
from tests.reports.serving.documents import measured, replicated, simulation, spread, sweep


def words(document: dict[str, Any]) -> list[list[str]]:
    """Words of each line."""
    return [line.split() for line in lines_of(document)]


def line(lines: list[list[str]], *start: str) -> str:
    """The rest of the one line that starts so."""
    (matches,) = [row for row in lines if row[: len(start)] == list(start)]
    return " ".join(matches[len(start) :])


def test_the_answer_in_one_sentence() -> None:
    assert headline(simulation()) == (
        "chats & judges: 40 requests, 813 output tokens/s of the whole system, TTFT 120 ms, TPOT 25 ms on average"
    )
    summary = simulation()["summary"] | {"goodput": 3.14159, "tpot": None, "output_throughput": None}
    assert headline(simulation(summary=summary)) == "chats & judges: 40 requests, goodput 3.14 requests/s"


def test_latencies_in_milliseconds() -> None:
    lines = words(simulation())
    assert line(lines, "mean") == "p50 p90 p95 p99"
    assert line(lines, "TTFT") == "120 ms 108 ms 180 ms 210 ms 300 ms"
    assert line(lines, "TPOT").startswith("25 ms ")
    assert line(lines, "ITL").endswith(" 65 ms")
    assert line(lines, "E2E").startswith("1500 ms 1350 ms ")
    assert line(lines, "prefill", "tokens") == "5120, cached tokens 640, preemptions 3, steps 77"
    assert line(lines, "busy") == "62.5 %, load 25 %, KV blocks in use 50 %"


def test_sessions_have_a_line() -> None:
    sessions = {
        "count": 12, "turns": 3.25, "requests": 4.0, "time": spread(90.0), "waited": spread(30.0),
        "resent_tokens": 5000, "resent_share": 0.8, "resent_cached": 0.955,
    }  # fmt: skip
    lines = words(simulation(summary=simulation()["summary"] | {"sessions": sessions}))
    assert line(lines, "12", "sessions", "of", "3.25", "turns:") == (
        "90 s to the last answer on average (p99 225 s), of which 30 s waiting for answers; "
        "80 % of their prompt tokens were sent before, and the cache had 95.5 % of these"
    )
    nothing = sessions | {"count": 0, "time": None, "waited": None}
    lines = words(simulation(summary=simulation()["summary"] | {"sessions": nothing}))
    assert ["0", "sessions"] in lines
    once = sessions | {"resent_cached": None}
    lines = words(simulation(summary=simulation()["summary"] | {"sessions": once}))
    assert line(lines, "12", "sessions").endswith("waiting for answers")


def test_a_sweep_shows_sessions_where_there_are_some() -> None:
    document = sweep()
    assert "resent cached" not in " ".join(lines_of(document, 400))
    for point in document["points"]:
        point["summary"]["sessions"] = {"time": spread(90.0), "resent_cached": 0.9}
    lines = lines_of((document), 400)
    assert any("session s" in row and "resent cached" in row for row in lines)
    assert any(" 90 " in row and " 90 %" in row for row in lines)


def test_a_latency_that_nobody_had_has_no_row() -> None:
    lines = words(simulation(summary=simulation()["summary"] | {"tpot": None}))
    assert [row[0] for row in lines if row and row[0] in ("TTFT", "TPOT", "ITL", "E2E")] == ["TTFT", "ITL", "E2E"]


def test_intervals_stand_below_their_metric() -> None:
    lines = words(replicated())
    assert line(lines, "expectation") == "110 ms to 130 ms"
    assert line(lines, "another", "run") == "90 ms to 150 ms"
    assert footnote(replicated()).endswith(
        "kernel tables (h200.yaml). 6 runs; 95 % intervals of sampling and model together."
    )
    assert footnote(simulation()).endswith("(h200.yaml). One run; --replications gives intervals.")
    fixed = footnote(simulation(random=[]))
    assert fixed.endswith("no interval: everything in this run is fixed, and the error of these step times is unknown.")
    assert footnote(simulation(random=["step_time"])).endswith("fixed but its step times; --draws gives intervals.")


def test_errors_are_taken_apart_and_assumptions_stand_in_their_order() -> None:
    lines = words(replicated())
    assert line(lines, "TTFT", "of", "one") == "run, standard deviation: sampling 5.1 %, model 12 %"
    assert line(lines, "output", "of", "one") == "run, standard deviation: sampling unknown, model 1.3 %"
    assert line(lines, "host", "time") == "8 % 3 % 4 % 0.5 % assumed a step log"
    fixed = {**replicated(), "random": ["step_time"]}
    matches = [text for text in lines_of(fixed) if text.startswith("output of one run")]
    assert matches == [
        "output of one run, standard deviation: sampling none (arrivals and lengths are fixed), model 1.3 %"
    ]


def test_intervals_without_the_error_of_the_model_say_so() -> None:
    sampled = {**replicated(), "draws": 0, "assumptions": []}
    assert footnote(sampled).endswith("95 % intervals of sampling alone: the error of these step times is unknown.")
    sampled["random"] = ["lengths", "step_time"]
    assert footnote(sampled).endswith("95 % intervals of sampling alone; --draws adds the model's error.")


def test_a_measured_run_stands_beside() -> None:
    lines = words(measured())
    assert ["beside", "rtx/requests.jsonl"] in lines
    assert line(lines, "ttft.mean") == "125 ms 120 ms -4.00 %"
    assert line(lines, "output_throughput") == "800 812.6 +1.57 %"


def test_a_sweep_compares_each_row_with_the_first() -> None:
    lines = words(sweep())
    titles = (
        "rate scheduling_policy TTFT mean TTFT P99 TPOT mean TPOT P99 ITL P99 "
        "user tok/s Δ user output tok/s Δ output load"
    )
    assert titles.split() in lines
    assert line(lines, "2", "fcfs") == "120 ms ±17 % 300 ms 20 ms 50 ms 65 ms 50 400 25 %"
    assert line(lines, "4", "fcfs") == "120 ms 300 ms 25 ms 62.5 ms 65 ms 40 -20.0 % 600 +50.0 % 25 %"
    assert line(lines, "2", "priority") == "120 ms 300 ms 16 ms 40 ms 65 ms 62.5 +25.0 % 440 +10.0 % 25 %"
    assert line(lines, "4", "priority") == "– – – – – – – – – 25 %"


def test_what_all_rows_share_is_said_once() -> None:
    document = sweep()
    for point in document["points"]:
        point["settings"]["engine.max_num_seqs"] = 640
        point["summary"]["goodput"] = 2.5
    text = lines_of(document)
    assert text[0] == "orders with engine.max_num_seqs=640"
    assert " ".join(text).count("640") == 1
    assert all("2.5" in row.split() for row in text[2:6])
    document["points"] = document["points"][:1]
    assert lines_of(document)[0].endswith("engine.scheduling_policy=fcfs, engine.max_num_seqs=640")


def test_devices_and_their_cost_have_columns_where_they_are_known() -> None:
    document = sweep()
    for i, point in enumerate(document["points"]):
        point["devices"] = {"total": 4 * (i + 1), "by_type": {"H200": 4 * (i + 1)}, "cost_per_hour": 12.5 * (i + 1)}
        point["summary"] |= {"goodput": 1.5, "goodput_share": 0.75}
        if point["summary"]["output_throughput"]:
            per_device = point["summary"]["output_throughput"] / (4 * (i + 1))
            point["summary"] |= {"output_throughput_per_device": per_device, "cost_per_million_output_tokens": 8.68}
    lines = words(document)
    assert any(" ".join(row).endswith("in SLO load GPUs tok/s/GPU cost/h cost/M tokens") for row in lines)
    assert line(lines, "2", "fcfs").endswith("1.5 75 % 25 % 4 100 12.5 8.68")
    assert line(lines, "4", "priority").endswith("1.5 75 % 25 % 16 – 50 –")


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_has_fewer_columns_and_whole_ones(width: int) -> None:
    text = lines_of(sweep(), width)
    wide = lines_of(sweep(), 200)
    assert max(map(len, text)) <= width
    header = text[1]
    assert "TPOT mean" in header
    assert "output tok/s" in header
    assert "…" not in " ".join(text)
    expected = " ".join(text).split("Left out for lack of width: ")[1].split(". ")[0].rstrip(".").split(", ")
    assert not [title for title in expected if title in header]
    assert {*header.split(), *" ".join(expected).split()} == set(wide[1].split())
    rows = [row.split()[:2] for row in text[2:6]]
    assert rows == [["2", "fcfs"], ["4", "fcfs"], ["2", "priority"], ["4", "priority"]]


def test_a_sweep_says_whether_there_are_intervals_and_where_step_times_come_from() -> None:
    document = sweep()
    document["points"][0]["intervals"] = {}
    text = " ".join(lines_of(document))
    assert "Step times: kernel tables (h200.yaml). One run each; --replications gives intervals." in text
    assert "95 %" not in text
    for point in document["points"]:
        point["replications"] = 10
        point["intervals"] = {"output_throughput": {"confidence": [380.0, 420.0], "prediction": [300.0, 500.0]}}
    document["points"][1]["step_time"] = {"source": "kernel_tables", "path": "a100.yaml"}
    text = " ".join(lines_of(document))
    assert "Step times: 2 sources, as the rows say. 10 runs each; 95 % intervals of sampling alone: the error" in text
    assert "400 ±5 %" in text
    assert "±: half a 95 % interval of the mean" in text


def test_what_lies_outside_is_said_once() -> None:
    expected = "extrapolated: kv_tokens up to 70000 lies outside what the step times were measured for"
    document = sweep()
    document["points"][0]["outside"] = {"kv_tokens": 70000.0}
    assert warnings(document["points"][0]) == [expected]
    document["points"][1]["step_time"]["notes"] = ["assumed: LoRA"]
    text = " ".join(lines_of(document))
    assert text.count(expected) == 1
    first, second, _, last = (in_words(row["settings"], varying([p["settings"] for p in document["points"]]))
                     for row in document["points"])  # fmt: skip
    assert f"{first}; {last}: {expected}" in text
    assert f"{second}: assumed: LoRA" in text
    assert warnings(simulation()) == []
    assert expected.split() in words(simulation(outside={"kv_tokens": 70000.0}))


def test_overload_is_said_in_one_line() -> None:
    overload = {"engines": ["engine-0"], "arrival_rate": 12.04, "service_rate": 10.5, "waiting": 300}
    expected = (
        "overloaded: 12 requests/s arrive at engine-0 and 10.5 are started, so latencies grow with the length of the "
        "run (300 requests wait at the last arrival)"
    )
    assert warnings(simulation(saturated=True, overload=overload)) == [expected]
    assert expected.split() in words(simulation(saturated=True, overload=overload))
    several = overload | {"engines": ["engine-0", "engine-1", "engine-2"]}
    assert "arrive at engine-0 to engine-2 and" in warnings(simulation(saturated=True, overload=several))[0]
    assert warnings(simulation(saturated=False, overload=overload)) == []


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [(3.0, 2.0, "+50.0 %"), (1.0, 2.0, "-50.0 %"), (2.0, 2.0, ""), (None, 2.0, ""), (2.0, None, ""), (2.0, 0.0, "")],
)
def test_changes(value: Any, reference: Any, text: str) -> None:
    assert change(value, reference) == text
