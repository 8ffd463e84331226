"""The rules of SGLang and TensorRT-LLM, against oracles of their scheduling loops on random stories, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig
from tests.schedulers.naive_sglang import NaiveSGLang, SGLang
from tests.schedulers.naive_tensorrt_llm import NaiveTensorRT, TensorRT
from tests.schedulers.test_engine_against_naive import Pair, Visit, blocks_of_largest

CHUNKING = {"fcfs": "first_come_first_served", "equal": "equal_progress"}


def sglang_pair(args: SGLang, depth: int, rules: str = "sglang") -> Pair:
    config = EngineConfig(
        num_gpu_blocks=args.pages,
        block_size=args.page_size,
        prefix_id_tokens=args.page_size * args.id_pages,
        chunk_unit_size=args.page_size,
        max_num_batched_tokens=args.chunked_prefill_size,
        max_num_seqs=args.max_running_requests,
        max_prefill_tokens=args.max_prefill_tokens,
        prefill_max_requests=args.prefill_max_requests if args.prefill_max_requests < 10**6 else 0,
        enable_mixed_chunk=False,
        cache_blocks_on="computed",
        scheduling_policy="lpm" if args.lpm else "fcfs",
        preemption_policy="fewest_outputs",
        capacity_scheduler_policy="new_token_ratio",
        schedule_conservativeness=args.conservativeness,
        scheduler=rules,
    )
    return Pair(config, NaiveSGLang(args), depth)


def tensorrt_pair(limits: TensorRT, depth: int) -> Pair:
    config = EngineConfig(
        num_gpu_blocks=limits.pages,
        block_size=limits.tokens_per_block,
        prefix_id_tokens=limits.tokens_per_block * limits.id_pages,
        chunk_unit_size=limits.tokens_per_block if limits.chunking else 1,
        context_chunking_policy=CHUNKING.get(limits.chunking),
        enable_chunked_prefill=bool(limits.chunking),
        max_num_batched_tokens=limits.max_num_tokens,
        max_num_seqs=limits.max_batch_size,
        enable_prefix_caching=limits.reuse,
        cache_blocks_on="computed",
        in_batch_prefix_caching=limits.reuse,
        kv_reservation="prompt",
        capacity_scheduler_policy=limits.capacity,
        scheduler="tensorrt-llm",
    )
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


@pytest.mark.parametrize("depth", [1, 2])
@given(
    visits=visits,
    page=st.sampled_from([1, 1, 2, 4]),
    id_pages=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 24),
    chunk=st.integers(1, 10),
    input_tokens=st.sampled_from([10**6, 10**6, 12, 30]),
    requests=st.sampled_from([10**6, 10**6, 1, 2]),
    seats=st.integers(1, 8),
    conservativeness=st.sampled_from([1.0, 1.0, 0.3, 2.0]),
    lpm=st.booleans(),
)
@example(  # an answer that ended has left room, which is seen though no sequence decodes
    visits=[*[Visit(0, 1, 1)] * 11, Visit(1, 1, 1), Visit(0, 1, 2, stop=1), Visit(0, 1, 1)],
    page=1, id_pages=1, spare=3, chunk=1, input_tokens=10**6, requests=10**6, seats=2, conservativeness=1.0, lpm=False,
)  # fmt: skip
@example(  # who waits is sorted where a slot is free, not where the batch turns out to be full
    visits=[
        Visit(0, 6, 3), Visit(0, 2, 3), Visit(1, 2, 1, (0,)), Visit(0, 1, 2, (0, 0)), Visit(0, 3, 3, (1, 0)),
        Visit(1, 3, 1, (1, 0)),
    ],
    page=2, id_pages=1, spare=15, chunk=6, input_tokens=30, requests=10**6, seats=4, conservativeness=2.0, lpm=True,
)  # fmt: skip
def test_sglang(
    depth: int, visits: list[Visit], page: int, id_pages: int, spare: int, chunk: int, input_tokens: int,
    requests: int, seats: int, conservativeness: float, lpm: bool,
) -> None:  # fmt: skip
    args = SGLang(
        pages=blocks_of_largest(visits, page) + spare, page_size=page, id_pages=id_pages,
        chunked_prefill_size=4 * chunk, max_prefill_tokens=input_tokens, prefill_max_requests=requests,
        max_running_requests=seats, conservativeness=conservativeness, lpm=lpm,
    )  # fmt: skip
    sglang_pair(args, depth).run(visits)


@pytest.mark.parametrize("depth", [1, 2])
@given(
    visits=visits,
    block=st.sampled_from([1, 2, 4]),
    id_pages=st.sampled_from([1, 2]),
    spare=st.integers(0, 12),
    budget=st.integers(4, 40),
    seats=st.integers(1, 8),
    capacity=st.sampled_from(["guaranteed_no_evict", "guaranteed_no_evict", "max_utilization", "static_batch"]),
    chunking=st.sampled_from(["", "fcfs", "equal"]),
)
@example(  # nothing is reserved for a sequence whose last token is in flight
    visits=[Visit(0, 2, 1), Visit(0, 5, 6), Visit(0, 1, 1), Visit(0, 1, 2)],
    block=1, id_pages=1, spare=7, budget=4, seats=7, capacity="guaranteed_no_evict", chunking="fcfs",
)  # fmt: skip
@example(  # a request that comes to follow a prompt under way lets those behind it pass
    visits=[Visit(0, 20, 17, (1, 0, 0)), Visit(0, 10, 1, (0, 0, 0, 0, 1, 0)), Visit(0, 1, 1, (0,))],
    block=2, id_pages=2, spare=4, budget=6, seats=4, capacity="guaranteed_no_evict", chunking="fcfs",
)  # fmt: skip
def test_tensorrt_llm(
    depth: int, visits: list[Visit], block: int, id_pages: int, spare: int, budget: int, seats: int,
    capacity: str, chunking: str,
) -> None:  # fmt: skip
    limits = TensorRT(
        pages=blocks_of_largest(visits, block) + spare, tokens_per_block=block, id_pages=id_pages,
        max_num_tokens=max(budget, seats + 4) if chunking else max(budget, seats + 48), max_batch_size=seats,
        capacity=capacity, chunking=chunking, reuse=capacity != "max_utilization",
    )  # fmt: skip
    visits = [replace(visit, ids=visit.ids[: (visit.prompt - 1) // (block * id_pages)]) for visit in visits]
    tensorrt_pair(limits, depth).run(visits)
