"""The backend that a server drives: one engine, or a topology of several workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from live.engine import Progress
from live.generation import Generation
from live.models.config import ModelConfig
from schedulers.speculation import SpeculationStats


class BackendState(NamedTuple):
    """The present state of a backend, for metrics; counts are since the start.

    `kv_cache_usage`: fraction of blocks. `steps_by_models`: decode steps with sequences of 1, 2, … models, if several.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    steps_by_models: tuple[int, ...] = ()
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class BackendLimits:
    """The sizes that limit requests: tokens of a prompt and its output together, requests that run at once, blocks."""

    max_model_len: int
    max_num_seqs: int
    num_gpu_blocks: int
    block_size: int
    prefix_id_tokens: int


class Backend(Protocol):
    """Generates tokens for requests. All methods are called on the event loop's thread."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def limits(self) -> BackendLimits: ...

    @property
    def models(self) -> tuple[str, ...]: ...

    def start(self, deliver: Callable[[Progress], None], fail: Callable[[str], None]) -> None:
        """Begin. On the running event loop, `deliver` is called with what each step has changed, and `fail` once if the
        backend cannot go on, with the reason in one line.
        """

    def submit(self, generation: Generation) -> None:
        """Run a generation; `ValueError` for a request that cannot be run."""

    def abort(self, request_id: int) -> None:
        """Abort a generation; of one that is finished nothing happens."""

    def state(self) -> BackendState:
        """The present state."""
