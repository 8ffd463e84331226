"""Autoscaled pools in the simulation: the life of engines by hand, and integrity whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latency_models.io.config_io import write_yaml
from schedulers.replica_set import ScalingLog
from tests.twin.serving.scenarios import check_answers, plan_for, records, reported, run, run_both_ways, scenario
from tests.twin.serving.test_failures import outages
from twin.cli import run as cli
from twin.environment import Alarm, Priority
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation
from twin.serving.system.autoscaling import growth_until
from workloads.errors import BadInput

DAY = {"profile": {"swing": 0.9, "period": 4.0, "peak_at": 2.0}}


def scaled(policy: dict[str, Any], replicas: int = 2, **sections: Any) -> dict[str, Any]:
    """Colocated engines with a policy."""
    return scenario(**sections, system={"replicas": replicas, "autoscaling": {"engine": policy}})


def integral(log: ScalingLog, end: float) -> float:
    """The integral over time of the engines that are counted in any state."""
    rows = [row for row in log.changes if row[0] <= end]
    times = [*(row[0] for row in rows), end]
    return float(sum(sum(row[1:]) * (after - row[0]) for row, after in zip(rows, times[1:], strict=True)))


def check_seconds(result: Run) -> None:
    """Engine-seconds are the integral of engines over time."""
    assert result.scaling is not None
    for log in result.scaling:
        seconds = sum(log.engine_seconds(result.end).values())
        assert seconds == pytest.approx(integral(log, result.end), rel=1e-12)
        for name, spans in log.paid.items():
            flat = [time for span in spans for time in span if time is not None]
            assert flat == sorted(flat), name
        assert all(0 <= sum(row[1:]) <= len(log.engines) for row in log.changes)


# -- oracles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("routing", ["least_loaded", "round_robin", "power_of_two"])
def test_a_constant_schedule_is_a_fixed_fleet_to_the_last_digit(spare: int, routing: str) -> None:
    policy = {"policy": "scheduled", "schedule": [[0, 3]], "max_replicas": 3 + spare, "sync_period": 0.05}
    document = scenario(system={"replicas": 3, "routing": routing, "autoscaling": {"engine": policy}})
    fixed = scenario(system={"replicas": 3, "routing": routing})
    result, expected = run(document), run(fixed)
    assert {name: records(result)[name] for name in records(expected)} == records(expected)
    summary, before = reported(result, document)["summary"], reported(expected, fixed)["summary"]
    assert summary["autoscaling"]["engine_hours"] == pytest.approx(3 * result.end / 3600, rel=1e-12)
    assert {name: summary[name] for name in before} == {name: pytest.approx(before[name]) for name in before}


def test_the_life_of_an_engine_by_hand() -> None:
    """One engine becomes three at 1 s, 0.6 s later they are up; at 3 s two drain, the newest first."""
    policy = {
        "policy": "scheduled", "schedule": [[0, 1], [1, 3], [3, 1]], "max_replicas": 3, "sync_period": 0.5,
        "start_up": {"weight_bytes": 1e9, "bandwidth": 2e9, "warm_up": 0.1},
    }  # fmt: skip
    result = run(
        scaled(policy, replicas=1, workload={"requests": 300, "decode": {"distribution": "fixed", "mean": 60}})
    )
    assert result.scaling is not None
    (log,) = result.scaling
    up_to_drain = log.changes[:4]
    assert up_to_drain == [(0.0, 1, 0, 0, 0), (1.0, 1, 2, 0, 0), (1.6, 3, 0, 0, 0), (3.0, 1, 0, 2, 0)]
    assert log.changes[-1][1:] == (1, 0, 0, 0)
    table = result.columns.table()
    for name, spans in log.paid.items():
        mask = table["replica"] == name
        ((start, stop),) = spans
        assert start == (0.0 if name == "engine-0" else 1.0)
        if stop is not None:
            assert stop == table["last_token"][mask].max(), "it stops with its last answer"
            assert table["arrival"][mask].max() <= 3.0, "and gets no request while it drains"
            assert table["scheduled"][mask].min() >= 1.6
    check_seconds(result)


def test_a_starting_engine_that_fails_begins_anew_and_a_draining_one_stops() -> None:
    policy = {
        "policy": "scheduled", "schedule": [[0, 1], [1, 2], [4, 1]], "max_replicas": 2, "sync_period": 0.5,
        "start_up": {"warm_up": 1.0},
    }  # fmt: skip
    document = scaled(policy, 1, workload={"requests": 300, "decode": {"distribution": "fixed", "mean": 60}})
    document["failures"] = [
        {"engine": "engine-1", "at": 1.5, "duration": 0.25},
        {"engine": "engine-1", "at": 4.01, "duration": 1.0},
    ]
    result = run(document)
    assert result.scaling is not None
    (log,) = result.scaling
    assert log.changes == [
        (0.0, 1, 0, 0, 0), (1.0, 1, 1, 0, 0), (1.5, 1, 0, 0, 1), (1.75, 1, 1, 0, 0), (2.75, 2, 0, 0, 0),
        (4.0, 1, 0, 1, 0), (4.01, 1, 0, 0, 0),
    ]  # fmt: skip
    assert log.paid["engine-1"] == [(1.0, 4.01)]
    around = reported(result, document)["summary"]["outages"]
    arrival = result.columns.table()["arrival"]
    during = ((arrival >= 1.5) & (arrival < 1.75)) | ((arrival >= 4.01) & (arrival < 5.01))
    assert around["during"]["requests"] == during.sum() > 0
    after = ((arrival >= 1.75) & (arrival < 2.0)) | ((arrival >= 5.01) & (arrival < 6.01))
    assert around["after"]["requests"] == after.sum()
    assert sum(part["requests"] for part in around.values()) == len(arrival)


def test_a_prefill_engine_stops_when_its_caches_have_left() -> None:
    link = {"bandwidth": 32e3, "latency": 0.25, "bytes_per_token": 1000.0}  # a second for 32 tokens
    section = {"policy": "scheduled", "schedule": [[0, 2], [1, 1]], "max_replicas": 2, "sync_period": 0.5}
    result = run(
        scenario(
            workload={"requests": 40},
            system={
                "layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 1, "link": link,
                "autoscaling": {"prefill": section},
            },
        )
    )  # fmt: skip
    stop = result.scaling[0].paid["prefill-1"][0][1]
    busy = result.engines[1].log.end_of(-1)
    assert stop is not None
    assert stop > busy + 1.0, "it has sent for longer than it has computed"
    check_seconds(result)


def test_goals_are_met_by_a_planner_that_simulates() -> None:
    """Load for one engine, then for several: the planner follows, and stays within its goal but for the rise."""
    policy = {
        "policy": "slo", "goals": {"ttft_p99": "60ms"}, "max_replicas": 6, "sync_period": 2.0, "window": 6.0,
        "start_up": {"warm_up": 0.5},
    }  # fmt: skip
    steps = {"points": [[0, 1], [20, 6], [40, 1], [60, 1]], "between": "steps"}
    document = scaled(
        policy, 1, workload={"requests": 2400, "arrivals": {"process": "poisson", "rate": 40, "profile": steps}},
        engine={"max_num_seqs": 8}, measure={"slo": {"ttft": 0.06}},
    )  # fmt: skip
    result = run(document)
    assert result.scaling is not None
    (log,) = result.scaling
    by_time = {when: up for when, up, *_ in log.changes}
    assert max(up for when, up in by_time.items() if when < 20) == 1
    assert max(up for when, up in by_time.items() if 20 < when < 42) > 1
    table = result.columns.table()
    ttft, arrival = table["first_token"] - table["arrival"], table["arrival"]
    assert np.quantile(ttft[(arrival > 30) & (arrival < 40)], 0.99) < 0.06
    assert np.quantile(ttft[arrival < 18], 0.99) < 0.06
    assert records(run(document)) == records(result), "predictions are drawn from seeds"


@pytest.mark.parametrize(
    ("times", "until", "expected"),
    [
        ([1, 2, 3, 6, 7, 8], 20.0, 1.0),
        ([1, 6, 7], 10.0, 1 + 1 / 3),  # 0.2/s, then 0.4/s: 0.3/s in the middle, 0.5/s 7.5 s later
        ([1, 6, 7], 12.5, 1.5),
        ([1, 2, 6], 10.0, 1 - 1 / 3),
        ([6, 7, 8], 40.0, 4.0),
        ([1, 2, 3], 40.0, 0.25),
        ([], 40.0, 1.0),
    ],
)
def test_a_linear_forecast_by_hand(times: list[float], until: float, expected: float) -> None:
    """Of a window of ten seconds, whenever it begins."""
    for begin in (0.0, 100.0):
        growth = growth_until([begin + time for time in times], begin, begin + 10.0, begin + until)
        assert growth == pytest.approx(expected)


def test_predictions_are_those_of_the_simulation_itself() -> None:
    """A decision's prediction of a constant load is what a fixed fleet of that size has."""
    policy = {
        "policy": "slo", "goals": {"ttft_mean": "1s", "e2e_mean": 60}, "max_replicas": 3, "sync_period": 20.0,
        "window": 20.0, "max_requests": 5000,
    }  # fmt: skip
    document = scaled(policy, 2, workload={"requests": 900}, engine={"max_num_seqs": 8})
    plan = plan_for(document)
    simulation = Simulation(plan)
    (predictor,) = simulation.autoscaling._predictors
    simulation.environment.run_to(Alarm(Priority.ARRIVAL, lambda now: None), 20.0)
    observations = [dict(predictor.predict(engines)) for engines in (1, 2, 3)]
    for engines, result in enumerate(observations, start=1):
        fixed = run(scenario(workload={"requests": 900}, engine={"max_num_seqs": 8}, system={"replicas": engines}))
        table = fixed.columns.table()
        mask = table["arrival"] < 20.0
        ttft = (table["first_token"] - table["arrival"])[mask].mean()
        e2e = (table["last_token"] - table["arrival"])[mask].mean()
        assert result["ttft_mean"] == pytest.approx(ttft, rel=0.1)
        assert result["e2e_mean"] == pytest.approx(e2e, rel=0.1)


