"""`EngineCore` counts blocks and decodes; the oracle walks every request over physical blocks. Step by step they
agree."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.sequence import FINISHED, Sequence
from tests.schedulers.naive_engine import NaiveEngine, Settings
from workloads.request import Request


@dataclass(frozen=True)
class Visit:
    """One request and what becomes of it: `stop` output tokens end it early, an abort comes `abort` steps after it."""

    at: int
    prompt: int
    limit: int
    ids: tuple[int, ...] = ()
    stop: int = 10**6
    abort: int | None = None
    abort_in_flight: bool = False


def vllm_pair(limits: Settings, depth: int) -> Pair:
    config = EngineConfig(
        num_gpu_blocks=limits.blocks,
        block_size=limits.block_tokens,
        max_num_batched_tokens=limits.max_tokens,
        max_num_seqs=limits.max_seqs,
        enable_prefix_caching=limits.caching,
        prefix_id_tokens=limits.block_tokens * limits.id_blocks,
        cache_blocks_on="scheduled" if limits.share_when_scheduled else "computed",
    )
    return Pair(config, NaiveEngine(limits), depth)


class Pair:
    """Both engines, driven alike; `depth` steps may be begun and not ended."""

    def __init__(self, config: EngineConfig, naive: Any, depth: int) -> None:
        self.depth = depth
        self.core = EngineCore(config)
        self.naive = naive
        self.in_flight: deque[tuple[Batch, Any]] = deque()
        self.delivered: Counter[int] = Counter()
        self.steps = 0

    def run(self, visits: list[Visit]) -> None:
        clock = 0
        work = sum(visit.prompt + visit.limit for visit in visits)
        while self.naive.requests or clock <= max(visit.at for visit in visits):
            for id, visit in enumerate(visits):
                if visit.at == clock:
                    self.core.submit(Request(id, 0.0, visit.prompt, visit.limit, prefix_blocks=visit.ids), clock)
                    self.naive.submit(id, visit.prompt, visit.limit, visit.ids)
            self.abort(visits, clock, in_flight=False)
            batch = self.begin(clock)
            self.abort(visits, clock, in_flight=True)
            if len(self.in_flight) == self.depth or (self.in_flight and not batch):
                self.end(visits, clock)
            clock += 1
            assert clock < 1000 + 20 * work
        assert not self.core.sequences
        assert self.core.kv_cache.num_free_blocks == self.core.kv_cache.num_blocks

    def abort(self, visits: list[Visit], clock: int, in_flight: bool) -> None:
        for id in sorted(self.naive.requests):
            visit = visits[id]
            if visit.abort is not None and visit.at + visit.abort == clock and visit.abort_in_flight == in_flight:
                assert self.core.abort(id, clock) is not None
                self.naive.abort(id)
                self.compare()

    def begin(self, clock: int) -> bool:
        batch, naive = self.core.begin_step(clock), self.naive.begin()
        self.compare()
        if batch is None or naive is None:
            assert batch is naive
            return False
        assert [(chunk.sequence.request.id, chunk.tokens, chunk.context) for chunk in batch.chunks] == naive.chunks
        assert sorted(sequence.request.id for sequence in batch.decodes) == sorted(id for id, _ in naive.decodes)
        lengths = [tokens for _, tokens in naive.decodes]
        assert (batch.n_decodes, batch.decode_kv) == (len(lengths), sum(lengths))
        assert batch.longest_decode == max(lengths, default=0)
        assert sorted(sequence.request.id for sequence in batch.finishing) == sorted(naive.ending)
        assert batch.step_index == naive.number
        self.in_flight.append((batch, naive))
        self.steps += 1
        return True

    def end(self, visits: list[Visit], clock: int) -> None:
        batch, naive = self.in_flight.popleft()
        stopped: list[Sequence] = []
        receivers = [*batch.decodes, *(chunk.sequence for chunk in batch.chunks if chunk.last)]
        for sequence in receivers:
            if sequence.state != FINISHED:
                id = sequence.request.id
                self.delivered[id] += 1
                if self.delivered[id] == visits[id].stop:
                    stopped.append(sequence)
        remaining = self.naive.end(naive, [sequence.request.id for sequence in stopped])
        finished = self.core.end_step(batch, stopped, clock)
        assert sorted((sequence.request.id, sequence.num_output_tokens) for sequence in finished) == sorted(remaining)
        for id, generated in remaining:
            assert generated == self.delivered[id] == min(visits[id].limit, visits[id].stop)
        self.compare()

    def compare(self) -> None:
        self.core.check_integrity()
        self.naive.check()
        assert self.core.kv_cache.num_free_blocks == self.naive.free
        assert len(self.core.running) == len(self.naive.running)
        assert self.core.num_waiting == len(self.naive.requests) - len(self.naive.running)
        assert self.core.preemptions == self.naive.preemptions


ids = st.lists(st.integers(0, 1), max_size=6).map(tuple)
visits = st.lists(
    st.builds(
        Visit,
        at=st.integers(0, 30),
        prompt=st.integers(1, 24),
        limit=st.integers(1, 24),
        ids=ids,
        stop=st.one_of(st.just(10**6), st.integers(1, 24)),
        abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)),
        abort_in_flight=st.booleans(),
    ),
    min_size=1,
    max_size=24,
)


def blocks_of_largest(visits: list[Visit], block_tokens: int) -> int:
    return max(-(-(visit.prompt + visit.limit - 1) // block_tokens) for visit in visits)


@pytest.mark.parametrize("depth", [1, 2])
@given(
    visits=visits,
    block_tokens=st.sampled_from([1, 2, 4]),
    id_blocks=st.sampled_from([1, 1, 2, 4]),
    spare=st.integers(0, 12),
    budget=st.integers(1, 40),
    seats=st.integers(1, 8),
    caching=st.sampled_from([True, True, True, False]),
    scheduled=st.sampled_from([True, True, False]),
)
@example(  # two answers fill the same blocks: the block that was full first is found, whichever answer was longer then
    visits=[Visit(8, 1, 1), Visit(0, 2, 16, (0, 0)), Visit(8, 1, 1), Visit(0, 2, 8, (0, 0))],
    block_tokens=4, id_blocks=1, spare=0, budget=2, seats=2, caching=True, scheduled=True,
)  # fmt: skip
@example(  # the last input of an aborted answer is not known when its step begins before the one before has ended
    visits=[Visit(0, 1, 2, (0, 0), abort=1, abort_in_flight=True), Visit(3, 3, 1, (0, 0))],
    block_tokens=1, id_blocks=1, spare=4, budget=8, seats=2, caching=True, scheduled=True,
)  # fmt: skip
def test_any_small_story(
    depth: int,
    visits: list[Visit],
    block_tokens: int,
    id_blocks: int,
    spare: int,
    budget: int,
    seats: int,
    caching: bool,
    scheduled: bool,
) -> None:
    limits = Settings(
        blocks=blocks_of_largest(visits, block_tokens) + spare,
        block_tokens=block_tokens,
        id_blocks=id_blocks,
        max_tokens=max(budget, seats),
        max_seqs=seats,
        caching=caching,
        share_when_scheduled=scheduled,
    )
    vllm_pair(limits, depth).run(visits)


def long_story(random: Random) -> list[Visit]:
    """Bursts of chats, a few long ones, with prefixes from a small tree; whole multiples of a block are common."""
    story = []
    for _ in range(150):
        path = tuple(random.randrange(3) for _ in range(random.randrange(9)))
        prompt = random.choice([4, 8]) * random.randrange(1, 12) if random.random() < 0.5 else random.randrange(1, 90)
        story.append(
            Visit(
                at=random.randrange(40) * 10,
                prompt=prompt,
                limit=random.choice([1, 2, 60, 60]),
                ids=path,
                stop=random.randrange(1, 50),
                abort=random.randrange(100) if random.random() < 0.1 else None,
                abort_in_flight=random.random() < 0.5,
            )
        )
    return story


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_long_stories(seed: int, depth: int) -> None:
    random = Random(seed)
    limits = Settings(
        blocks=random.choice([38, 45, 60, 90]),
        block_tokens=4,
        id_blocks=random.choice([1, 1, 2]),
        max_tokens=random.choice([24, 64, 128]),
        max_seqs=random.choice([6, 12, 20]),
        share_when_scheduled=seed % 3 != 0,
    )
    pair = vllm_pair(limits, depth)
    pair.run(long_story(random))
    assert pair.steps > 200
    assert pair.naive.preemptions > 0 or limits.blocks > 45
