"""Colours of pages stand out from a light and from a dark background, and only numbers have a colour bar."""

from __future__ import annotations

import pytest

from reports.theme import SERIES, asset, scale

CONTRAST = 2.5
"""Of a line or a mark; yellow on white has 1.2."""


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("background", ["#ffffff", "#14171b"])
def test_colours_stand_out(background: str) -> None:
    assert background in asset("page.css")
    for colour in (*SERIES, *scale(50)):
        low, high = sorted((luminance(colour), luminance(background)))
        assert (high + 0.05) / (low + 0.05) > CONTRAST, colour


def test_steps_of_a_scale_are_different() -> None:
    assert len(set(scale(50))) == 50
