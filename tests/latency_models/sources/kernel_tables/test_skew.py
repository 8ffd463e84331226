"""α of uneven decodes: learnt where it is known, and how its errors are counted."""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.sources.kernel_tables.skew import KNOTS, SHOT, Shots, SkewLevels, alphas_of, fit_skew


def shots(alpha: float, *, decodes: int = 8, mixed: bool = False, shorts: tuple[int, ...] = (100, 200)) -> Shots:
    """For every knot of skewness three shots at each short length, all with this α."""
    rows = [(short, knot) for short in shorts for knot in KNOTS for _ in range(3)]
    short = np.array([row[0] for row in rows])
    longest = 4.0 * short
    mean = longest * (1 - np.array([row[1] for row in rows]))
    at_mean, at_longest = 10 + mean, 10 + longest
    size = len(rows)
    time = at_mean + alpha * (at_longest - at_mean)
    columns = (np.full(size, mixed), np.full(size, decodes), short, mean, longest, at_mean, at_longest, time)
    return np.rec.fromarrays(columns, dtype=SHOT)


def joined(*parts: Shots) -> Shots:
    return np.concatenate(parts).view(np.recarray)


def test_alpha_is_found_by_regime_and_number_of_decodes() -> None:
    fit = fit_skew(joined(shots(0.1), shots(0.3, decodes=32), shots(0.6, mixed=True)), errors=True)
    assert fit.alphas("pure", 8) == pytest.approx([0.1] * 6)
    assert fit.alphas("pure", 16) == pytest.approx([0.2] * 6)
    assert fit.alphas("pure", 2) == pytest.approx([0.1] * 6)
    assert fit.alphas("pure", 100) == pytest.approx([0.3] * 6)
    assert fit.alphas("mixed", 8) == pytest.approx([0.6] * 6)
    assert fit.heldout_p90_error == pytest.approx(0.0, abs=1e-12)
    assert fit.uncorrected_median_error is not None
    assert fit.uncorrected_median_error > 0.05


def test_a_peak_at_one_number_of_decodes_is_no_batchs_beside_it() -> None:
    """α 0.1 but at 64, a tile's end: half of the peak is left. Where the neighbours see nothing, little is."""
    sizes = (8, 16, 32, 64, 128)
    peak = fit_skew(joined(*(shots(0.5 if size == 64 else 0.1, decodes=size) for size in sizes)))
    separate = fit_skew(joined(*(shots(0.5 if size == 64 else 0.0, decodes=size) for size in sizes)))
    even = fit_skew(joined(*(shots(0.1, decodes=size) for size in sizes)))
    assert peak.alphas("pure", 64) == pytest.approx([0.3] * 6)
    assert separate.alphas("pure", 64) == [0.0] * 6
    assert even.alphas("pure", 64) == pytest.approx([0.1] * 6)
    assert peak.alphas("pure", 16) == pytest.approx([0.1] * 6)


def test_errors_are_of_lengths_that_were_left_out() -> None:
    """Each length has an α of its own: predicted by the other's, every shot is wrong by the same share of its gap."""
    fit = fit_skew(joined(shots(0.0, shorts=(100,)), shots(1.0, shorts=(200,))), errors=True)
    assert fit.heldout_median_error is not None
    assert fit.heldout_median_error > 0.3


def test_the_median_minimises_relative_errors_of_the_time() -> None:
    """Two shots of three decide, unless the third weighs more: its gap is the larger part of its time."""
    part = shots(0.0, shorts=(100,))[np.arange(18) < 3]
    part.time[2] = part.at_longest[2]
    fit = fit_skew(part)
    assert fit.alphas("pure", 8)[0] == 0.0


def test_two_shots_are_too_few() -> None:
    """A knot with fewer than three points near it takes α from the knots around it."""
    part = shots(0.2, shorts=(100,))
    keep = np.arange(18) != 6
    part.time[6:9] = part.at_longest[6:9]
    fit = fit_skew(part[keep])
    assert fit.alphas("pure", 8) == pytest.approx([0.2] * 6)


def test_shots_that_tell_nothing() -> None:
    even = shots(0.0)
    even.at_longest[:] = even.at_mean
    assert fit_skew(even) is None
    assert alphas_of(None, 4) == [0.0] * len(KNOTS)


@pytest.mark.parametrize(
    ("counts", "rows", "expected"), [((2, 4), 1, "expected a row for each n_decode"), ((4, 2), 2, "rising")]
)
def test_levels_that_do_not_fit_together(counts: tuple[int, ...], rows: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        SkewLevels(n_decode=counts, alpha=((0.0,) * 6,) * rows)