# -- integrity ---------------------------------------------------------------------------------------------------------

POLICIES: list[dict[str, Any]] = [
    {"policy": "target_utilization", "target": 0.5},
    {"policy": "target_utilization", "target": 0.6, "metric": "busy"},
    {"policy": "target_utilization", "target": 0.3, "metric": "kv_used"},
    {"policy": "queue_length", "target": 2},
    {"policy": "queue_length", "target": 4, "count": "unfinished"},
    {"policy": "scheduled", "schedule": [[0, 2], [0.4, 1], [0.8, 3]], "period": 1.0},
]

QUICK = {"scale_down": {"stabilization_window": 0.3}, "scale_up": {"policies": [{"type": "engines", "value": 2}]}}


def check(document: dict[str, Any]) -> None:
    """Every request ends exactly once and whole, no block is lost, and engine-seconds are the integral of engines."""
    result, slow = run_both_ways(document)  # checks blocks and the number of answers itself
    check_answers(result)
    check_seconds(result)
    assert result.scaling is not None
    assert slow.scaling is not None


@settings(max_examples=settings().max_examples // 2)
@given(
    st.sampled_from(POLICIES), st.sampled_from(POLICIES), outages(["prefill-0", "prefill-1", "decode-0", "decode-2"]),
    st.sampled_from([0.0, 0.3]), st.sampled_from([2e4, 1e9]), st.sampled_from([20, 60, 400]), st.booleans(),
)  # fmt: skip
def test_prefill_and_decode_engines_that_are_scaled_and_fail(
    prefill: dict[str, Any], decode: dict[str, Any], failures: list[dict[str, Any]], warm_up: float, bandwidth: float,
    blocks: int, asynchronous: bool,
) -> None:  # fmt: skip
    common = {"sync_period": 0.1, "start_up": {"warm_up": warm_up}, **QUICK}
    link = {"bandwidth": bandwidth, "latency": 0.05, "bytes_per_token": 100.0}
    check(
        scenario(
            workload={"requests": 40, "decode": {"distribution": "uniform", "low": 1, "high": 40}},
            engine={"num_gpu_blocks": blocks, "async_scheduling": asynchronous},
            system={
                "layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 2, "link": link,
                "autoscaling": {
                    "prefill": {"max_replicas": 3, **common, **prefill},
                    "decode": {"max_replicas": 3, **common, **decode},
                },
            },
            failures=failures,
        )
    )  # fmt: skip


@settings(max_examples=settings().max_examples // 8)
@given(st.sampled_from(["colocated", "disaggregated"]), outages(["engine-0", "engine-1"]), st.booleans())
def test_a_planner_decides_alike_with_and_without_fast_forwarding(
    layout: str, failures: list[dict[str, Any]], linear: bool
) -> None:
    """A prediction begins with a state that is known at every instant, and not at step ends alone."""
    common = {
        "policy": "slo", "max_replicas": 3, "sync_period": 0.25, "window": 0.5, "max_requests": 20,
        "start_up": {"warm_up": 0.2}, "forecast": "linear" if linear else "constant",
    }  # fmt: skip
    link = {"bandwidth": 1e6, "latency": 0.01, "bytes_per_token": 100.0}
    if layout == "colocated":
        system: dict[str, Any] = {"replicas": 2, "autoscaling": {"engine": {**common, "goals": {"ttft_p99": "30ms"}}}}
    else:
        failures = [{**failure, "engine": failure["engine"].replace("engine", "decode")} for failure in failures]
        system = {
            "layout": "disaggregated", "prefill_replicas": 1, "decode_replicas": 2, "link": link,
            "autoscaling": {
                "prefill": {**common, "goals": {"ttft_p90": "20ms"}},
                "decode": {**common, "goals": {"tpot_p90": "5ms"}},
            },
        }  # fmt: skip
    engine = {"max_num_seqs": 6}
    check(scenario(workload={"arrivals": {"process": "poisson", "rate": 40, **DAY}}, engine=engine, system=system,
                   failures=failures))  # fmt: skip


@settings(max_examples=settings().max_examples // 2)
@given(st.sampled_from(POLICIES), outages(["engine-0", "engine-1"]), st.booleans())
def test_sessions_stay_in_order(policy: dict[str, Any], failures: list[dict[str, Any]], tiers: bool) -> None:
    """A turn is sent after the answer before it, whatever engines do; with a tier of host memory below each."""
    section = {"max_replicas": 3, "sync_period": 0.1, "start_up": {"warm_up": 0.2}, **QUICK, **policy}
    offload = {"bytes_per_token": 100.0, "host": {"capacity": 3e4, "bandwidth": 1e6}} if tiers else None
    document = scenario(
        workload={
            "requests": 60,
            "sessions": {
                "source": "drawn", "turns": {"distribution": "fixed", "mean": 4}, "think": {"mean": 0.05},
                "growth": {"distribution": "fixed", "mean": 20},
            },
        },
        engine={"num_gpu_blocks": 60, "kv_offloading": offload},
        system={"replicas": 2, "routing": "prefix_aware", "autoscaling": {"engine": section}},
        failures=failures,
    )  # fmt: skip
    result = run(document)
    table = result.request_table()
    assert sorted(table["id"]) == list(range(60))
    for session in set(table["session"]):
        turns = np.flatnonzero(table["session"] == session)
        order = turns[np.argsort(table["turn"][turns], kind="stable")]
        assert (table["arrival"][order][1:] >= table["last_token"][order][:-1]).all()
    check_seconds(result)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"policy": "guess", "max_replicas": 2}, r"policy: got 'guess', expected one of target_u"),
        ({"policy": "queue_length", "max_replicas": 2}, r"expected parameters of queue_length: .*target"),
        ({"policy": "queue_length", "target": 1, "metric": "busy", "max_replicas": 2}, r"metric"),
        ({"policy": "queue_length", "target": 1, "max_replicas": 1}, r"got 2, expected the pool to begin with 1 to 1"),
        (
            {"policy": "queue_length", "target": 1, "min_replicas": 3, "max_replicas": 2},
            r"max_replicas: got 2, expected at least min_r",
        ),
        (
            {"policy": "slo", "goals": {"itl_p99": 1}, "max_replicas": 2},
            r"goals: got 'itl_p99', expected ttft, tpot or",
        ),
        ({"policy": "slo", "max_replicas": 2}, r"expected parameters of slo"),
        ({"policy": "scheduled", "schedule": [[1, 2]], "max_replicas": 2}, r"schedule: expected pairs"),
    ],
)
def test_sections_that_cannot_be_used_are_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(scaled(policy))


def test_a_pool_that_is_not_there_is_refused() -> None:
    document = scenario(system={"autoscaling": {"prefill": {"policy": "queue_length", "target": 1, "max_replicas": 2}}})
    with pytest.raises(BadInput, match=r"system\.autoscaling\.prefill: expected a pool: engine"):
        run(document)


def test_the_highest_load_of_a_fixed_fleet_refuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(write_yaml(scaled({"policy": "queue_length", "target": 1, "max_replicas": 2})))
    assert cli(["plan", str(tmp_path / "s.yaml"), "--max-load", "--slo", "ttft_p99=1s"]) == 2
    assert "system.autoscaling: got 'engine', expected none" in capsys.readouterr().err
