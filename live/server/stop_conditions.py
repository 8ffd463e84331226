"""Conditions that end the outputs of a request before they reach their maximum length."""

from __future__ import annotations

from dataclasses import dataclass

from live.text.stop_strings import StopStrings


@dataclass(frozen=True)
class StopConditions:
    """Stop strings and stop tokens, built once for all outputs of a request.

    Attributes:
        strings: stop strings, None for none. stop_token_ids: as the request gives them.
        all_stop_token_ids: `stop_token_ids` and, unless the request ignores them, the model's own end tokens.
    """

    strings: StopStrings | None
    stop_token_ids: frozenset[int]
    all_stop_token_ids: frozenset[int]
