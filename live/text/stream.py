"""Text of an output, token by token, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from live.text.tokenizer import Tokenizer
from workloads.errors import BadInput


class StopStrings:
    """The stop strings of a request with their search tables, shared by all outputs; `BadInput` for an empty one.

    Tables take time and memory proportional to the strings' length. Each output has its own `StopSearch`.
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
    """The search for stop strings in one output: the first complete one, and of two that end together the longer."""

    def __init__(self, first_characters: frozenset[str], matches: list[_Match]) -> None:
        self._first_characters = first_characters
        self._matches = matches
        self.pending = 0

    def feed(self, piece: str, counts: bool = True) -> tuple[int, str] | None:
        """Search the next part of the text, until a string is found: the end in `piece`, and the string.

        Without `counts`, a string complete within `piece` is ignored; one that begins in it may count later.
        """
        if not self.pending and self._first_characters.isdisjoint(piece):
            return None
        results = [(match.feed(piece, counts), match.text) for match in self._matches]
        ends = [(end, -len(text), text) for end, text in results if end is not None]
        if not ends:
            self.pending = max(match.matched for match in self._matches)
            return None
        end, _, text = min(ends)
        return end, text


class _Match:
    """Knuth, Morris and Pratt's search for one string, which reads each character of the text once."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str, borders: list[int]) -> None:
        self.text = text
        self._borders = borders
        self.matched = 0

    def feed(self, piece: str, counts: bool) -> int | None:
        """The number of characters of `piece` that complete the string; None if it is incomplete or does not count."""
        stop, borders, matched = self.text, self._borders, self.matched
        place = 0
        while place < len(piece):
            if not matched:
                place = piece.find(stop[0], place)
                if place < 0:
                    break
            while matched and stop[matched] != piece[place]:
                matched = borders[matched - 1]
            matched += stop[matched] == piece[place]
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


class TextStream:
    """Converts tokens to text that is never taken back, at the same cost for each token of an output.

    Three things are held back: an incomplete character, a run of byte tokens whose end decides its text
    (`live.text.detokenizer`), and what may be the beginning of a stop string. All text together equals
    `Tokenizer.decode`, up to the first stop string that ends after `min_tokens`; then `stopped` is that string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._detokenizer = tokenizer.detokenizer()
        self._skipped = tokenizer.special if skip_special else frozenset()
        self._stops = stops.search() if stops is not None else None
        self._include_stop = include_stop
        self._ignored = min_tokens  # tokens to come until a stop string may end the text
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain after this token; often none."""
        self._ignored -= 1
        if self.stopped is not None or token in self._skipped:
            return ""
        return self._certain(self._detokenizer.push(token))

    def finish(self) -> str:
        """The text held back, once there are no more tokens."""
        if self.stopped is not None:
            return ""
        text = self._certain(self._detokenizer.finish())
        text = text + self._held
        self._held = ""
        return text

    def _certain(self, piece: str) -> str:
        """The text that is certain: all but a possible beginning of a stop string, or all before a stop string."""
        if self._stops is None or not piece:
            return piece
        text = self._held + piece
        match = self._stops.feed(piece, self._ignored <= 0)
        if match is None:
            cut = len(text) - self._stops.pending
        else:
            end, self.stopped = match
            cut = len(text) - len(piece) + end - (0 if self._include_stop else len(self.stopped))
        self._held = "" if match else text[cut:]
        return text[:cut]
