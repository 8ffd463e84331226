"""A run of four requests worked out by hand, against everything that is recorded and reported of it.

A step takes a tick for every token in it, and holds at most 64 tokens.

    ticks      step
    0 - 32     the 32 prompt tokens of request 0
    32 - 96    a decode of request 0, and 63 of the 64 prompt tokens of request 1, which came at 16
    96 - 98    the last decode of request 0, and the last prompt token of request 1
    98 - 99    the only decode of request 1
    160 - 176  the prompt of request 2, whose answer is one token
    192 - 208  the prompt of request 3
    208 - 217  nine decodes of request 3

In the middle of each pause nothing runs. Blocks hold 16 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from reports.serving_run import trace_events
from scenarios.fields import MeasureSpec
from tests.twin.serving.by_hand import TICK, measured, play, requests
from twin.serving.results.report import timeseries
from twin.serving.results.summary import Run, engine_summaries, summarise

ROWS = [(0, 32, 3), (16, 64, 2), (160, 16, 1), (192, 16, 10)]
END, BUSY, SEATS = 217, 140, 98 + 67 + 16 + 25
BLOCKS = (2 * 32 + 3 * 66) + (4 * 66 + 5) + 16 + (16 + 2 * 9)
"""Blocks in use times ticks, of each request in turn."""


@pytest.fixture(params=[True, False], ids=["fast", "slow"])
def story(request: pytest.FixtureRequest) -> Run:
    return play(ROWS, fast_forward=request.param)


def ticks(values: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if values is None else {name: pytest.approx(value / TICK) for name, value in values.items()}


def test_records(story: Run) -> None:
    assert requests(story) == {
        "id": [0, 1, 2, 3],
        "arrival": [0, 16, 160, 192],
        "queued": [0, 32, 160, 192],
        "scheduled": [0, 32, 160, 192],
        "first_token": [32, 98, 176, 208],
        "last_token": [98, 99, 176, 217],
        "prompt_tokens": [32, 64, 16, 16],
        "output_tokens": [3, 2, 1, 10],
        "cached_tokens": [0] * 4,
        "preemptions": [0] * 4,
        "attempts": [0] * 4,
        "one_shot": [False, False, True, False],
        "model": ["default"] * 4,
        "replica": ["engine-0"] * 4,
    }


def test_a_summary_of_everything(story: Run) -> None:
    summary = summarise(story, MeasureSpec())
    assert story.end == END * TICK
    assert {name: value for name, value in summary.items() if not isinstance(value, dict)} == {
        "requests": 4,
        "duration": pytest.approx(END * TICK),
        "output_tokens": 16,
        "output_throughput": pytest.approx(16 / (END * TICK)),
        "request_throughput": pytest.approx(4 / (END * TICK)),
        "prefill_tokens": 128,
        "cached_tokens": 0,
        "preemptions": 0,
        "steps": 15,
        "busy": pytest.approx(BUSY / END),
        "load": pytest.approx(SEATS / END / 16),
        "kv_used": pytest.approx(BLOCKS / END / 400),
        "littles_law_error": pytest.approx(0, abs=1e-12),
    }
    # TTFT 32, 82, 16, 16; TPOT (98 - 32) / 2, 1, 1; E2E 98, 83, 16, 25. The gaps between tokens are 64, 2 and ten of 1.
    assert ticks(summary["ttft"]) == {"mean": 36.5, "p50": 24.0, "p90": 67.0, "p95": 74.5, "p99": 80.5}
    assert ticks(summary["tpot"]) == {"mean": 35 / 3, "p50": 1.0, "p90": 26.6, "p95": 29.8, "p99": 32.36}
    assert ticks(summary["e2e"]) == {"mean": 55.5, "p50": 54.0, "p90": 93.5, "p95": 95.75, "p99": 97.55}
    itl = {"mean": 76 / 12, "p50": 1.0, "p90": 1.9, "p95": 2 + 62 * 0.45, "p99": 2 + 62 * 0.89}
    assert itl == ticks(summary["itl"])


def test_an_engine_of_everything(story: Run) -> None:
    (entry,) = engine_summaries(story)
    assert entry == {
        "name": "engine-0",
        "steps": 15,
        "busy": pytest.approx(BUSY / END),
        "load": pytest.approx(SEATS / END / 16),
        "kv_used": pytest.approx(BLOCKS / END / 400),
        "prefill_tokens": 128,
        "cached_tokens": 0,
        "preemptions": 0,
    }


@pytest.mark.parametrize(
    ("fields", "counts", "tokens", "span"),
    [
        ({}, 4, 16, 217),  # from the first arrival to the last answer
        ({"after": 99}, 3, 13, 217 - 99),  # request 1 ends at 99
        ({"after": 99.5}, 2, 11, 217 - 99.5),
        ({"before": 99}, 1, 3, 99),  # and so it is not before 99
        ({"before": 99.5}, 2, 5, 99.5),
        ({"before": 300}, 4, 16, 217),  # nothing runs after 217
        ({"after": 99, "before": 200}, 2, 3, 200 - 99),
        ({"after": 99, "before": 300}, 3, 13, 217 - 99),
    ],
)
def test_throughput_over_the_measured_window(
    story: Run, fields: dict[str, Any], counts: int, tokens: int, span: float
) -> None:
    summary = summarise(story, measured(**fields))
    assert (summary["requests"], summary["output_tokens"]) == (counts, tokens)
    assert summary["duration"] == pytest.approx(span * TICK)
    assert summary["output_throughput"] == pytest.approx(tokens / (span * TICK))
    assert summary["request_throughput"] == pytest.approx(counts / (span * TICK))


def test_a_window_begins_with_the_first_arrival() -> None:
    """The same story, a thousand ticks later."""
    late = play([(arrival + 1000, prompt, answer) for arrival, prompt, answer in ROWS])
    assert summarise(late, MeasureSpec())["duration"] == pytest.approx(END * TICK)
    assert summarise(late, measured(after=1000))["duration"] == pytest.approx(END * TICK)
    assert summarise(late, MeasureSpec())["busy"] == pytest.approx(BUSY / (1000 + END))


def test_a_window_in_which_no_request_ends(story: Run) -> None:
    summary = summarise(story, measured(after=100, before=150, slo={"ttft": 100}))
    names = ("requests", "duration", "output_tokens", "output_throughput", "request_throughput", "goodput")
    assert [summary[name] for name in names] == [0, 0.0, 0, None, None, None]
    assert [summary[name] for name in ("ttft", "tpot", "e2e", "itl")] == [None] * 4


def test_inter_token_latencies_are_those_of_the_steps_in_the_window(story: Run) -> None:
    """Tokens after the first come at 96, 98, 99 and 209 to 217; `after` counts, `before` does not."""
    assert summarise(story, measured(after=98, before=99))["itl"]["mean"] == pytest.approx(2 * TICK)
    assert summarise(story, measured(after=96, before=209))["itl"]["mean"] == pytest.approx((64 + 2 + 1) / 3 * TICK)


def test_from_when_an_engine_takes_a_request_in(story: Run) -> None:
    """Request 1 waits 16 ticks to be noticed."""
    summary = summarise(story, MeasureSpec(start="queued"))
    assert summary["ttft"]["mean"] == pytest.approx((32 + 66 + 16 + 16) / 4 * TICK)
    assert summary["e2e"]["mean"] == pytest.approx((98 + 67 + 16 + 25) / 4 * TICK)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 32}, 3),  # a goal that is just met is met
        ({"ttft": 31.5}, 2),
        ({"ttft": 82}, 4),
        ({"tpot": 1}, 3),  # an answer of one token has no gap
        ({"tpot": 0.5}, 1),
        ({"tpot": 33}, 4),
        ({"e2e": 25}, 2),
        ({"ttft": 32, "tpot": 1}, 2),
        ({"ttft": 16, "e2e": 16}, 1),
    ],
)
def test_goodput(story: Run, slo: dict[str, float], good: int) -> None:
    assert summarise(story, measured(slo=slo))["goodput"] == pytest.approx(good / (END * TICK))


def test_goodput_counts_from_where_latencies_do(story: Run) -> None:
    """Request 1 has its first token 82 ticks after it was submitted and 66 after it was queued."""
    summary = summarise(story, measured(slo={"ttft": 66}, start="queued"))
    assert summary["goodput"] == pytest.approx(4 / (END * TICK))
    assert "goodput" not in summarise(story, MeasureSpec())


def test_series(story: Run) -> None:
    series = timeseries(story, MeasureSpec())
    expected = {
        # From these ticks on, so many requests run and wait, and so many blocks are in use.
        0: (1, 0, 2), 32: (2, 0, 7), 98: (1, 0, 5), 99: (0, 0, 0), 160: (1, 0, 1), 176: (0, 0, 0), 192: (1, 0, 1),
        208: (1, 0, 2), 217: (0, 0, 0),
    }  # fmt: skip
    assert series["time"] == pytest.approx([i * END * TICK / 399 for i in range(400)])
    for i, time in enumerate(series["time"]):
        observations = (series["running"][i], series["waiting"][i], series["kv_used"][i] * 400)
        assert observations == pytest.approx(expected[max(since for since in expected if since * TICK <= time)])
    curves = series["quantiles"]
    assert curves["p"] == pytest.approx([i / 100 for i in range(101)])
    for name, values in {"ttft": [16, 16, 32, 82], "tpot": [1, 1, 33], "e2e": [16, 25, 83, 98]}.items():
        for i in (0, 25, 50, 75, 100):
            at = i / 100 * (len(values) - 1)
            low = min(int(at), len(values) - 2)
            value = values[low] + (values[low + 1] - values[low]) * (at - low)
            assert curves[name][i] == pytest.approx(value * TICK)
    # Twelve gaps: ranks up to 9 of 0 to 11 are 1, then 2 and 64.
    assert [curves["itl"][i] for i in (0, 50, 90, 91, 99, 100)] == pytest.approx(
        [row * TICK for row in (1, 1, 1, 2, 2, 64)]
    )


KINDS = ["mixed"] * 3 + ["decode"] + ["mixed"] * 2 + ["decode"] * 9


def test_kinds_of_steps_in_the_trace() -> None:
    """Step by step, each is a slice of its own; passed over, decodes of request 3 are one slice and its last."""
    slow = [event for event in trace_events(play(ROWS, fast_forward=False).logs, NONE) if event["ph"] == "X"]
    assert [row["name"] for row in slow] == KINDS
    assert [row["args"].get("prompt tokens") for row in slow] == [32, 63, 1, 0, 16, 16, *[0] * 9]
    begins = [0, 32, 96, 98, 160, 192, *range(208, 217)]
    ends = [32, 96, 98, 99, 176, 208, *range(209, 218)]
    assert [row["ts"] for row in slow] == pytest.approx([begin * TICK * 1e6 for begin in begins])
    assert [row["ts"] + row["dur"] for row in slow] == pytest.approx([end * TICK * 1e6 for end in ends])
    fast = [event for event in trace_events(play(ROWS).logs, NONE) if event["ph"] == "X"]
    assert [row["name"] for row in fast] == [*KINDS[:6], "decode ×8", "decode"]
    assert [row["ts"] for row in fast] == pytest.approx([begin * TICK * 1e6 for begin in (*begins[:7], 216)])


class NoRequests:
    id = arrival = first_token = last_token = ()


NONE = NoRequests()


def test_one_shot_steps_in_the_trace() -> None:
    """Three prompts, the second without an answer to speak of: it is one-shot alone, and mixed beside a decode."""
    engine = {"one_shot": {"tokens": 64}}
    run = play([(0, 16, 2), (8, 8, 1), (64, 8, 1)], engine=engine, fast_forward=False)
    slices = [event for event in trace_events(run.logs, NONE) if event["ph"] == "X"]
    assert [(row["name"], row["args"]["prompt tokens"]) for row in slices] == [
        ("mixed", 16), ("mixed", 8), ("one-shot", 8),
    ]  # fmt: skip
    assert requests(run)["last_token"] == [25, 25, 72]
    # One-shot work with a budget of its own takes no seat.
    assert engine_summaries(run)[0]["load"] == pytest.approx(25 / 72 / 16)


@pytest.mark.parametrize(
    ("answer", "passed_over"),
    [
        (2, ["mixed", "decode"]),
        (3, ["mixed", "decode", "decode"]),
        (4, ["mixed", "decode ×2", "decode"]),
        (10, ["mixed", "decode ×8", "decode"]),
    ],
)
@pytest.mark.parametrize("limit", [None, 50])
def test_decodes_are_passed_over_up_to_the_last(answer: int, passed_over: list[str], limit: int | None) -> None:
    """As many as there are, wherever the answer ends: at its limit or before it."""
    run = play([(0, 16, answer)], max_tokens=limit)
    assert [event["name"] for event in trace_events(run.logs, NONE) if event["ph"] == "X"] == passed_over
