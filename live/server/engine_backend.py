"""One engine as a backend: the event loop steps it.

Between two steps the loop serves the clients: it writes tokens, and reads and parses requests, which could not have run
before the next step anyway. Nothing is passed from thread to thread, and nothing waits for the interpreter lock
(docs/decisions/0019).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from live.backend import BackendLimits, BackendState
from live.engine import Engine, Progress
from live.generation import Generation
from live.loaded_model import ModelRanks
from live.models.config import ModelConfig
from live.topologies.transport import TransportError
from schedulers.speculation import SpeculativeEngineCore

log = logging.getLogger("live.server")


class EngineBackend:
    """An engine that the event loop steps as long as there are requests, as `live.backend.Backend`.

    Args:
        models: the name of the base model and of its adapters; empty without adapters.
        ranks: the processes of a tensor-parallel model; None without.

    Attributes:
        engine, ranks: to be looked at only.
    """

    def __init__(self, engine: Engine, models: tuple[str, ...] = (), ranks: ModelRanks | None = None) -> None:
        self.engine = engine
        self.ranks = ranks
        self._models = models
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Progress], None] = lambda progress: None
        self._fail: Callable[[str], None] = lambda reason: None
        self._stepping = False

    @property
    def config(self) -> ModelConfig:
        return self.engine.executor.decoder.config

    @property
    def limits(self) -> BackendLimits:
        settings = self.engine.core.config
        return BackendLimits(
            min(self.config.max_position_embeddings, settings.num_gpu_blocks * settings.block_size),
            settings.max_num_seqs,
            settings.num_gpu_blocks,
            settings.block_size,
            settings.prefix_id_tokens,
        )

    @property
    def models(self) -> tuple[str, ...]:
        return self._models

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
        except Exception as error:
            if isinstance(error, TransportError):
                return self._report(str(error))
            log.exception("the engine has failed")
            return self._report(f"the engine has failed: {type(error).__name__}: {error}")
        self._stepping = result is not None
        if result is not None:
            self._deliver(result.progress)
            self._loop.call_soon(self._step)
