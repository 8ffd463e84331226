"""The public Python surface: its names and signatures, and what it does to the process that uses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import twin
from twin import BadInput


def test_the_public_names() -> None:
    classes = ["BadInput", "PlanResult", "Result", "Scenario", "SweepResult"]
    assert twin.__all__ == [*classes, "__version__", "compare", "load", "plan", "simulate", "sweep"]
    assert set(twin.__all__) <= set(dir(twin))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = twin.simulat  # type: ignore[attr-defined]


def test_a_scenario_is_read_checked_and_changed(file: Path) -> None:
    as_mapping = twin.load(file, {"engine.max_num_seqs": 4, "seed": 3})
    as_texts = twin.load(str(file), ["engine.max_num_seqs=4", "seed=3"])
    assert as_mapping == as_texts
    assert (as_mapping.kind, as_mapping.name, as_mapping.spec.seed) == ("serving", "plain", 3)
    changed = as_mapping.with_overrides("seed=5")
    assert changed.settings == {"engine.max_num_seqs": 4, "seed": 5}
    assert (changed.spec.seed, as_mapping.spec.seed) == (5, 3)


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ({"engine.max_num_seqs": 0}, "engine.max_num_seqs", 0),
        ({"engine.max_nun_seqs": 4}, "engine.max_nun_seqs", None),
        (["seed"], "overrides", "seed"),
        ("seed=1,2", "overrides seed", [1, 2]),
        ({"seed.deep": 1, "name": "x", "name.y": 1}, "overrides", "name.y"),
    ],
)
def test_what_cannot_be_used_is_named(file: Path, overrides: object, field: str, value: object) -> None:
    with pytest.raises(BadInput) as error:
        twin.load(file, overrides)  # type: ignore[arg-type]
    assert error.value.field == field
    assert value is None or error.value.value == value


def test_files_that_cannot_be_read_and_other_kinds(file: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.yaml"):
        twin.load(tmp_path / "none.yaml")
    file.write_text("kind: validation\n")
    with pytest.raises(BadInput, match=r"expected serving or afd-bundle; .* is for twin validate"):
        twin.load(file)
    file.write_text("kind: afd-bundle\n")
    with pytest.raises(BadInput, match="is for twin sweep"):
        twin.simulate(file)


@pytest.mark.parametrize("function", [twin.load, twin.simulate, twin.sweep])
@pytest.mark.parametrize("source", [None, 5, 2.5, b"s.yaml", ["s.yaml"], {"kind": "serving"}, "\0"])
def test_no_path_of_a_scenario(function: Callable[..., object], source: object) -> None:
    with pytest.raises(BadInput) as error:
        function(source)
    if source != "\0":
        assert error.value.field == ("path" if function is twin.load else "scenario")


@pytest.mark.parametrize("overrides", [5, [5], True, b"seed=1", [b"seed=1"], [None], object(), {5: 1}, {None: 1}])
def test_overrides_that_are_none(file: Path, overrides: object) -> None:
    for function, name in ((twin.load, "overrides"), (twin.simulate, "overrides"), (twin.sweep, "vary")):
        with pytest.raises(BadInput) as error:
            function(file, overrides)  # type: ignore[operator]
        assert error.value.field == name


BOTH, SWEEP = (twin.simulate, twin.sweep), (twin.sweep,)


@pytest.mark.parametrize(
    ("functions", "argument", "values", "field"),
    [
        (BOTH, "draws", ["x", 2.5, True, [], -1, 2], "draws"),
        (BOTH, "replications", [None, "x", 2.0, {}, 0, 10**9], "replications"),
        (BOTH, "jobs", ["x", 1.5, [1], 0], "jobs"),
        (BOTH, "executor", [None, 5, ["local"]], "executor"),
        (BOTH, "trace", [5, b"t", ["t.csv"]], "trace"),
        (SWEEP, "ratio", [8], "ratio"),
        (SWEEP, "requests", [True], "requests"),
        (SWEEP, "vary", [{"seed": []}, {"seed": 3}, {"seed": "123"}], "vary seed"),
    ],
)
def test_arguments_are_refused_by_their_names_in_python(
    file: Path, functions: tuple[Callable[..., object], ...], argument: str, values: list[object], field: str
) -> None:
    for value in values:
        for function in functions:
            with pytest.raises(BadInput) as error:
                function(file, **{argument: value})
            assert error.value.field == field


def test_folders_and_figures_of_other_types(file: Path) -> None:
    for result in (twin.simulate(file), twin.sweep(file)):
        for folder in (None, 5, ["x"]):
            with pytest.raises(BadInput) as error:
                result.save(folder)  # type: ignore[arg-type]
            assert error.value.field == "folder"
        for kind in (5, ["sweep"]):
            with pytest.raises(BadInput) as error:
                result.plot(kind)  # type: ignore[arg-type]
            assert error.value.field == "kind"


def test_nothing_is_printed_and_nothing_is_written(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twin.simulate(file)
    twin.sweep(file, {"seed": [1, 2]}, jobs=1)
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert list(file.parent.iterdir()) == [file]
