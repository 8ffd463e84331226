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
        prefills: whether it has some, other than the last one of a prompt that is just admitted.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.holds = self.prefills = False
        self._step, self._last_prefill = 0, -interval
        self._left_waiting = False

    def begin_step(self, decodes: bool) -> None:
        """Decide about the step being scheduled. `decodes`: whether a running sequence has its prompt computed."""
        too_early = self._step + 1 - self._last_prefill < self.interval
        self.holds = decodes and too_early and not self._left_waiting
        self.prefills = False

    def end_step(self, runs: bool, left_waiting: bool | None) -> None:
        """Note whether anything was scheduled, and whether a request was left waiting.

        `left_waiting` is None where none was considered, since a sequence was preempted.
        """
        if runs:
            self._step += 1
        if self.prefills:
            self._last_prefill = self._step
        if not self.holds and left_waiting is not None:
            self._left_waiting = left_waiting


class BatchWait:
    """Holds prompts back beside decodes until a step has enough tokens, for at most `timeout_iters` steps.

    TensorRT-LLM 1.2 `_torch/pyexecutor/py_executor.py`, `_waiting_requests`. Steps count that have both.

    Attributes:
        enough: tokens of a step, decodes included, from which on prompts run.
    """

    def __init__(self, timeout_iters: int, enough: float) -> None:
        self._timeout_iters = timeout_iters
        self.enough = enough
        self._waited = 0

    def holds(self, num_tokens: int) -> bool:
        """Tell whether prompts wait in a step that would have `num_tokens` tokens with them."""
        holds = self._waited < self._timeout_iters and num_tokens < self.enough
        self._waited = self._waited + 1 if holds else 0
        return holds


class PromptBalance:
    """Holds prompts back until all ranks of a group have some, so that a step is not long for the sake of one.

    TensorRT-LLM's `attention_dp_config` (1.2 `_torch/pyexecutor/py_executor.py`, `_balance_adp_requests`). Prompts wait
    for other ranks' for at most `timeout_iters` steps. Once all ranks have some, they wait for more for
    `batching_wait_iters` steps. They do not wait where a rank has nothing to decode. Steps count in which a rank has
    prompts.
    """

    def __init__(self, timeout_iters: int, batching_wait_iters: int) -> None:
        self._timeout_iters = timeout_iters
        self._batching_wait_iters = batching_wait_iters
        self._waited = self._batched = 0

    def holds(self, with_prompts: int, with_decodes: int, with_room: int, ranks: int) -> bool:
        """Tell whether the next step computes no prompts.

        Args:
            with_prompts, with_decodes, with_room: of the `ranks` ranks, those with prompts to compute, with decodes,
                and with fewer decodes than may run.
        """
        if not with_prompts:
            return False
        if with_prompts == with_room == ranks:
            self._waited = 0
            if with_decodes == ranks and self._batched < self._batching_wait_iters:
                self._batched += 1
                return True
            self._batched = 0 if with_decodes == ranks else self._batched
            return False
        self._waited += 1
        if self._waited >= self._timeout_iters or with_decodes < ranks:
            self._waited = 0
            return False
        return True
