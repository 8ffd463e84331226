"""Records of a long run: handed on in parts, with the summary unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.twin.serving.scenarios import plan_for, run, scenario
from twin.serving.records.requests import PART, Columns, RequestRecord
from twin.serving.results import summary
from twin.serving.run.simulation import Simulation
from workloads.request import Request

Table = dict[str, Any]


def add(columns: Columns, number: int) -> None:
    record = RequestRecord(Request(number, float(number), 10 + number % 7, 5, f"model-{number % 3}"), 5)
    record.queued = number + 0.5
    record.first_token = number + 1.0
    record.last_token = number + 2.0
    record.output_tokens = number % 5
    record.replica = f"engine-{number % 2}"
    columns.add(record)


def test_parts_together_are_the_table() -> None:
    parts: list[Table] = []
    in_memory, streamed = Columns(detail=True), Columns(detail=True, sink=parts.append)
    for number in range(2 * PART + 10):
        add(in_memory, number)
        add(streamed, number)
    assert [len(part["id"]) for part in parts] == [PART, PART]
    streamed.flush()
    streamed.flush()
    assert [len(part["id"]) for part in parts] == [PART, PART, 10]
    for name, column in in_memory.table().items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), column)
        assert parts[0][name].dtype.kind == column.dtype.kind
    for name in ("arrival", "queued", "first_token", "last_token", "output_tokens", "one_shot"):
        assert getattr(streamed, name) == getattr(in_memory, name)
    assert not streamed.id


def test_a_run_with_a_sink_keeps_its_summary() -> None:
    document = scenario()
    plan = plan_for(document)
    parts: list[Table] = []
    streamed, retained = Simulation(plan, sink=parts.append).run(), run(document)
    (part,) = parts
    for name, column in retained.columns.table().items():
        assert np.array_equal(part[name], column)
    measure = plan.scenario.measure
    assert summary.summarise(streamed, measure) == summary.summarise(retained, measure)


@pytest.mark.parametrize("measure", [{}, {"after": 0.5, "before": 1.1}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_latencies_between_tokens_in_parts_are_those_of_the_whole(
    measure: dict[str, float], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps over preemptions and several engines change nothing."""
    document = scenario(
        measure=measure, system={"layout": "colocated", "replicas": 2},
        engine={"num_gpu_blocks": 20, "async_scheduling": asynchronous},
        workload={"prefill": {"distribution": "fixed", "mean": 60}},
    )  # fmt: skip
    result, spec = run(document), plan_for(document).scenario.measure
    together = summary.summarise(result, spec)["itl"]
    monkeypatch.setattr(summary, "MANY_STEPS", 0)
    monkeypatch.setattr(summary, "STEPS_OF_PART", 3)
    in_parts = summary.summarise(result, spec)["itl"]
    assert in_parts.pop("mean") == pytest.approx(together.pop("mean"), rel=1e-12)
    assert in_parts == together


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_latencies_between_tokens_add_up_to_the_time_of_decoding(asynchronous: bool, seed: int) -> None:
    """A prompt that is computed again may be preempted before its step has ended."""
    document = scenario(
        seed=seed, engine={"num_gpu_blocks": 12, "async_scheduling": asynchronous},
        workload={
            "prefill": {"distribution": "uniform", "low": 1, "high": 30},
            "decode": {"distribution": "uniform", "low": 20, "high": 80},
            "arrivals": {"process": "poisson", "rate": 400},
        },
    )  # fmt: skip
    result, spec = run(document), plan_for(document).scenario.measure
    table = result.columns.table()
    assert table["preemptions"].max() > 0
    gaps, weights = summary.pooled_gaps(result.logs, spec)
    assert (gaps * weights).sum() == pytest.approx((table["last_token"] - table["first_token"]).sum())
