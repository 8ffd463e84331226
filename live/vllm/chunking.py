"""SPEAR's chunk sizing in vLLM's scheduler (SPEAR 4.3), by the policies of `schedulers.chunking`."""

from __future__ import annotations

from typing import Any

from live.vllm.settings import read_settings, vllm_config_of
from schedulers.chunking import ChunkPolicy


class SizesChunks:
    """Mixin of vLLM's `Scheduler` and `AsyncScheduler`: a chunk policy limits the prompt tokens of each step.

    Before each step `max_num_scheduled_tokens`, which running requests use up first, is set to the rows of its decodes
    and the prompt tokens that the policy allows beside them.
    """

    running: list[Any]
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = vllm_config_of(args, kwargs)
        self.chunk_policy: ChunkPolicy | None = read_settings(config.additional_config).chunk_policy()
        self._token_budget = self.max_num_scheduled_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step within the policy's limit."""
        if self.chunk_policy is not None:
            rows = kv_tokens = longest = context = 0
            for request in self.running:
                tokens = decode_rows(request)
                if tokens:
                    attended = request.num_computed_tokens + tokens
                    rows += tokens
                    kv_tokens += attended
                    longest = max(longest, attended)
                elif request.is_prefill_chunk and not context:
                    context = request.num_computed_tokens
            limit = rows + self.chunk_policy.max_prefill_tokens(rows, kv_tokens, longest, context)
            self.max_num_scheduled_tokens = min(limit, self._token_budget)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]


def decode_rows(request: Any) -> int:
    """Rows of a running request in the next step as a decode, drafts included; 0 for a prompt, or a last token in
    flight.
    """
    computed = request.num_computed_tokens
    pending = request.num_output_placeholders
    if request.is_prefill_chunk:
        return 0
    if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
        return 0
    rows: int = request.num_tokens_with_spec + pending - computed
    return rows
