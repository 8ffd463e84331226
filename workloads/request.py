"""The request a client submits: all that a scheduler may ever know of it.

Standard library only, because `schedulers` imports this module and stays free of third-party packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from workloads.errors import BadInput


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it reaches the front door.

    `arrival` is in seconds (cycles where a calibration says so), lengths are in tokens. `max_tokens` is the
    client's limit on the answer, 0 for a request that wants none (classification, embedding). How long the
    answer will really be is not here: a scheduler must not see it, so the plant keeps it.

    `prefix_blocks` names the prompt's leading blocks, one id a block: two requests share their first n blocks
    exactly when their first n ids are equal.

    Raises `BadInput` for an arrival that is negative or not finite, and for a negative number of tokens.
    """

    id: int
    arrival: float
    prompt_tokens: int
    max_tokens: int
    model: str = "default"
    prefix_blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.arrival < inf:
            raise self._unusable("arrival", self.arrival, "expected a finite time, 0 or later")
        if self.prompt_tokens < 0:
            raise self._unusable("prompt_tokens", self.prompt_tokens, "expected 0 or more tokens")
        if self.max_tokens < 0:
            raise self._unusable("max_tokens", self.max_tokens, "expected 0 or more tokens")

    def _unusable(self, field: str, value: object, expected: str) -> BadInput:
        return BadInput(expected, field=f"request {self.id}: {field}", value=value)
