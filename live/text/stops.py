"""Stop strings in a text that comes in parts."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.errors import BadInput


class Stop:
    """One string, searched for as the text comes: Knuth, Morris and Pratt's way, which never looks back.

    Attributes:
        text: the string. matched: characters at the end of what has come that it may begin with, as many as can be.
    """

    def __init__(self, text: str) -> None:
        self.text, self.matched = text, 0
        self._borders = _borders(text)

    def feed(self, more: str, counts: bool = True) -> int | None:
        """Characters of `more` with which the string is whole; None while it is not, or where that does not count."""
        stop, borders, matched = self.text, self._borders, self.matched
        place = 0
        while place < len(more):
            if not matched:
                place = more.find(stop[0], place)
                if place < 0:
                    break
            while matched and stop[matched] != more[place]:
                matched = borders[matched - 1]
            matched += stop[matched] == more[place]
            place += 1
            if matched == len(stop):
                if counts:
                    return place
                matched = borders[-1]
        self.matched = matched
        return None


class Stops:
    """Several strings: the first to be whole counts, and of two that end together the longer.

    Attributes:
        begun: characters at the end of what has come that may yet become one of them.

    Raises:
        BadInput: an empty string.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise BadInput("expected strings of at least one character", field="stop", value=list(texts))
        self._stops = [Stop(text) for text in texts]
        self._beginnings = frozenset(text[0] for text in texts)
        self.begun = 0

    def feed(self, more: str, counts: bool = True) -> tuple[int, str] | None:
        """Characters of `more` with which the first of them is whole, and which; no more is to be fed then.

        Args:
            counts: False: what becomes whole within `more` is passed over; what begins in it may become whole later.
        """
        if not self.begun and self._beginnings.isdisjoint(more):
            return None
        ends = [
            (end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.feed(more, counts)) is not None
        ]
        if not ends:
            self.begun = max(stop.matched for stop in self._stops)
            return None
        end, _, text = min(ends)
        return end, text


def _borders(text: str) -> list[int]:
    """Of each prefix, the length of the longest shorter one that it also ends with."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[length] != text[i]:
            length = borders[length - 1]
        length += text[length] == text[i]
        borders[i] = length
    return borders
