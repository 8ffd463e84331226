"""The calibration file: round trips, units, and every way it can be wrong."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from latency_models.calibration import (
    COMPONENTS,
    SIZES,
    Calibration,
    Component,
    Line,
    fit_calibration,
    read_measurements,
    to_line,
)
from latency_models.calibration_loader import load_calibration
from latency_models.fitting.linear import LinearLatency
from latency_models.io.config_io import checked, read_yaml_text
from latency_models.io.files import builtin_names
from workloads.errors import BadInput

PAPER = "deepseek-v3-ascend-910c"

FIT: dict[str, Any] = {
    "points": 12,
    "range": [16, 4096.0],
    "alpha_interval": [0.9, 1.1],
    "beta_interval": [0.0, 9.0],
    "confidence": 0.9,
    "covariance": [[1e-3, -1e-2], [-1e-2, 4]],
    "noise_variance": 0.5,
    "degrees": 10,
    "relative": True,
    "r_squared": 0.99,
    "heldout_median_error": 0.03,
}


def line(size: str, **fields: Any) -> dict[str, Any]:
    return {"alpha": 1.0, "beta": 5, "alpha_unit": f"seconds/{size}", "beta_unit": "seconds"} | fields


def document() -> dict[str, Any]:
    return {
        "schema": "twin.calibration/1",
        "name": "mine",
        "time_unit": "seconds",
        "scope": "layer",
        "layers": 61,
        "attention": line("token", fit=copy.deepcopy(FIT)),
        "ffn": line("request", alpha=2e-6),
        "communication": line("token"),
        "provenance": {
            "method": "measured",
            "source": "a bench",
            "device": "a device",
            "model": "a model",
            "date": "2026-01-31",
            "commit": "abc",
            "versions": {"torch": "2.11"},
            "note": "naïve — 漢字",
        },
    }


def changed(dotted: str, value: Any) -> dict[str, Any]:
    """The document with one field set, or taken out when the value is `...`."""
    result = document()
    *way, last = dotted.split(".")
    section = result
    for name in way:
        section = section[name]
    if value is ...:
        del section[last]
    else:
        section[last] = value
    return result


def fault(tmp_path: Path, content: dict[str, Any]) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(BadInput) as error:
        load_calibration(path)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


FAULTS: list[tuple[str, Any, str]] = [
    ("time_unit", "minutes", "time_unit: got 'minutes', expected 'seconds' or 'cycles'"),
    ("layers", ..., "layers: expected the number of layers in a step, since scope is layer"),
    ("attention.alpha", -0.001, "attention.alpha: got -0.001, expected a number of at least 0"),
    ("ffn.alhpa", 0.5, "ffn.alhpa: unknown field, did you mean alpha?"),
    (
        "attention.alpha_unit",
        "seconds/request",
        "attention.alpha_unit: got 'seconds/request', expected seconds/token, since time_unit is seconds",
    ),
    (
        "ffn.alpha_unit",
        "cycles/request",
        "ffn.alpha_unit: got 'cycles/request', expected seconds/request or seconds/token, since time_unit is seconds",
    ),
    ("communication.beta_unit", "ms", "communication.beta_unit: got 'ms', expected seconds, the time_unit"),
    ("attention.fit.range", [5.0], "attention.fit.range"),
    ("attention.fit.range", [9.0, 1.0], "attention.fit.range: got [9.0, 1.0], expected the lower end first"),
    ("attention.fit.alpha_interval", [2, 1], "attention.fit.alpha_interval: got [2.0, 1.0], expected the lower end"),
    ("attention.fit.covariance", [[1.0, 2.0]], "attention.fit.covariance"),
    (
        "attention.fit.covariance",
        [[-1.0, 0], [0, 1]],
        "attention.fit.covariance: got [[-1.0, 0.0], [0.0, 1.0]], expected variances of at least 0",
    ),
    (
        "attention.fit.degrees",
        12,
        "attention.fit.degrees: got 12, expected points less 2, or less 1 through the origin",
    ),
    ("provenance.date", "yesterday", "provenance.date: got 'yesterday', expected a date such as 2026-01-31"),
]


@pytest.mark.parametrize(("field", "value", "message"), FAULTS, ids=[f"{field}={value}" for field, value, _ in FAULTS])
def test_a_fault_names_file_field_value_and_what_was_expected(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    assert fault(tmp_path, changed(field, value)).startswith(message)


def test_save_and_load_is_the_identity(tmp_path: Path) -> None:
    calibration = checked(Calibration, document(), None)
    calibration.save(tmp_path / "saved.yaml")
    again = load_calibration(tmp_path / "saved.yaml")
    assert again == calibration
    assert again.content_hash() == calibration.content_hash()
    assert again.provenance.date == datetime.date(2026, 1, 31)
    assert [path.name for path in tmp_path.iterdir()] == ["saved.yaml"]


@given(
    alpha=st.floats(0, 1e300),
    beta=st.floats(0, 1e300),
    note=st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=30),
)
def test_any_coefficient_and_any_note_survive_the_file(alpha: float, beta: float, note: str) -> None:
    content = changed("provenance.note", note)
    content["attention"] |= {"alpha": alpha, "beta": beta}
    calibration = checked(Calibration, content, None)
    again = checked(Calibration, read_yaml_text(calibration.to_yaml()), None)
    assert (again.attention.alpha, again.attention.beta, again.provenance.note) == (alpha, beta, note)
    assert again == calibration


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    calibration = checked(Calibration, document(), None)
    with pytest.raises(BadInput, match=r"expected a file that can be written: No such file or directory$"):
        calibration.save(tmp_path / "nowhere" / "c.yaml")
    with pytest.raises(BadInput, match=r"expected a file that can be written: "):
        calibration.save(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(BadInput, match="Is a directory"):
        calibration.save(tmp_path / "folder.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.yaml"]


def test_the_hash_ignores_layout_and_sees_every_field(tmp_path: Path) -> None:
    calibration = checked(Calibration, document(), None)
    path = tmp_path / "other.yaml"
    path.write_text("# words\n" + yaml.safe_dump(document(), sort_keys=True, default_flow_style=True))
    assert load_calibration(path).content_hash() == calibration.content_hash()
    assert len(calibration.content_hash()) == 16


def test_the_unit_of_time_is_in_the_hash() -> None:
    in_seconds = load_calibration(PAPER).model_dump(mode="json", by_alias=True, exclude_none=True)
    in_seconds["time_unit"] = "seconds"
    for name in COMPONENTS:
        in_seconds[name] |= {"alpha_unit": f"seconds/{SIZES[name][0]}", "beta_unit": "seconds"}
    assert checked(Calibration, in_seconds, None).content_hash() != load_calibration(PAPER).content_hash()


def test_the_papers_table_4() -> None:
    calibration = load_calibration(PAPER)
    assert calibration.time_unit == "cycles"
    assert calibration.scope == "step"
    assert calibration.provenance.method == "published"
    assert calibration.step_line("attention") == (1.65e-3, 50)
    assert calibration.step_line("ffn") == (0.083, 100)
    assert calibration.step_line("communication") == (0.022, 20)
    assert calibration.attention.seconds(256 * 599) == 1.65e-3 * 256 * 599 + 50


def test_a_step_is_the_layers_together() -> None:
    calibration = checked(Calibration, document(), None)
    assert calibration.step_line("attention") == (61.0, 305.0)


def test_every_builtin_calibration_loads_under_its_own_name() -> None:
    assert PAPER in builtin_names("calibrations")
    for name in builtin_names("calibrations"):
        assert load_calibration(name).name == name


@pytest.mark.parametrize("name", ["deepseek-v3-ascend-910", "DeepSeek", "", "."])
def test_an_unknown_name_is_told_the_known_ones(name: str) -> None:
    with pytest.raises(BadInput, match=rf"^calibration: got {name!r}, expected a path or one of {PAPER}"):
        load_calibration(name)
    with pytest.raises(BadInput, match=rf"\(did you mean {PAPER}\?\)$"):
        load_calibration("deepseek-v3-ascend-910")


def test_paths_start_from_the_base_and_need_not_end_in_yaml(tmp_path: Path) -> None:
    checked(Calibration, document(), None).save(tmp_path / "mine.yaml")
    checked(Calibration, document(), None).save(tmp_path / PAPER)
    assert load_calibration("mine.yaml", tmp_path).name == "mine"
    assert load_calibration("./mine.yaml", tmp_path).name == "mine"
    assert load_calibration(str(tmp_path / "mine.yaml"), Path("/nowhere")).name == "mine"
    assert load_calibration(Path(PAPER), tmp_path).name == "mine"
    assert load_calibration(PAPER, tmp_path).name == PAPER


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("shift", [200.0, -100.0])
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_fit_survives_the_file_with_its_intervals(
    tmp_path: Path, component: Component, relative: bool, shift: float
) -> None:
    sizes = np.geomspace(64, 8192, 15)
    times = (3.0 * sizes + shift) * (1 + 0.03 * np.cos(sizes))
    fitted = LinearLatency(relative=relative, confidence=0.9).fit(sizes, times)
    content = document()
    content[component] = to_line(fitted, component, "seconds")
    checked(Calibration, content, None).save(tmp_path / "fitted.yaml")
    result: Line = getattr(load_calibration(tmp_path / "fitted.yaml"), component)
    assert result == content[component]
    assert (result.fit.degrees == result.fit.points - 1) == fitted.through_origin_ == (shift < 0)


LINES = {"attention": (2e-8, 1e-4), "ffn": (5e-7, 2e-4), "communication": (1e-7, 3e-5)}


def table(tmp_path: Path, **lines: tuple[float, float]) -> Path:
    rng, rows = np.random.default_rng(4), ["component,size,time,remark"]
    for name, (alpha, beta) in (LINES | lines).items():
        sizes = np.geomspace(16, 65536, 20)
        times = (alpha * sizes + beta) * (1 + rng.normal(0, 0.01, 20))
        rows += [f"{name},{size!r},{time!r},x" for size, time in zip(sizes.tolist(), times.tolist(), strict=True)]
    path = tmp_path / "times.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def fit(path: Path, **options: Any) -> Calibration:
    return fit_calibration(read_measurements(path), name="n", device="d", model="m", source=path.name, **options)


@pytest.mark.parametrize("relative", [False, True])
def test_each_component_gets_its_own_line(tmp_path: Path, relative: bool) -> None:
    calibration = fit(table(tmp_path), layers=61, relative=relative)
    assert (calibration.scope, calibration.layers, calibration.time_unit) == ("layer", 61, "seconds")
    for name, (alpha, beta) in LINES.items():
        line = getattr(calibration, name)
        assert line.alpha == pytest.approx(alpha, rel=0.05)
        assert line.fit.points == 20
        assert line.fit.relative is relative
        if relative:
            assert line.beta == pytest.approx(beta, rel=0.05)
            assert line.fit.heldout_median_error < 0.03


def test_cycles_and_whole_steps(tmp_path: Path) -> None:
    calibration = fit(table(tmp_path), time_unit="cycles")
    assert (calibration.scope, calibration.layers) == ("step", None)
    assert [getattr(calibration, name).alpha_unit for name in COMPONENTS] == [
        "cycles/token",
        "cycles/request",
        "cycles/request",
    ]


def test_a_component_that_cannot_be_fitted_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^times\.csv: ffn\.alpha: got -.*expected times that do not fall"):
        fit(table(tmp_path, ffn=(-1e-9, 1e-3)))
    path = tmp_path / "few.csv"
    path.write_text("component,size,time\nattention,1,1\n")
    with pytest.raises(BadInput, match=r"^few\.csv: attention\.sizes: got 1, expected at least 3 points$"):
        fit(path)


def test_a_field_that_the_file_would_not_take(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^time_unit: got 'hours', expected 'seconds' or 'cycles'"):
        fit(table(tmp_path), time_unit="hours")
    with pytest.raises(BadInput, match=r"^layers: got 0, expected a number above 0"):
        fit(table(tmp_path), layers=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": expected a header and rows below it"),
        ("component,size\nffn,1\n", ":1: time: expected this column, found component, size"),
        ("component,size,time\nMLP,1,1\n", ":2: component: got 'MLP', expected one of attention, ffn, communication"),
        ("component,size,time\nffn,1,1\nffn,many,1\n", ":3: size: got 'many', expected a finite number"),
        ("component,size,time\nffn,1,nan\n", ":2: time: got 'nan', expected a finite number"),
        ("component,size,time\nffn,1,2,5\n", ":2: got 4, expected 3 cells, one a column"),
        ("component,size,time,time\nffn,1,2,3\n", ":1: got 'time', expected each column once"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "times.csv"
    path.write_text(content)
    with pytest.raises(BadInput) as error:
        read_measurements(path)
    assert str(error.value) == f"{path}{message}"
