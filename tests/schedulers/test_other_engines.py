"""The rules of SGLang and TensorRT-LLM, against oracles of their scheduling loops on random stories, step by step."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.sequence import FINISHED, Sequence
from tests.schedulers.naive_sglang import NaiveSGLang, SGLang
from tests.schedulers.naive_tensorrt_llm import NaiveTensorRT, TensorRT
from tests.schedulers.plant import Visit
from workloads.request import Request


class Pair:
    """An engine and its oracle, driven alike; `depth` steps may be begun and not ended."""

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
            batch = self.begin(clock)
            if len(self.in_flight) == self.depth or (self.in_flight and not batch):
                self.end(visits, clock)
            clock += 1
            assert clock < 1000 + 20 * work
        assert not self.core.sequences
        assert self.core.kv_cache.num_free_blocks == self.core.kv_cache.num_blocks

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


def blocks_of_largest(visits: list[Visit], block_tokens: int) -> int:
    return max(-(-(visit.prompt + visit.limit - 1) // block_tokens) for visit in visits)


CHUNKING = {"fcfs": "first_come_first_served", "equal": "equal_progress"}


def sglang_pair(args: SGLang, depth: int, rules: str = "sglang") -> Pair:
    config = EngineConfig(
        num_gpu_blocks=args.pages, block_size=args.page_size, prefix_id_tokens=args.page_size * args.id_pages,
        chunk_unit_size=args.page_size, max_num_batched_tokens=args.chunked_prefill_size,
        max_num_seqs=args.max_running_requests, max_prefill_tokens=args.max_prefill_tokens,
        scheduler_recv_interval=args.recv_interval,
        prefill_max_requests=args.prefill_max_requests if args.prefill_max_requests < 10**6 else 0,
        enable_mixed_chunk=False, cache_blocks_on="computed", scheduling_policy="lpm" if args.lpm else "fcfs",
        preemption_policy="fewest_outputs", capacity_scheduler_policy="new_token_ratio",
        schedule_conservativeness=args.conservativeness, scheduler=rules,
    )  # fmt: skip
    return Pair(config, NaiveSGLang(args), depth)


def tensorrt_pair(limits: TensorRT, depth: int) -> Pair:
    config = EngineConfig(
        num_gpu_blocks=limits.pages, block_size=limits.tokens_per_block,
        prefix_id_tokens=limits.tokens_per_block * limits.id_pages,
        chunk_unit_size=limits.tokens_per_block if limits.chunking else 1,
        context_chunking_policy=CHUNKING.get(limits.chunking), enable_chunked_prefill=bool(limits.chunking),
        max_num_batched_tokens=limits.max_num_tokens, max_num_seqs=limits.max_batch_size,
        enable_prefix_caching=limits.reuse, cache_blocks_on="computed", in_batch_prefix_caching=limits.reuse,
        kv_reservation="prompt", capacity_scheduler_policy=limits.capacity,
        batch_wait_timeout_iters=limits.batch_wait_timeout_iters,
        batch_wait_max_tokens_ratio=limits.batch_wait_max_tokens_ratio, scheduler="tensorrt-llm",
    )  # fmt: skip
    return Pair(config, NaiveTensorRT(limits), depth)


visits = st.lists(
    st.builds(
        Visit,
        at=st.integers(0, 30),
        prompt=st.integers(1, 24),
        limit=st.integers(1, 24),
        ids=st.lists(st.integers(0, 1), max_size=6).map(tuple),
        stop=st.one_of(st.just(10**6), st.integers(1, 24)),
    ),
    min_size=1,
    max_size=24,
)


sglang_args = st.builds(
    SGLang, pages=st.integers(0, 24), page_size=st.sampled_from([1, 1, 2, 4]), id_pages=st.sampled_from([1, 2, 4]),
    chunked_prefill_size=st.integers(1, 10).map(lambda chunk: 4 * chunk),
    max_prefill_tokens=st.sampled_from([10**6, 10**6, 12, 30]),
    prefill_max_requests=st.sampled_from([10**6, 10**6, 1, 2]), max_running_requests=st.integers(1, 8),
    conservativeness=st.sampled_from([1.0, 1.0, 0.3, 2.0]), lpm=st.booleans(),
    recv_interval=st.sampled_from([1, 1, 2, 5]),
)  # fmt: skip
"""`pages`: those besides what the largest request needs."""

TWO = SGLang(3, chunked_prefill_size=4, max_prefill_tokens=10**6, max_running_requests=2)


@pytest.mark.parametrize("depth", [1, 2])
@given(visits, sglang_args)
@example(  # an answer that ended has left room, which is seen though no sequence decodes
    [*[Visit(0, 1, 1)] * 11, Visit(1, 1, 1), Visit(0, 1, 2, stop=1), Visit(0, 1, 1)], TWO
)
@example(  # the last token of what runs is in flight: there is nothing to run, and arrivals are looked at
    [Visit(0, 1, 1), Visit(0, 1, 1), Visit(6, 1, 10), Visit(16, 1, 1)], replace(TWO, recv_interval=2)
)
@example(  # who arrived before a retraction and is looked at after it waits behind the retracted
    [Visit(0, 1, 10), Visit(1, 1, 8), Visit(8, 1, 1)], replace(TWO, pages=4, conservativeness=0.3, recv_interval=5)
)
@example(  # who is retracted while the only other ends is looked at when it has ended, in a batch that still counts it
    [Visit(0, 1, 10), Visit(1, 1, 8), Visit(10, 1, 1)], replace(TWO, pages=6, conservativeness=0.3)
)
@example(  # who waits is sorted where a slot is free, not where the batch turns out to be full
    [
        Visit(0, 6, 3), Visit(0, 2, 3), Visit(1, 2, 1, (0,)), Visit(0, 1, 2, (0, 0)), Visit(0, 3, 3, (1, 0)),
        Visit(1, 3, 1, (1, 0)),
    ],
    SGLang(15, 2, 1, 24, max_prefill_tokens=30, max_running_requests=4, conservativeness=2.0, lpm=True),
)  # fmt: skip
def test_sglang(depth: int, visits: list[Visit], args: SGLang) -> None:
    args = replace(args, pages=blocks_of_largest(visits, args.page_size) + args.pages)
    sglang_pair(args, depth).run(visits)


@st.composite
def tensorrt_limits(draw: st.DrawFn) -> TensorRT:
    """Settings; `pages`: those besides what the largest request needs."""
    chunking, seats = draw(st.sampled_from(["", "fcfs", "equal"])), draw(st.integers(1, 8))
    capacities = ["guaranteed_no_evict", "guaranteed_no_evict", "max_utilization", "static_batch"]
    capacity, wait = draw(st.sampled_from(capacities)), draw(st.sampled_from([(0, 0.0), (2, 1.0), (5, 0.4)]))
    return TensorRT(
        draw(st.integers(0, 12)), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])),
        max(draw(st.integers(4, 40)), seats + (4 if chunking else 48)), seats, capacity, chunking,
        capacity != "max_utilization", *wait,
    )  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@given(visits, tensorrt_limits())
@example(  # nothing is reserved for a sequence whose last token is in flight
    [Visit(0, 2, 1), Visit(0, 5, 6), Visit(0, 1, 1), Visit(0, 1, 2)], TensorRT(7, 1, 1, 11, 7, chunking="fcfs")
)
@example(  # a request that comes to follow a prompt under way lets those behind it pass
    [Visit(0, 20, 17, (1, 0, 0)), Visit(0, 10, 1, (0, 0, 0, 0, 1, 0)), Visit(0, 1, 1, (0,))],
    TensorRT(4, 2, 2, 8, 4, chunking="fcfs"),
)
@example(  # a prefix whose second chunk is in flight is computed again, and its blocks stay copies
    [Visit(0, 9, 4, (0,)), Visit(0, 9, 2, (0,))], TensorRT(4, 4, 2, 7, 3, chunking="fcfs")
)
def test_tensorrt_llm(depth: int, visits: list[Visit], limits: TensorRT) -> None:
    block = limits.tokens_per_block
    limits = replace(limits, pages=blocks_of_largest(visits, block) + limits.pages)
    visits = [replace(visit, ids=visit.ids[: (visit.prompt - 1) // (block * limits.id_pages)]) for visit in visits]
    tensorrt_pair(limits, depth).run(visits)
