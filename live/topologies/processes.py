"""The processes of a topology: what they start from, a worker's life, workers of this machine, and the front's thread.

`TopologyBackend` has rank 0 in a thread, between the event loop and the workers. The thread alone runs the role and
waits for workers. The event loop submits and aborts, and gets each step's tokens as a call on the loop. The thread
never touches the loop's requests or their stop checks: it works on copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

import torch

from live.backend import BackendLimits, BackendState
from live.device import freeze_loaded_objects
from live.engine import Progress
from live.generation import Generation, TopLogprobs
from live.loaded_model import DTYPES, Models, ModelSource
from live.models.config import ModelConfig
from live.topologies.bundle.coordinator import BundleLayout, Coordinator
from live.topologies.bundle.workers import AttentionWorker, FFNWorker, zero_rows
from live.topologies.deployment import Deployment, MakeWorker, OnProgress, Ranks
from live.topologies.local import InProcessWorkers
from live.topologies.membership import Address, Membership, listen_at
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import PoolsLayout
from live.topologies.pools.worker import EngineWorker
from live.topologies.sockets import MakeGroup, SocketTransport, device_link, group_store
from live.topologies.transport import FINISH_REASONS, Transport, TransportError, append_token
from schedulers.bundle_slots import REFILL_POLICIES
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput, TwinError

END_SECONDS = 5.0
"""Grace period for workers that have been told to end."""

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment of every process: the errors of its connections are reported by `Membership`, in one line."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds for all processes to come, and for a worker's answer, and so for the longest step."""

    join: float = 10.0
    answer: float = 6.0


def run_worker(
    deployment: Ranks, rank: int, address: Address, limits: TimeLimits, make_group: MakeGroup | None = None
) -> None:
    """Run one worker of a topology until the topology ends; without `make_group`, GPUs are linked by NCCL, CPUs not.

    Raises `TransportError`, which names the rank that failed first, or `BadInput` for a model that cannot be loaded.
    """
    members = Membership(address, rank, deployment.names, deployment.fingerprint, join_seconds=limits.join)
    transport: SocketTransport | None = None
    try:
        members.gather()
        make_worker = deployment.load(rank, Models())
        freeze_loaded_objects()
        members.ready()
        link = None
        if make_group is not None or deployment.device != "cpu":
            link = device_link(members, limits.answer, deployment.device, make_group)
            members.on_failure(link.abort)  # on a GPU nothing else would end the host's waits
        transport = SocketTransport(members, deployment.forms(), limits.answer, link)
        transport.run(make_worker(transport).run())
    except TransportError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, TwinError) else f"{type(error).__name__}: {error}"
        failure = members.fail(f"{members.name(rank)} has failed: {' '.join(reason.split())}")
        if isinstance(error, TwinError):
            raise
        raise failure from error
    finally:
        if transport is not None:
            transport.close()
        members.close()


class WorkerProcesses(SocketTransport):
    """The workers of a topology in processes of their own, and the means to drive the front's role among them."""

    def __init__(
        self, deployment: Deployment, members: Membership, started: LocalWorkers | None, limits: TimeLimits
    ) -> None:
        self._store = None if deployment.device == "cpu" else group_store(members)  # workers' devices meet by it
        super().__init__(members, deployment.forms(), limits.answer)
        self._started = started
        self.transport = self

    def fail(self, reason: str) -> TransportError:
        """An error of the front itself, made known to the workers; an earlier failure of another goes first."""
        return self._members.fail(f"{self._members.name(0)} has failed: {reason}")

    def disconnect(self) -> None:
        """Close the connections: the workers notice it at once."""
        super().close()

    def close(self) -> None:
        """Wait until the workers have ended; those on this machine that do not end by themselves are ended."""
        super().close()
        if self._started is not None:
            self._started.close()
        self._members.close()


