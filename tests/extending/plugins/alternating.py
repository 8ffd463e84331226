"""A chunk policy with a parameter: prompts in every n-th step that could have some, decodes alone in the others."""

from __future__ import annotations

from schedulers.step_policies import CHUNK_POLICIES


@CHUNK_POLICIES.register("alternating")
class Alternating:
    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"expected every of at least 1, found {every}")
        self.every = every
        self._step = 0

    def max_prefill_tokens(self, num_decodes: int, *cached: int) -> int:
        self._step += 1
        return 2048 if not num_decodes or self._step % self.every == 0 else 0
