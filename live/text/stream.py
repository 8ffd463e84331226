"""An answer's text, as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from live.text.stops import Stops
from live.text.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out that is never taken back; a token costs the same wherever in the answer it is.

    Held back are the beginning of a character, bytes of a run that the rest of it decides on (`live.text.pieces`), and
    what may be the beginning of a stop string. All that was given out, with what `finish` gives, is what
    `Tokenizer.decode` makes of all tokens, up to the first stop string.

    Args:
        stops: strings that end the text. include_stop: the text ends with the one that was met, not before it.
        skip_special: special tokens give no text. fewest: tokens before the last of which no string ends it.

    Attributes:
        stopped: the stop string that was met, after which tokens give nothing; None while none was.

    Raises:
        BadInput: an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        fewest: int = 0,
    ) -> None:
        self.stopped: str | None = None
        self._reader = tokenizer.reader()
        self._skipped = tokenizer.special if skip_special else frozenset()
        self._stops = Stops(stops) if stops else None
        self._include_stop = include_stop
        self._quiet = fewest  # tokens to come, of which the last is the first whose text a stop may end
        self._held = ""

    def push(self, token: int) -> str:
        """The text that this token makes certain, often none."""
        self._quiet -= 1
        if self.stopped is not None or token in self._skipped:
            return ""
        return self._certain(self._reader.push(token))

    def finish(self) -> str:
        """What was held back, for there are no more tokens."""
        if self.stopped is not None:
            return ""
        text = self._certain(self._reader.finish())
        held, self._held = self._held, ""
        return text + held

    def _certain(self, more: str) -> str:
        """Of what was held and what has come, all but the beginning of a stop string, or all before one."""
        if self._stops is None or not more:
            return more
        text = self._held + more
        met = self._stops.feed(more, self._quiet <= 0)
        if met is None:
            cut = len(text) - self._stops.begun
        else:
            end, self.stopped = met
            cut = len(text) - len(more) + end - (0 if self._include_stop else len(self.stopped))
        self._held = "" if met else text[cut:]
        return text[:cut]