@contextlib.contextmanager
def gathered(
    ranks: Ranks, address: Address, limits: TimeLimits, gpus: Mapping[int, str],
    commands: Callable[[Address], Mapping[int, Sequence[str]]] | None,
) -> Iterator[tuple[Membership, LocalWorkers | None]]:  # fmt: skip
    """Rank 0 among the others, when all have come.

    `commands`: of workers that are started on this machine, by the address at which all meet; None: they start by
    themselves. `gpus`: the GPU that each of these sees; empty: all.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen_at(address))
        names = ranks.names
        members = Membership(address, 0, names, ranks.fingerprint, listener=listener, join_seconds=limits.join)
        workers = None
        stack.callback(members.close)
        if commands is not None:
            workers = LocalWorkers(commands(members.meeting_point), names, gpus)
            stack.callback(workers.close)
            members.watch = workers.check
            members.extend(limits.join * len(names))  # workers of one machine share its processors to start
        members.gather()
        yield members, workers


class LocalWorkers:
    """Workers in processes on this machine, each with its command, and the GPU that it sees (by default all)."""

    def __init__(
        self, commands: Mapping[int, Sequence[str]], names: Sequence[str], gpus: Mapping[int, str] | None = None
    ) -> None:
        self._names = names
        self._errors: dict[int, IO[str]] = {}
        self._processes: dict[int, subprocess.Popen[str]] = {}
        for rank, command in commands.items():
            self._errors[rank] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            self._processes[rank] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors[rank],
                start_new_session=True,  # Ctrl-C is for the server alone, which ends them
                env={**os.environ, **QUIET, **({"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {})},
                text=True,
            )

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def check(self) -> None:
        """Raise how one of them has ended, if one has."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                line = self._last_line(rank)
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise TransportError(f"rank {rank} ({self._names[rank]}) has ended with {how}{line and f': {line}'}")

    def close(self) -> None:
        """Wait until all have ended; end those that do not by themselves."""
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in self._errors.values():
            file.close()

    def _last_line(self, rank: int) -> str:
        self._errors[rank].seek(0)
        lines = self._errors[rank].read().splitlines()
        return lines[-1] if lines else ""


def visible_gpus(ranks: Iterable[int]) -> dict[int, str]:
    """A GPU of this machine for each of several ranks; `BadInput` if there are fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    workers = list(ranks)
    if len(names) < len(workers):
        expected = f"expected {len(workers)} GPUs, one for each rank that computes, found {len(names)}"
        raise BadInput(expected, field="--device", value="cuda")
    return dict(zip(workers, names, strict=False))


Rows = list[tuple[int, int, int, tuple[float, TopLogprobs] | None]]
"""New tokens: request id, token, code of the finish reason; log-probabilities of it and of the most likely tokens."""


class TopologyBackend:
    """A topology whose workers have loaded their models, as `live.backend.Backend`."""

    def __init__(self, deployment: Deployment, workers: WorkerProcesses | InProcessWorkers) -> None:
        self.config: ModelConfig = deployment.config
        self.limits: BackendLimits = deployment.limits
        self.models = deployment.models
        self._workers = workers
        self._role = deployment.front(workers.transport, self._note)
        self._generations: dict[int, Generation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Progress], None] = lambda progress: None
        self._fail: Callable[[str], None] = lambda reason: None
        self._thread = threading.Thread(target=self._run, name="topology", daemon=True)

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


@dataclass(frozen=True)
class BundleDeployment(Deployment):
    """A bundle with its model. `refill` names the policy by which requests get slots (`REFILL_POLICIES`)."""

    layout: BundleLayout
    refill: str = "fcfs"

    def front(self, transport: Transport, on_progress: OnProgress) -> Coordinator:
        longest = self.limits.max_model_len
        return Coordinator(self.layout, longest, transport, on_progress, REFILL_POLICIES.select(self.refill))

    def load(self, rank: int, models: Models) -> MakeWorker:
        if rank in self.layout.attention_ranks:
            decoder = models.attention(self.model)
            return lambda transport: AttentionWorker(self.layout, decoder, transport, graphs=self.uses_graphs)
        ffns, dtype, device = models.ffns(self.model), DTYPES[self.model.dtype], torch.device(self.device)
        captured = zero_rows(self.config, dtype, device, 1) if self.uses_graphs else None
        return lambda transport: FFNWorker(self.layout, ffns, transport, captured=captured)

    def _settings(self) -> object:
        return self.refill


@dataclass(frozen=True)
class PoolsDeployment(Deployment):
    """Pools of engines, with the models' own weights by model, and what makes each engine's chunk policy."""

    layout: PoolsLayout
    modules: Mapping[str, ModelSource] = field(default_factory=dict)
    chunks: tuple[Callable[[], ChunkPolicy | None], ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.layout.prefill) if len(self.layout.prefill) > 1 else ()

    def front(self, transport: Transport, on_progress: OnProgress) -> Frontend:
        return Frontend(self.layout, self.limits.max_model_len, transport, on_progress)

    def load(self, rank: int, models: Models) -> MakeWorker:
        module = self.layout.engines[rank - 1].module
        decoder = models.decoder(self.model if module is None else self.modules[module])
        chunks = self.chunks[rank - 1]() if self.chunks else None
        graphs = self.uses_graphs
        return lambda transport: EngineWorker(self.layout, rank, decoder, transport, chunks, graphs=graphs)

    def _settings(self) -> object:
        return [(name, source.config(), source.random, source.seed) for name, source in sorted(self.modules.items())]
