"""The benchmark of theory against simulation runs, and chooses how attention instances advance."""

from __future__ import annotations

import pytest

from benchmarks.afd_accuracy import compare


@pytest.mark.parametrize(("advance", "best"), [("lockstep", 2.96), ("independent", 2.96)])
def test_a_short_comparison(advance: str, best: float) -> None:
    found = compare({"workload.decode.mean": 100}, "3,8", 600, advance)
    assert found["points"] == 2
    assert abs(found["largest"]) < 0.02
    assert found["r_star_barrier"] == pytest.approx(best, abs=0.02)
