"""A topology as a server's backend: rank 0 in a thread, between the event loop and the workers.

The thread alone runs the role and waits for workers. The event loop submits and aborts, and gets each step's tokens as
a call on the loop. The thread never touches the loop's requests or their stop checks: it works on copies.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from live.backend import BackendLimits, BackendState
from live.engine import Progress
from live.generation import Generation, TopLogprobs
from live.models.config import ModelConfig
from live.topologies.deployment import Deployment
from live.topologies.in_process import InProcessWorkers
from live.topologies.processes import END_SECONDS, WorkerProcesses
from live.topologies.requests import FINISH_REASONS, append_token
from live.topologies.transport import TransportError

Rows = list[tuple[int, int, int, tuple[float, TopLogprobs] | None]]
"""New tokens: request id, token, code of the finish reason; log-probabilities of it and of the most likely tokens."""


class TopologyBackend:
    """A topology whose workers have loaded their models, as `live.backend.Backend`."""

    def __init__(self, deployment: Deployment, workers: WorkerProcesses | InProcessWorkers) -> None:
        self._deployment = deployment
        self._workers = workers
        self._role = deployment.front(workers.transport, self._note)
        self._generations: dict[int, Generation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Progress], None] = lambda progress: None
        self._fail: Callable[[str], None] = lambda reason: None
        self._thread = threading.Thread(target=self._run, name="topology", daemon=True)

    @property
    def config(self) -> ModelConfig:
        return self._deployment.config

    @property
    def limits(self) -> BackendLimits:
        return self._deployment.limits

    @property
    def models(self) -> tuple[str, ...]:
        return self._deployment.models

    def state(self) -> BackendState:
        return self._role.state()

    def start(self, deliver: Callable[[Progress], None], fail: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._fail = fail
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        self._role.submit(replace(generation, stop_check=None, output=[], token_logprobs=[], top_logprobs=[]))
        generation.submitted = time.perf_counter()
        self._generations[generation.request.id] = generation
        self._workers.wake()

    def abort(self, request_id: int) -> None:
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            generation.finish_reason = "abort"
            self._role.abort(request_id)
            self._workers.wake()

    def close(self) -> None:
        """End the workers, and wait until they have ended."""
        self._role.stop()
        self._workers.wake()
        if self._thread.is_alive():
            self._thread.join(END_SECONDS)
        self._workers.close()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._workers.run(self._role.run())
        except TransportError as error:
            self._report(str(error))
        except Exception as error:
            self._report(str(self._workers.fail(f"{type(error).__name__}: {error}")))

    def _report(self, reason: str) -> None:
        self._workers.disconnect()
        self._call(lambda: self._fail(reason))

    def _note(self, progress: Progress) -> None:
        rows: Rows = []
        for generation in progress.advanced:
            wants = generation.logprobs >= 0
            logprobs = (generation.token_logprobs[-1], generation.top_logprobs[-1]) if wants else None
            code = FINISH_REASONS.index(generation.finish_reason)
            rows.append((generation.request.id, generation.output[-1], code, logprobs))
        if rows:
            self._call(lambda: self._take(rows))

    def _call(self, action: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    # -- on the loop -------------------------------------------------------------------------------------------------

    def _take(self, rows: Rows) -> None:
        now = time.perf_counter()
        advanced, finished = [], []
        for request_id, token, code, logprobs in rows:
            generation = self._generations.get(request_id)
            if generation is None:  # aborted meanwhile
                continue
            advanced.append(generation)
            if logprobs is not None:
                generation.token_logprobs.append(logprobs[0])
                generation.top_logprobs.append(logprobs[1])
            if append_token(generation, token, code, now):
                finished.append(generation)
                del self._generations[request_id]
                if not code:  # its stop check has ended it
                    self._role.abort(request_id)
        self._deliver(Progress(advanced, finished))
