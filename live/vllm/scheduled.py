"""The work of one step of vLLM, read from its scheduler's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ScheduledChunk(NamedTuple):
    """Tokens of one prompt in one step behind `context` cached ones; `last`: it also gives the request's next token."""

    request_id: str
    tokens: int
    context: int
    last: bool


class ScheduledStep(NamedTuple):
    """One step: chunks in vLLM's order, ids of decodes, their rows, and cached tokens of all and of the longest."""

    chunks: list[ScheduledChunk]
    decodes: list[str]
    decode_tokens: int
    decode_kv: int
    longest_decode: int


def scheduled_step(output: Any, requests: Mapping[str, Any]) -> ScheduledStep:
    """The step of a `SchedulerOutput`, right after vLLM's requests count it as computed."""
    chunks = []
    decodes = []
    decode_tokens = 0
    decode_kv = 0
    longest = 0
    drafts = output.scheduled_spec_decode_tokens
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        attended = request.num_computed_tokens
        context = attended - tokens
        drafted = len(drafts[request_id]) if request_id in drafts else 0
        if tokens == 1 + drafted and context >= request.num_prompt_tokens:
            decodes.append(request_id)
            decode_tokens += tokens
            decode_kv += attended
            longest = max(longest, attended)
        else:
            chunks.append(ScheduledChunk(request_id, tokens, context, attended >= request.num_tokens))
    return ScheduledStep(chunks, decodes, decode_tokens, decode_kv, longest)
