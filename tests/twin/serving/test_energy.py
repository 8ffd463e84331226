"""Energy: power by the tokens of a step, idle time, and the limit of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.twin.planning import scenarios as planned
from tests.twin.serving.scenarios import reported, run, scenario
from twin.planning.space import candidates, families
from twin.serving.results.report import IDLE, step_share
from workloads.errors import BadInput


def document(**device: Any) -> dict[str, Any]:
    """One request of 10 prompt tokens and 11 answer tokens, after a second of nothing: 11 steps of 0.1 s."""
    fixed = {"distribution": "fixed"}
    return scenario(
        workload={
            "requests": 1,
            "prefill": fixed | {"mean": 10},
            "decode": fixed | {"mean": 11},
            "arrivals": {"process": "deterministic", "rate": 1.0},
        },
        step_time={"source": "linear", "overhead": 0.1, "per_token": 0.0, "per_kv_token": 0.0},
        system={"pools": [{"name": "engine", "replicas": 2, "device": {"type": "H100", "count": 2, **device}}]},
    )


def test_shares_of_the_limit_are_those_that_were_measured() -> None:
    assert step_share(1) == pytest.approx(300 / 700)
    assert step_share(128) == pytest.approx(600 / 700)
    assert step_share(0.5) == step_share(1)
    assert step_share(1e6) == step_share(128)


@pytest.mark.parametrize("idle", [None, 50.0])
def test_joules_are_those_of_steps_and_of_idle_time(idle: float | None) -> None:
    case = document(power_limit=700.0, idle_power=idle)
    result = run(case)
    energy = reported(result, case)["summary"]["energy"]
    watts = 700 * step_share(20 / 11)
    between = IDLE * 700 if idle is None else idle
    joules = 2 * (1.1 * watts + (2 * result.end - 1.1) * between)
    assert energy["kwh"] == pytest.approx(joules / 3.6e6)
    assert energy["mean_kw"] == pytest.approx(joules / result.end / 1e3)
    assert energy["joules_per_output_token"] == pytest.approx(joules / 11)


def test_without_a_power_limit_there_is_no_energy() -> None:
    assert "energy" not in reported(run(document()), document())["summary"]


def test_a_plan_keeps_within_its_kilowatts() -> None:
    kinds = [planned.kind("one", 1, 2.0, 1.0), planned.kind("two", 2, 2.0, 1.8)]
    for kind in kinds:
        kind["device"]["power_limit"] = 500.0
    question = planned.question(
        planned.document(engines=kinds, layouts=["colocated"], limits={"kw": 3.0, "engines": 9})
    )
    by_kind = {
        family.kinds[0].name: [member.gpus for member in candidates(question, family, (9,))]
        for family in families(question)
    }
    assert by_kind == {"one": [1, 2, 3, 4, 5, 6], "two": [2, 4, 6]}
    kinds[1]["device"].pop("power_limit")
    with pytest.raises(BadInput, match="power limit of a X"):
        planned.question(planned.document(engines=kinds, limits={"kw": 3.0}))
