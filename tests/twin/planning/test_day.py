"""Fleets for a day: the search, outages, files of rates, and a small day from flags to the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from reports.blocks import Text
from reports.day_plan import day_report
from tests.twin.serving.scenarios import scenario
from twin.cli import run
from twin.planning.day import DayQuestion, DayTask, Fleet, Outages, Search, prepare_day, read_rates, run_day
from twin.sweeps.one_run import simulate
from workloads.errors import BadInput

HERE = Path("scenario.yaml")
DAY = scenario(
    name="day",
    workload={
        "requests": 420,
        "prefill": {"distribution": "fixed", "mean": 60},
        "decode": {"distribution": "geometric", "mean": 30},
        "arrivals": {"process": "poisson", "rate": 0.7, "profile": {"swing": 0.9, "period": 600, "peak_at": 300}},
    },
    engine={"max_num_seqs": 2},
    step_time={"source": "linear", "overhead": 0.05, "per_token": 0.0, "per_kv_token": 0.0},
    system={
        "pools": [{"name": "engine", "replicas": 2, "device": {"type": "L40S", "price_per_hour": 0.8}}],
        "autoscaling": {
            "engine": {
                "policy": "target_utilization",
                "metric": "load",
                "target": 0.5,
                "max_replicas": 5,
                "start_up": {"node": 5, "image": 5, "weight_bytes": 1e9, "bandwidth": 1e8, "compile": 5, "warm_up": 5},
            }
        },
    },
    measure={"slo": {"ttft": 5.0}},
)


def question(**changes: Any) -> DayQuestion:
    return prepare_day(DAY, HERE, "profile", {}, **changes)


@pytest.mark.parametrize("enough", range(1, 10))
def test_the_first_that_holds_is_that_of_a_linear_search(enough: int) -> None:
    """Of nine sizes those from `enough` on hold; those that fail on the first day have no second."""
    days = question(replications=2)
    points: dict[str, dict[str, Any]] = {}
    tried: list[str] = []

    def simulate(tasks: Sequence[DayTask]) -> None:
        for task in tasks:
            size = float(task.key.split("/")[2])
            tried.append(task.key)
            missed = 0.0 if size >= enough else 0.2
            points[task.key] = {"cost": size, "kwh": None, "engine_hours": size, "missed_minutes": missed}

    family = [Fleet(days.tenures[0], "fixed", size, days.fixed(min(size, 5))) for size in range(1, 10)]
    search = Search(days, points, simulate)
    fleets = search.cheapest([family, family[: enough - 1]])
    assert [fleet.value for fleet in fleets] == [enough]
    assert len(search.rows) <= 8
    first_days = [key for key in tried if key.endswith("/0")]
    assert sorted(set(tried) - set(first_days)) == sorted(
        f"{key[:-2]}/1" for key in set(first_days) if not points[key]["missed_minutes"]
    )
    best = search.best(fleets)
    assert best["objective"] == enough


def test_outages_have_their_means_and_do_not_depend_on_the_size_of_the_fleet() -> None:
    outages = Outages(1000.0, 50.0)
    few, many = (outages.draw([f"engine-{i}" for i in range(count)], 4e5, [7]) for count in (2, 4))
    assert [entry for entry in many if entry["engine"] in ("engine-0", "engine-1")] == few
    durations = np.array([entry["duration"] for entry in many])
    assert len(many) == pytest.approx(4 * 4e5 / 1050, rel=0.1)
    assert durations.mean() == pytest.approx(50.0, rel=0.1)
    assert durations.std() == pytest.approx(50.0, rel=0.15)


def test_a_file_of_rates_makes_the_day(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("time,rate\n0,0.5\n600,2\n1200,0.5\n")
    workload = prepare_day(DAY, HERE, str(file), {}).document["workload"]
    assert workload["requests"] == 1500
    assert workload["arrivals"]["rate"] == pytest.approx(1.25)
    assert workload["arrivals"]["profile"] == {"points": [[0, 0.5], [600, 2], [1200, 0.5]]}


@pytest.mark.parametrize(
    ("text", "line"),
    [("seconds,rate\n0,1\n", 1), ("", 1), ("time,rate\n0,1,2\n", 2), ("time,rate\n0,1\n9,x\n", 3),
     ("time,rate\n5,1\n9,1\n", None), ("time,rate\n0,1\n0,2\n", None), ("time,rate\n0,-1\n9,1\n", None),
     ("time,rate\n0,0\n9,0\n", None), ("time,rate\n0,1\n", None)],
)  # fmt: skip
def test_rates_that_make_no_day_are_refused(tmp_path: Path, text: str, line: int | None) -> None:
    file = tmp_path / "rates.csv"
    file.write_text(text)
    with pytest.raises(BadInput) as refusal:
        read_rates(file)
    assert (refusal.value.file, refusal.value.line) == (str(file), line)


@pytest.mark.parametrize(
    ("document", "arguments", "field"),
    [
        (DAY, {"goals": {"ttft_p95": 1.0}}, "--slo"),
        (DAY | {"measure": {}}, {}, "--slo"),
        (DAY | {"system": {"replicas": 2}}, {}, "system.autoscaling"),
        (DAY, {"minutes": 1.5}, "--minutes"),
        (DAY, {"mttr": 60.0}, "--mttr"),
    ],
)
def test_questions_without_an_answer_are_refused(
    document: dict[str, Any], arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        prepare_day(document, HERE, "profile", **{"goals": {}} | arguments)
    assert refusal.value.field == field


def test_energy_costs_and_its_limit_bounds_the_fleet() -> None:
    powered = json.loads(json.dumps(DAY))
    powered["system"]["pools"][0]["device"]["power_limit"] = 350.0
    capped = prepare_day(powered, HERE, "profile", {}, max_kw=1.1, energy_price=10.0)
    assert capped.most == 3
    search = Search(capped, points := {}, lambda tasks: points.update({task.key: run_day(task) for task in tasks}))
    search.cheapest([[Fleet(capped.tenures[0], "fixed", 3, capped.fixed(3))]])
    (row,) = search.rows.values()
    assert row["cost"] == pytest.approx(0.8 * row["engine_hours"] + 10.0 * row["kwh"])
    assert 0.15 < row["kwh"] / row["engine_hours"] / 0.35 < 0.6
    with pytest.raises(BadInput, match="room for min_replicas"):
        prepare_day(powered, HERE, "profile", {}, max_kw=0.3)
    with pytest.raises(BadInput, match="power_limit"):
        prepare_day(DAY, HERE, "profile", {}, energy_price=0.1)


def test_a_fixed_fleet_is_paid_for_from_begin_to_end_and_outages_cost_minutes() -> None:
    calm = question()
    shaky = question(mttf=100.0, mttr=200.0)
    assert calm.start_up == 30.0
    fleets = [Fleet(day.tenures[0], "fixed", 2, day.fixed(2)) for day in (calm, shaky)]
    first, second = (
        run_day(DayTask("", day.plan(fleet, 0), 0)) for day, fleet in zip((calm, shaky), fleets, strict=True)
    )
    assert first["cost"] == pytest.approx(0.8 * first["engine_hours"])
    assert first["engine_hours"] == pytest.approx(2 * simulate(calm.plan(fleets[0], 0)).run.end / 3600)
    assert first["most_engines"] == 2
    assert second["missed_minutes"] > first["missed_minutes"]
    spot = question(spot=(0.25, 1e9), replications=1).tenures[1]
    search = Search(question(replications=1), {"spot/fixed/2/0": first}, lambda tasks: None)
    search.cheapest([[replace(fleets[0], tenure=spot)]])
    assert [row["cost"] for row in search.rows.values()] == [pytest.approx(first["cost"] / 4)]


def test_the_answer_compares_the_best_fixed_with_the_best_scaled_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "day.yaml"
    file.write_text(yaml.safe_dump(DAY))
    flags = ["--day", "profile", "--days", "1", "--slo", "ttft_p99=5s", "--jobs", "1", "--no-figures"]
    assert run(["plan", str(file), *flags, "--runs", str(tmp_path / "runs"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    fixed, scaled = document["fixed"], document["scaled"]
    size = int(fixed["value"])
    smaller = Fleet(question().tenures[0], "fixed", size - 1, question().fixed(size - 1))
    missed = run_day(DayTask("", question().plan(smaller, 0), 0))["missed_minutes"]
    assert missed > 0.05 >= 1 - fixed["minutes"]
    assert scaled["holds"]
    assert scaled["cost"] < fixed["cost"]
    start_up = document["start_up"]
    assert [start_up[name]["seconds"] for name in ("sooner", "later")] == [0.0, 90.0]
    assert start_up["sooner"]["fleet"]["cost"] < start_up["later"]["fleet"]["cost"]
    text = " ".join(block.text for block in day_report(document).blocks if isinstance(block, Text))
    assert f"Best fixed size fleet: {size} engines (on demand)" in text
    assert "a minute less is worth" in text
