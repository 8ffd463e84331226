"""A request while a scheduler works on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from schedulers.kv_cache import SequenceBlocks

if TYPE_CHECKING:
    from workloads.request import Request

WAITING: Final = 0
PREFILLING: Final = 1
DECODING: Final = 2
FINISHING: Final = 3
FINISHED: Final = 4
"""States. FINISHING: the last token is computed by a step that has begun and not ended; slot and blocks are kept."""


class Sequence:
    """One request in one engine. `EngineCore` owns and changes it; a backend reads it and may set `payload`.

    Attributes:
        seq_id: position in the order of submission; breaks ties in every order. queue_index: the same at first; a
            new one where the scheduler looks at it late (`scheduler_recv_interval`) or queues it again behind others.
        num_tokens_to_compute: tokens that its prefill computes: the prompt, and after a preemption the generated tokens
            as well.
        num_computed_tokens: tokens in the KV cache. Not updated while the sequence decodes: ask the `DecodeSet`.
        num_output_tokens: output tokens whose step has begun. Not updated while the sequence decodes either.
        max_tokens: output tokens after which the scheduler ends it; at least 1, since a request without output runs
            one step too.
        num_cached_tokens: prompt tokens that the prefix cache supplied at the latest admission.
        blocks: its KV blocks. hold_blocks: keep them when it has finished, until they are transferred.
        kv_offset, joined_step, left_step: bookkeeping of `DecodeSet`; `left_step` is the step at which it last left.
        blocks_reserved: blocks for the whole output were allocated at admission.
        admission_index: position in the order of admissions, the latest one of this sequence.
        preemptions: times that it was preempted. preempted_step: step of its latest token when it was last preempted
            while decoding.
        prefix_loaded: its prefix was loaded from tiers below the device since it was queued.
        charged_output_tokens: output tokens that a fair order has charged to its tenant; -1 before its prompt is.
        one_shot: runs as one-shot work: a single forward pass without a decode slot.
    """

    __slots__ = (
        "admission_index", "blocks", "blocks_reserved", "charged_output_tokens", "hold_blocks", "joined_step",
        "kv_offset", "left_step", "max_tokens", "num_cached_tokens", "num_computed_tokens", "num_output_tokens",
        "num_tokens_to_compute", "one_shot", "payload", "preempted_step", "preemptions", "prefix_loaded", "queue_index",
        "request", "seq_id", "state",
    )  # fmt: skip

    def __init__(self, request: Request, seq_id: int, one_shot: bool) -> None:
        self.request = request
        self.seq_id = self.queue_index = seq_id
        self.one_shot = one_shot
        self.state = WAITING
        self.num_tokens_to_compute = request.prompt_tokens
        self.max_tokens = max(request.max_tokens, 1)
        self.num_computed_tokens = self.num_output_tokens = self.num_cached_tokens = self.preemptions = 0
        self.admission_index = 0
        self.kv_offset = self.joined_step = self.left_step = self.preempted_step = 0
        self.hold_blocks = self.prefix_loaded = False
        self.blocks = SequenceBlocks()
        self.blocks_reserved = False
        self.charged_output_tokens = -1
        self.payload: object = None

    def __repr__(self) -> str:
        state = ("waiting", "prefilling", "decoding", "finishing", "finished")[self.state]
        computed = f"{self.num_computed_tokens}/{self.num_tokens_to_compute} computed"
        return f"Sequence({self.request.id}, {state}, {computed}, {self.num_output_tokens} generated)"


def uncached_prefix_key(sequence: Sequence, num_cached_nodes: int) -> int:
    """The first prefix id that is not cached: a leader computes it, and its followers wait for it."""
    ids = sequence.request.prefix_blocks
    return ids[num_cached_nodes] if num_cached_nodes < len(ids) else -1 - sequence.seq_id
