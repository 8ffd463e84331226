"""The backend that a server drives: one engine, which the event loop steps, or a topology of several workers.

Between two steps the loop serves the clients: it writes tokens, and reads and parses requests, which could not have run
before the next step anyway. Nothing is passed from thread to thread, and nothing waits for the interpreter lock
(docs/decisions/0019).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from live.engine import Engine, Progress
from live.generation import Generation
from live.loaded_model import ModelRanks
from live.models.config import ModelConfig
from schedulers.engine_config import EngineConfig
from schedulers.speculation import SpeculationStats, SpeculativeEngineCore
from workloads.errors import TwinError

log = logging.getLogger("live.server")


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

    @classmethod
    def of(cls, config: ModelConfig, engines: Sequence[EngineConfig]) -> BackendLimits:
        """The limits of requests for a model that run on one of several engines."""
        return cls(
            min(config.max_position_embeddings, *(engine.num_gpu_blocks * engine.block_size for engine in engines)),
            sum(engine.max_num_seqs for engine in engines),
            sum(engine.num_gpu_blocks for engine in engines),
            engines[0].block_size,
            engines[0].prefix_id_tokens,
        )


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


class EngineBackend:
    """An engine that the event loop steps as long as there are requests, as a `Backend`.

    Args:
        models: the name of the base model and of its adapters; empty without adapters.
        ranks: the processes of a tensor-parallel model; None without.

    Attributes:
        engine, ranks: to be looked at only.
    """

    def __init__(self, engine: Engine, models: tuple[str, ...] = (), ranks: ModelRanks | None = None) -> None:
        self.engine = engine
        self.ranks = ranks
        self.models = models
        self.config: ModelConfig = engine.executor.decoder.config
        self.limits = BackendLimits.of(self.config, [engine.core.config])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Progress], None] = lambda progress: None
        self._fail: Callable[[str], None] = lambda reason: None
        self._stepping = False

    def start(self, deliver: Callable[[Progress], None], fail: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._fail = fail
        if self.ranks is not None:
            self.ranks.on_failure(self._report_from_any_thread)

    def submit(self, generation: Generation) -> None:
        self.engine.submit(generation)
        if not self._stepping:
            assert self._loop is not None, "the backend has been started"
            self._stepping = True
            self._loop.call_soon(self._step)

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)

    def state(self) -> BackendState:
        core = self.engine.core
        return BackendState(
            core.num_running,
            core.num_waiting,
            1 - core.kv_cache.num_free_blocks / core.kv_cache.num_blocks,
            core.prefill_tokens,
            core.cached_tokens,
            core.preemptions,
            speculation=core.stats if isinstance(core, SpeculativeEngineCore) else None,
        )

    def close(self) -> None:
        """End the other ranks of a model."""
        if self.ranks is not None:
            self.ranks.close()

    def _report(self, reason: str) -> None:
        """Say that the backend cannot go on, unless that has been said."""
        fail, self._fail = self._fail, lambda reason: None
        fail(reason)

    def _report_from_any_thread(self, reason: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._report, reason)

    def _step(self) -> None:
        """Run a step, deliver its output, and schedule the next step behind what that leads to."""
        assert self._loop is not None
        try:
            result = self.engine.step()
            if result is None and self.engine.core.sequences:
                raise RuntimeError(f"{len(self.engine.core.sequences)} requests are left and none of them can run")
        except TwinError as error:
            return self._report(str(error))
        except Exception as error:
            log.exception("the engine has failed")
            return self._report(f"the engine has failed: {type(error).__name__}: {error}")
        self._stepping = result is not None
        if result is not None:
            self._deliver(result)
            self._loop.call_soon(self._step)
