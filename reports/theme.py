"""Colours and styles of pages, for light and dark backgrounds alike."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

SERIES = ("#3b8bd6", "#e08a3c", "#35a46f", "#a07fd6", "#e0566b", "#8a8f98", "#b8a12f", "#2fa8b8", "#c46fb0", "#7d8f3a")
"""Colours of lines and categories, readable on both backgrounds; a chart never uses one twice."""

PREDICTED, MEASURED, WAITING = SERIES[0], SERIES[1], SERIES[2]
GOAL = OUTAGE = "#e0566b"
SOFT = "#8a8f98"


@cache
def asset(name: str) -> str:
    """The text of a file of this package: a style sheet or a script."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def series_colours(count: int) -> list[str]:
    """`count` different colours: those of `SERIES`, or, where these do not suffice, steps along one scale."""
    return list(SERIES[:count]) if count <= len(SERIES) else scale(count)


def scale(count: int) -> list[str]:
    """`count` colours from low to high, none too dark for a dark background or too light for a light one."""
    from bokeh.palettes import interp_palette

    return list(interp_palette((SERIES[0], SERIES[3], SERIES[4], SERIES[1]), count))
