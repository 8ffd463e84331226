"""Errors, coverage and scores of intervals, and the page that shows them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import accuracy_page
from benchmarks.left_out import REACH, Comparison, pooled


def test_a_value_inside_and_one_outside_by_hand() -> None:
    """Widths of 2 · 1.645 · 0.1; the second value is missed by log 2 less half of that, which counts 20 times."""
    result = Comparison("two", fitted=False)
    result.add(1.0, 1.05, 0.1)
    result.add(1.0, 2.0, 0.1)
    summary = result.summary()
    assert summary["coverage"] == 0.5
    assert summary["width"] == pytest.approx(2 * REACH * 0.1)
    assert summary["score"] == pytest.approx(2 * REACH * 0.1 + 20 * (np.log(2.0) - REACH * 0.1) / 2)
    assert summary["median"] == pytest.approx((0.05 + 1.0) / 2)
    both = pooled([result, result])
    assert both.predicted == [1.05, 2.0, 1.05, 2.0]
    assert both.summary()["coverage"] == 0.5


def test_normal_errors_of_the_stated_deviation_are_covered_nine_times_of_ten() -> None:
    rng = np.random.default_rng(0)
    result = Comparison("normal", fitted=False)
    for deviation in rng.uniform(0.01, 0.3, 2000):
        result.add(1.0, float(np.exp(rng.normal(0, deviation))), float(deviation))
    assert result.summary()["coverage"] == pytest.approx(0.9, abs=0.02)


def test_the_page_shows_the_committed_results() -> None:
    document = json.loads(accuracy_page.RESULTS.read_text())["left_out"]
    text = accuracy_page.PAGE.read_text()
    printed_table = text.split(accuracy_page.BEGIN)[1].split(accuracy_page.END)[0].strip()
    assert printed_table == accuracy_page.table(document)
