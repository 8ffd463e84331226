"""Replays a workload on a scheduler and notes what it decides in each step."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from schedulers.batches import Batch
from schedulers.engine_core import EngineCore
from schedulers.sequence import FINISHED
from tests.vllm_parity.workloads import Visit, Workload
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


class OurScheduler:
    """`EngineCore` under test."""

    def __init__(self, workload: Workload) -> None:
        self.core = EngineCore(workload.config)
        self.visits = workload.visits
        self.in_flight: deque[Batch] = deque()
        self.delivered: Counter[int] = Counter()

    def submit(self, number: int, visit: Visit, now: int) -> None:
        arrival = now + number / 1000
        request = Request(
            number, arrival, visit.prompt, visit.max_tokens, prefix_blocks=visit.ids, priority=visit.priority
        )
        self.core.submit(request, now)

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


class VllmScheduler:
    """The scheduler of the installed vLLM under test."""

    def __init__(self, workload: Workload) -> None:
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        from tests.vllm_parity import installed

        self.installed, self.make_output, self.aborted = installed, ModelRunnerOutput, RequestStatus.FINISHED_ABORTED
        self.block_size = workload.config.block_size
        self.scheduler: Any = installed.make_scheduler(workload.config, workload.depth > 1)
        caching = workload.config.enable_prefix_caching
        self.hash_blocks = installed.block_hasher(self.block_size) if caching else None
        self.visits = workload.visits
        self.in_flight: deque[tuple[Any, list[str]]] = deque()

    def token(self, number: int, position: int) -> int:
        """The token at a position of a request: its blocks have the same tokens wherever their ids are the same."""
        visit = self.visits[number]
        block, offset = divmod(position, self.block_size)
        if position == visit.prompt + visit.answer - 1 and visit.answer < visit.max_tokens:
            return int(self.installed.STOP_TOKEN)
        if block < len(visit.ids):
            return 10 + visit.ids[block] * self.block_size + offset
        return 10**6 + number * 10**4 + position

    def submit(self, number: int, visit: Visit, now: int) -> None:
        prompt = [self.token(number, position) for position in range(visit.prompt)]
        request = self.installed.make_request(
            number,
            prompt,
            visit.max_tokens,
            arrival=now + number / 1000,
            priority=visit.priority,
            hash_blocks=self.hash_blocks,
        )
        self.scheduler.add_request(request)

    def abort(self, number: int, now: int) -> None:
        self.scheduler.finish_requests(str(number), self.aborted)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()

    def begin(self, now: int) -> Decision | None:
        scheduler = self.scheduler
        before = {request.request_id for request in scheduler.running}
        output = scheduler.schedule()
        if not output.total_num_scheduled_tokens:
            return None
        requests = scheduler.requests
        sampled = [id for id in output.num_scheduled_tokens if not requests[id].is_prefill_chunk]
        self.in_flight.append((output, sampled))
        admitted = []
        for request in scheduler.running:
            if request.request_id not in before:
                cached = request.num_computed_tokens - output.num_scheduled_tokens[request.request_id]
                admitted.append((int(request.request_id), cached))
        preempted = [(int(id), request.num_preemptions) for id, request in requests.items() if request.num_preemptions]
        return Decision(
            tuple(sorted((int(id), count) for id, count in output.num_scheduled_tokens.items())),
            tuple(int(request.request_id) for request in scheduler.running),
            tuple(sorted(preempted)),
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            tuple(sorted(admitted)),
        )

    def end(self, now: int) -> None:
        output, sampled = self.in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for id in ids:
            request = self.scheduler.requests.get(id)
            deliver = id in sampled and request is not None
            tokens.append([self.token(int(id), request.num_tokens)] if deliver else [])
        result = self.make_output(
            req_ids=ids, req_id_to_index={id: index for index, id in enumerate(ids)}, sampled_token_ids=tokens
        )
        self.scheduler.update_from_output(output, result)

    def unfinished(self) -> bool:
        return bool(self.scheduler.requests)
