"""Steps between prompts: decodes run for a while without prompt tokens beside them."""

from __future__ import annotations

from typing import Final

UNLIMITED_TOKENS: Final = 1 << 60
"""More tokens than any prompt has."""


class PrefillInterval:
    """Holds prompts back until `interval` steps have passed since the last with prompt tokens (vLLM 0.33).

    It holds none while no sequence decodes, nor after a step that left a request waiting: prompts are then what limits
    the engine.

    Attributes:
        holds: whether the present step computes no prompt tokens.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.holds = False
        self._step, self._last_prefill = 0, -interval
        self._left_waiting = False

    def begin_step(self, decodes: bool) -> None:
        """Decide about the step being scheduled. `decodes`: whether a running sequence has its prompt computed."""
        too_early = self._step + 1 - self._last_prefill < self.interval
        self.holds = decodes and too_early and not self._left_waiting

    def end_step(self, prefills: bool, runs: bool, left_waiting: bool | None) -> None:
        """Note what was scheduled: prompt tokens, anything at all, and whether a request was left waiting.

        `left_waiting` is None where none was considered, since a sequence was preempted.
        """
        if runs:
            self._step += 1
        if prefills:
            self._last_prefill = self._step
        if not self.holds and left_waiting is not None:
            self._left_waiting = left_waiting
