"""From a CSV of times to a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.calibration import COMPONENTS, Calibration, fit_calibration, read_measurements
from workloads.errors import BadInput

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
