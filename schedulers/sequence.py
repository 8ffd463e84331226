"""A request as the scheduler carries it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from schedulers.kv_cache import Holding

if TYPE_CHECKING:
    from workloads.request import Request

WAITING: Final = 0
PREFILLING: Final = 1
DECODING: Final = 2
ENDING: Final = 3
FINISHED: Final = 4
"""States. ENDING: its last token is in a step that has begun and not ended; it keeps its place and its blocks."""


class Sequence:
    """One request's life in one engine. Owned by `EngineCore`; a plant reads it, and may hang its own `payload` on it.

    Attributes:
        number: order of submission, the tie-break of every order.
        goal: tokens that a prefill has to compute: the prompt, and after a preemption what was generated as well.
        computed: tokens in the cache. Stands still while the sequence decodes, when `kv_tokens` of the cohort counts.
        generated: output tokens whose step has begun. Stands still while the sequence decodes, as `computed` does.
        limit: output tokens at which the scheduler ends it (`max_tokens`, at least 1 step for those without output).
        cached: prompt tokens that the prefix cache spared at the latest admission.
        holding: its KV blocks. hold: it keeps them when it has finished.
        offset, joined, left: its arithmetic while it decodes, and the tick at which it ceased to (`schedulers.cohort`).
        reserved: the blocks of its whole answer were taken at admission.
        preemptions: how often it lost its cache. lost: the tick of its latest token when it last did so while decoding.
        one_shot: runs under the one-shot contract: a single forward pass, no decode slot.
    """

    __slots__ = (
        "cached", "computed", "generated", "goal", "hold", "holding", "joined", "left", "limit", "lost", "number",
        "offset", "one_shot", "payload", "preemptions", "request", "reserved", "state",
    )  # fmt: skip

    def __init__(self, request: Request, number: int, one_shot: bool) -> None:
        self.request, self.number, self.one_shot = request, number, one_shot
        self.state = WAITING
        self.goal = request.prompt_tokens
        self.limit = max(request.max_tokens, 1)
        self.computed = self.generated = self.cached = self.preemptions = 0
        self.offset = self.joined = self.left = self.lost = 0
        self.hold = False
        self.holding = Holding()
        self.reserved = False
        self.payload: object = None

    def __repr__(self) -> str:
        state = ("waiting", "prefilling", "decoding", "ending", "finished")[self.state]
        return f"Sequence({self.request.id}, {state}, {self.computed}/{self.goal} computed, {self.generated} generated)"
