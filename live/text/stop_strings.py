"""Stop strings in a text that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.errors import BadInput


class StopStrings:
    """The stop strings of a request with their search tables, shared by all of its outputs.

    Building the tables takes time and memory proportional to the total length of the strings. A search does not change
    them: each output has its own `StopSearch`.

    Attributes:
        texts: the strings.

    Raises:
        BadInput: an empty string.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise BadInput("expected strings of at least one character", field="stop", value=list(texts))
        self.texts = tuple(dict.fromkeys(texts))
        self.first_characters = frozenset(text[0] for text in self.texts)
        self._tables = tuple((text, _borders(text)) for text in self.texts)

    def search(self) -> StopSearch:
        """A new search, through one output."""
        return StopSearch(self.first_characters, [_Match(text, borders) for text, borders in self._tables])


class StopSearch:
    """The search for stop strings in one output: the first complete one counts; of two that end together, the longer.

    Attributes:
        pending: number of characters at the end of the text so far that may be the beginning of a stop string.
    """

    def __init__(self, first_characters: frozenset[str], matches: list[_Match]) -> None:
        self._first_characters, self._matches = first_characters, matches
        self.pending = 0

    def feed(self, more: str, counts: bool = True) -> tuple[int, str] | None:
        """Search the next part of the text. Not to be called again after a stop string has been found.

        Args:
            counts: if False, a string that is complete within `more` is ignored; one that begins in it may count later.

        Returns:
            The number of characters of `more` up to the end of the stop string, and the string; None if none is
            complete.
        """
        if not self.pending and self._first_characters.isdisjoint(more):
            return None
        found = [(match.feed(more, counts), match.text) for match in self._matches]
        ends = [(end, -len(text), text) for end, text in found if end is not None]
        if not ends:
            self.pending = max(match.matched for match in self._matches)
            return None
        end, _, text = min(ends)
        return end, text


class _Match:
    """Knuth, Morris and Pratt's search for one string, which reads each character of the text once.

    Attributes:
        matched: length of the longest prefix of `text` that the text so far ends with.
    """

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str, borders: list[int]) -> None:
        self.text, self._borders, self.matched = text, borders, 0

    def feed(self, more: str, counts: bool) -> int | None:
        """The number of characters of `more` that complete the string; None if it is incomplete or does not count."""
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


def _borders(text: str) -> list[int]:
    """The length of the longest shorter prefix that each prefix ends with."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[length] != text[i]:
            length = borders[length - 1]
        length += text[length] == text[i]
        borders[i] = length
    return borders
