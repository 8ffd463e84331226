"""Replays a workload on a scheduler and notes what it decides in each step."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple, Protocol
from zlib import crc32

from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.hosted_core import ScheduledRequest
from schedulers.sequence import FINISHED, SubmitOptions
from tests.vllm_parity.workloads import Visit, Workload
from twin.serving.engine.installed_vllm import InstalledScheduler
from workloads.request import Request


class Decision(NamedTuple):
    """One step.

    Attributes:
        tokens: of each request that runs, in the order of numbers. running: requests with a slot, in vLLM's order.
        preemptions: of each unfinished request that was preempted, how often so far.
        free_blocks: blocks that are free. cached: prefix tokens that the cache supplied, of each request admitted now.
    """

    tokens: tuple[tuple[int, int], ...]
    running: tuple[int, ...]
    preemptions: tuple[tuple[int, int], ...]
    free_blocks: int
    cached: tuple[tuple[int, int], ...]

    def digest(self) -> int:
        """The decision in 16 bits."""
        return crc32(repr(tuple(self)).encode()) & 0xFFFF


class Replayed(Protocol):
    """A scheduler under test."""

    def submit(self, number: int, visit: Visit, now: int) -> None: ...
    def abort(self, number: int, now: int) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def begin(self, now: int) -> Decision | None:
        """Begin a step; None if there is nothing to run."""
        ...

    def end(self, now: int) -> None:
        """End the oldest step that has begun."""
        ...

    def unfinished(self) -> bool: ...


def decisions(workload: Workload, scheduler: Replayed) -> list[Decision]:
    """The decisions of a whole workload.

    Raises:
        AssertionError: the scheduler does not come to an end.
    """
    steps: list[Decision] = []
    in_flight = now = 0
    work = sum(visit.prompt + visit.max_tokens for visit in workload.visits)
    while now <= workload.last_round or scheduler.unfinished() or in_flight:
        if now in workload.reset_at:
            scheduler.reset_prefix_cache()
        for number, visit in enumerate(workload.visits):
            if visit.at == now:
                scheduler.submit(number, visit, now)
        for number, visit in enumerate(workload.visits):
            if visit.abort == now:
                scheduler.abort(number, now)
        decision = scheduler.begin(now)
        if decision is not None:
            steps.append(decision)
            in_flight += 1
        if in_flight == workload.depth or (in_flight and decision is None):
            scheduler.end(now)
            in_flight -= 1
        now += 1
        assert now < 1000 + 20 * work, f"{workload.name}: no end after {now} rounds"
    return steps


def difference(expected: list[Decision], found: list[Decision]) -> str | None:
    """The first step in which two schedulers differ, in words; None if there is none."""
    for step, (one, two) in enumerate(zip(expected, found, strict=False), start=1):
        if one != two:
            fields = [name for name in Decision._fields if getattr(one, name) != getattr(two, name)]
            lines = [f"{name}: {getattr(one, name)}, found {getattr(two, name)}" for name in fields]
            return f"step {step}: expected " + "; ".join(lines)
    if len(expected) != len(found):
        return f"expected {len(expected)} steps, found {len(found)}"
    return None


def request_of(number: int, visit: Visit, now: int) -> Request:
    """The request of a visit that comes now."""
    arrival = now + number / 1000
    return Request(number, arrival, visit.prompt, visit.max_tokens, prefix_blocks=visit.ids, priority=visit.priority)


class OurScheduler:
    """`EngineCore` under test."""

    def __init__(self, workload: Workload, core: EngineCore | None = None) -> None:
        self.core = core or EngineCore(workload.config)
        self.visits = workload.visits
        self.in_flight: deque[Batch] = deque()
        self.delivered: Counter[int] = Counter()

    def submit(self, number: int, visit: Visit, now: int) -> None:
        self.core.submit(request_of(number, visit, now), now)

    def abort(self, number: int, now: int) -> None:
        self.core.abort(number, now)

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    def begin(self, now: int) -> Decision | None:
        core, before = self.core, set(self.core.running)
        batch = core.begin_step(now)
        core.check_integrity()
        if batch is None:
            return None
        self.in_flight.append(batch)
        tokens = [(sequence.request.id, 1) for sequence in batch.decodes]
        tokens += [(chunk.sequence.request.id, chunk.tokens) for chunk in batch.chunks]
        preempted = [(s.request.id, s.preemptions) for s in core.sequences.values() if s.preemptions]
        admitted = [(s.request.id, s.num_cached_tokens) for s in core.running if s not in before]
        return Decision(
            tuple(sorted(tokens)),
            tuple(sequence.request.id for sequence in core.running),
            tuple(sorted(preempted)),
            core.kv_cache.num_free_blocks,
            tuple(sorted(admitted)),
        )

    def end(self, now: int) -> None:
        batch = self.in_flight.popleft()
        stopped = []
        for sequence in [*batch.decodes, *(chunk.sequence for chunk in batch.chunks if chunk.last)]:
            if sequence.state != FINISHED:
                self.delivered[sequence.request.id] += 1
                if self.delivered[sequence.request.id] == self.visits[sequence.request.id].answer:
                    stopped.append(sequence)
        self.core.end_step(batch, stopped, now)
        self.core.check_integrity()

    def unfinished(self) -> bool:
        return bool(self.core.sequences)


class HostedByOurs:
    """`HostedScheduler` by an `EngineCore`, in place of vLLM's scheduler."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config)
        self.in_flight: deque[Batch] = deque()
        self.preemptions: dict[int, int] = {}

    def add(self, request: Request, max_tokens: int) -> None:
        self.core.submit(request, 0.0, SubmitOptions(max_tokens))

    def schedule(self) -> tuple[list[int], list[ScheduledRequest]]:
        batch, before = self.core.begin_step(0.0), self.preemptions
        self.preemptions = {number: sequence.preemptions for number, sequence in self.core.sequences.items()}
        preempted = [number for number, count in self.preemptions.items() if count > before.get(number, 0)]
        if batch is None:
            return preempted, []
        self.in_flight.append(batch)
        decodes = [ScheduledRequest(sequence.request.id, 1, -1) for sequence in batch.decodes]
        chunks = [ScheduledRequest(chunk.sequence.request.id, chunk.tokens, chunk.context) for chunk in batch.chunks]
        return preempted, decodes + chunks

    def end_step(self, stopped: set[int]) -> None:
        sequences = [self.core.sequences[number] for number in sorted(stopped)]
        self.core.end_step(self.in_flight.popleft(), sequences, 0.0)

    def abort(self, request_id: int) -> None:
        self.core.abort(request_id, 0.0)

    def cached_prefix_tokens(self, request: Request) -> int:
        return self.core.cached_prefix_tokens(request)

    def num_free_blocks(self) -> int:
        return self.core.kv_cache.num_free_blocks

    def num_unfinished(self) -> int:
        return len(self.core.sequences)


