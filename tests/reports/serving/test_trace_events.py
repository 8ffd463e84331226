"""Trace events are what Perfetto and chrome://tracing read: slices that lie end to end, spans that close, counters."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reports.serving_run import trace_events, write_trace_events


@dataclass
class Log:
    """Six steps: a mixed one, two that were passed over, a one-shot one after a pause, and two more passed over."""

    name: str = "engine-0"
    ends: list[float] = field(default_factory=lambda: [0.5, 0.6, 0.7, 1.25, 1.35, 1.45])
    index: list[int] = field(default_factory=lambda: [0, 3])
    starts: list[float] = field(default_factory=lambda: [0.25, 1.0])
    prefill_tokens: list[int] = field(default_factory=lambda: [64, 30])
    kinds: list[int] = field(default_factory=lambda: [1, 2])
    changes: list[float] = field(default_factory=lambda: [0.5, 2.0, 1.0, 90.0, 1.25, 3.0, 0.0, 80.0])
    outages: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Requests:
    id: tuple[int, ...] = (7, 9)
    arrival: tuple[float, ...] = (0.0, 0.2)
    first_token: tuple[float, ...] = (0.5, 1.25)
    last_token: tuple[float, ...] = (1.45, 1.25)


def events(ph: str, logs: list[Log] | None = None) -> list[dict[str, Any]]:
    return [event for event in trace_events(logs or [Log()], Requests()) if event["ph"] == ph]


def test_every_step_is_in_one_slice() -> None:
    slices = events("X")
    assert [event["name"] for event in slices] == ["mixed", "decode ×2", "one-shot", "decode ×2"]
    times = [(event["ts"], event["ts"] + event["dur"]) for event in slices]
    assert times == [
        pytest.approx(event) for event in [(0.25e6, 0.5e6), (0.5e6, 0.7e6), (1e6, 1.25e6), (1.25e6, 1.45e6)]
    ]
    assert [event["args"] for event in slices] == [{"prompt tokens": 64}, {}, {"prompt tokens": 30}, {}]
    assert {(event["pid"], event["tid"]) for event in slices} == {(1, 1)}


def test_an_outage_is_a_slice_of_its_engine() -> None:
    logs = [Log(), Log(name="engine-1", outages=[(0.75, 0.9), (2.0, 3.5)])]
    outages = [event for event in events("X", logs) if event["name"] == "outage"]
    assert [(event["pid"], event["tid"], event["ts"], event["dur"]) for event in outages] == [
        (2, 1, 0.75e6, pytest.approx(0.15e6)), (2, 1, 2e6, 1.5e6),
    ]  # fmt: skip


def test_a_log_without_steps_has_no_slices() -> None:
    assert events("X", [Log(ends=[], index=[], starts=[], prefill_tokens=[], kinds=[], changes=[])]) == []


def test_every_span_of_a_request_closes_after_it_opens() -> None:
    opened = {(event["id"], event["name"]): event["ts"] for event in events("b")}
    closed = {(event["id"], event["name"]): event["ts"] for event in events("e")}
    assert len(opened) == len(events("b")) == len(closed) == 4
    assert opened == {
        (7, "to first token"): 0.0, (7, "decode"): 0.5e6, (9, "to first token"): 0.2e6, (9, "decode"): 1.25e6,
    }  # fmt: skip
    assert closed == {
        (7, "to first token"): 0.5e6, (7, "decode"): 1.45e6, (9, "to first token"): 1.25e6, (9, "decode"): 1.25e6,
    }  # fmt: skip
    assert {(event["cat"], event["pid"]) for event in [*events("b"), *events("e")]} == {("request", 0)}


def test_counters_tell_what_changed() -> None:
    assert [(event["name"], event["ts"], event["args"]) for event in events("C")] == [
        ("requests", 0.5e6, {"running": 2.0, "waiting": 1.0}),
        ("free blocks", 0.5e6, {"free": 90.0}),
        ("requests", 1.25e6, {"running": 3.0, "waiting": 0.0}),
        ("free blocks", 1.25e6, {"free": 80.0}),
    ]


def test_counters_that_stay_are_not_told_again() -> None:
    """The second of three states changes blocks alone, and the third nothing."""
    log = Log(changes=[0.5, 2.0, 1.0, 90.0, 0.6, 2.0, 1.0, 89.0, 0.7, 2.0, 1.0, 89.0])
    assert [(event["name"], event["ts"]) for event in events("C", [log])] == [
        ("requests", 0.5e6), ("free blocks", 0.5e6), ("free blocks", 0.6e6),
    ]  # fmt: skip


def test_every_engine_is_a_process_with_its_name() -> None:
    logs = [Log(), Log(name="engine-1")]
    assert {event["pid"]: event["args"]["name"] for event in events("M", logs)} == {
        0: "requests", 1: "engine-0", 2: "engine-1",
    }  # fmt: skip
    assert len(events("X", logs)) == 8


def test_the_file_is_one_json_array_of_events_that_a_viewer_accepts(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    write_trace_events(file, [Log()], Requests())
    events = json.loads(gzip.decompress(file.read_bytes()))
    assert events == list(trace_events([Log()], Requests()))
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write_trace_events(tmp_path / "file" / "trace.json.gz", [Log()], Requests())
