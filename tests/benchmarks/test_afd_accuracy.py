"""The benchmark of theory against simulation runs, and chooses how attention instances advance."""

from __future__ import annotations

import pytest

from benchmarks.afd_accuracy import compare


@pytest.mark.parametrize(("advance", "best"), [("lockstep", 8.90), ("independent", 8.31)])
def test_a_short_comparison(advance: str, best: float) -> None:
    result = compare({}, "1", 1000, advance)
    assert result["points"] == 1
    assert abs(result["largest"]) < 0.02
    assert result["r_star_barrier"] == pytest.approx(best, abs=0.02)
