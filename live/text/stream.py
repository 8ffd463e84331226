"""Text of an output, token by token."""

from __future__ import annotations

from live.text.stop_strings import StopStrings
from live.text.tokenizer import Tokenizer


class TextStream:
    """Converts tokens to text that is never taken back, at the same cost for each token of an output.

    Three things are held back: an incomplete character, a run of byte tokens whose end decides its text
    (`live.text.detokenizer`), and what may be the beginning of a stop string. The text of all `push` calls and `finish`
    together equals `Tokenizer.decode` of all tokens, up to the first stop string.

    Args:
        stops: strings that end the text, None for none. include_stop: the text includes the stop string that ends it.
        skip_special: special tokens produce no text. min_tokens: output tokens before which no stop string ends the
            text.

    Attributes:
        stopped: the stop string that ended the text, after which tokens produce nothing; None so far.
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
        held, self._held = self._held, ""
        return text + held

    def _certain(self, more: str) -> str:
        """The text that is certain: all but a possible beginning of a stop string, or all before a stop string."""
        if self._stops is None or not more:
            return more
        text = self._held + more
        match = self._stops.feed(more, self._ignored <= 0)
        if match is None:
            cut = len(text) - self._stops.pending
        else:
            end, self.stopped = match
            cut = len(text) - len(more) + end - (0 if self._include_stop else len(self.stopped))
        self._held = "" if match else text[cut:]
        return text[:cut]
