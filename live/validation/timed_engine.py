"""The part of an engine that profiles and replays use: our own (`live.engine`) or vLLM's (`live.vllm.engine`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from live.generation import Generation
from schedulers.batches import Batch
from schedulers.sequence import Sequence as Scheduled


class Finished(Protocol):
    """The result of a step."""

    @property
    def finished(self) -> Sequence[Generation]:
        """The generations that ended with it."""


class TimedEngine(Protocol):
    """An engine whose steps are timed: `watch` is called after each with its batch, its begin and its end."""

    clock: Callable[[], float]
    watch: Callable[[Batch, float, float], None] | None
    keep_times: bool

    @property
    def sequences(self) -> Mapping[int, Any]:
        """Unfinished requests by id, in the order of their submission."""

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""

    @property
    def attention_block(self) -> int:
        """Tokens to multiples of which attention pads decodes; 0 where it pads none."""

    def submit(self, generation: Generation) -> Scheduled:
        """Add a request. Raises ValueError for one that the engine cannot run."""

    def step(self) -> Finished | None:
        """Run a step; None when there is nothing to run."""

    def abort(self, request_id: int) -> object:
        """Abort a request between steps."""