class VllmScheduler:
    """The scheduler of the installed vLLM under test."""

    def __init__(self, workload: Workload) -> None:
        self.host = InstalledScheduler(workload.config, workload.depth > 1)
        self.scheduler = self.host.scheduler
        self.visits = workload.visits

    def submit(self, number: int, visit: Visit, now: int) -> None:
        self.host.add(request_of(number, visit, now), visit.max_tokens)

    def abort(self, number: int, now: int) -> None:
        if str(number) in self.scheduler.requests:
            self.host.abort(number)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def begin(self, now: int) -> Decision | None:
        before = {request.request_id for request in self.scheduler.running}
        _, scheduled = self.host.schedule()
        if not scheduled:
            return None
        running = tuple(int(request.request_id) for request in self.scheduler.running)
        requests = self.scheduler.requests.items()
        return Decision(
            tuple(sorted((number, tokens) for number, tokens, _ in scheduled)),
            running,
            tuple(sorted((int(id), request.num_preemptions) for id, request in requests if request.num_preemptions)),
            self.host.num_free_blocks(),
            tuple(sorted((n, cached) for n, _, cached in scheduled if str(n) not in before and n in running)),
        )

    def end(self, now: int) -> None:
        lengths = {int(id): request.num_tokens + 1 for id, request in self.scheduler.requests.items()}
        visits = self.visits
        self.host.end_step({n for n, tokens in lengths.items() if tokens == visits[n].prompt + visits[n].answer})

    def unfinished(self) -> bool:
        return bool(self.scheduler.requests)
