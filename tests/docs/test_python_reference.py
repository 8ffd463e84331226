"""The page of the Python surface has every function, argument, attribute and column, and no other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import twin
from latency_models.io.config_io import write_yaml
from tests.docs.pages import REFERENCE, names, rows
from tests.twin.serving.scenarios import scenario
from twin.api.frames import UNITS

PAGE = "python.md"
TEXT = " ".join((REFERENCE / PAGE).read_text().split())
INTERNAL = {"write"}
"""The methods of `Result` that serve the command line alone."""


def table(heading: str) -> dict[str, list[str]]:
    """Cells of the rows below a heading, by each name in the first one."""
    return {name: cells for where, cells in rows(PAGE) if where == heading for name in names(cells[0])}


def signature(function: Callable[..., Any]) -> str:
    """Arguments and defaults, without annotations and `self`."""
    parameters = [
        parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"
    ]
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]))


FUNCTIONS = [twin.load, twin.simulate, twin.sweep, twin.plan, twin.compare]
KINDS = [twin.Scenario, twin.Result, twin.SweepResult, twin.PlanResult]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions_and_their_arguments(function: Callable[..., Any]) -> None:
    name = f"twin.{function.__name__}"
    assert f"`{name}{signature(function)}`" in TEXT
    assert list(table(name)) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_attributes_and_methods(kind: type) -> None:
    public = {name for name in {*vars(kind), *kind.__annotations__} if not name.startswith("_")} - INTERNAL
    methods = {name: vars(kind)[name] for name in public if inspect.isfunction(vars(kind).get(name))}
    expected = {name + signature(methods[name]) if name in methods else name for name in public}
    assert set(table(kind.__name__)) == expected


def simulated(folder: Path, **sections: Any) -> twin.Result:
    (folder / "s.yaml").write_text(write_yaml(scenario(**sections)))
    return twin.simulate(folder / "s.yaml")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> twin.Result:
    return simulated(tmp_path_factory.mktemp("python"))


@pytest.mark.parametrize("name", ["summary", "requests", "steps", "engines", "timeseries"])
def test_columns_of_a_result(result: twin.Result, name: str) -> None:
    mark = "only with `workload."
    documented = {column for column, cells in table(f"Result.{name}").items() if mark not in " ".join(cells)}
    assert documented == set(getattr(result, name))


def test_columns_of_sessions(tmp_path: Path) -> None:
    turns, growth = ({"distribution": "fixed", "mean": mean} for mean in (2, 9))
    result = simulated(tmp_path, workload={"sessions": {"source": "drawn", "turns": turns, "growth": growth}})
    of_tasks = {name for name, cells in table("Result.requests").items() if "`workload.tasks`" in " ".join(cells)}
    assert set(table("Result.requests")) - of_tasks == set(result.requests)
    units = result.summary["unit"]
    assert units["sessions.time.p99"] == "s"
    assert units[[name for name in units.index if name.startswith("sessions.")]].all()


def test_the_columns_of_a_run_without_detail_are_marked(result: twin.Result) -> None:
    short = twin.simulate(result.scenario, {"detail": False}).requests
    assert {name for name, cells in table("Result.requests").items() if cells[0].endswith("*")} == set(short)


def test_kinds_and_units_are_listed(result: twin.Result) -> None:
    assert set(UNITS.values()) == set(names(table("Result.summary")["unit"][2]))
    assert set(names(table("Result.steps")["kind"][2])) == {"decode", "mixed", "one-shot"}
    assert set(result.summary["unit"]) <= set(UNITS.values())


def test_columns_of_a_sweep(workplace: Path) -> None:
    small = {"requests_per_instance": 100, "batch_size": 16, "workload.decode.mean": 20}
    swept = twin.sweep("examples/afd-deepseek-v3.yaml", ratio=2, overrides=small, requests=True)
    columns = {name for where, cells in rows("run-folder.md") if where == "requests/" for name in names(cells[0])}
    assert columns | {"point"} == set(swept.requests)
    documented = {name for where, cells in rows("sweep-document.md") if where == "points[]" for name in names(cells[0])}
    changed = {"throughput_ci": ["throughput_ci_low", "throughput_ci_high"], "seed": ["point_seed"]}
    plain = {column for name in documented - {"gaps", "state_shares"} for column in changed.get(name, [name])}
    nested = {name for name in swept.points if re.match(r"(gaps|state_shares)\.", name)}
    assert set(swept.points) - nested == plain | set(small)
    assert "gaps.barrier" in nested
