"""Speculative decoding in the scheduler: as without it where nothing is drafted, and whole whatever is accepted."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig
from schedulers.speculation import Propose, SpeculativeEngineCore, as_many_as_may_be
from schedulers.step_policies import (
    DRAFT_POLICIES,
    ChunkPolicy,
    DraftsByBatchSize,
    FixedDrafts,
    GoodputDrafts,
    StaticChunks,
)  # fmt: skip
from tests.schedulers.plant import Plant, Visit, check_ends
from workloads.request import Request

VISITS = st.lists(
    st.builds(
        Visit,
        at=st.integers(0, 12),
        prompt=st.integers(1, 30),
        limit=st.integers(0, 20),
        stop=st.integers(1, 20),
        ids=st.lists(st.integers(0, 2), max_size=4).map(tuple),
        abort=st.none() | st.integers(0, 12),
        in_flight=st.booleans(),
        priority=st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)

CONFIGS = st.builds(
    EngineConfig, num_gpu_blocks=st.integers(13, 30), block_size=st.just(4), prefix_id_tokens=st.just(4),
    max_num_batched_tokens=st.integers(4, 24), max_num_seqs=st.integers(1, 4), enable_prefix_caching=st.booleans(),
    cache_blocks_on=st.sampled_from(["scheduled", "computed"]),
    kv_reservation=st.sampled_from(["chunk", "prompt", "max_tokens"]),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]), scheduler_reserve_full_isl=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 3]), prefill_schedule_interval=st.sampled_from([1, 3]),
    scheduler=st.sampled_from(["vllm-0.19", "vllm-0.32", "vllm-0.33"]),
)  # fmt: skip


def speculating(
    drafts: int, config: EngineConfig, chunks: ChunkPolicy | None, propose: Propose = as_many_as_may_be
) -> SpeculativeEngineCore:
    core = SpeculativeEngineCore(config, FixedDrafts(drafts), drafts, chunks)
    core.propose = propose
    return core


@given(CONFIGS, VISITS, st.none() | st.integers(4, 12))
@example(
    EngineConfig(13, block_size=4, max_num_batched_tokens=4, max_num_seqs=1, prefix_id_tokens=4),
    [Visit(0, 1, 4, (0,), 4, abort=3, in_flight=True), Visit(0, 5, 0, (0,), 1)],  # the last step completes a block
    None,
)
@example(
    EngineConfig(13, block_size=4, max_num_batched_tokens=4, max_num_seqs=2, prefix_id_tokens=4),
    [Visit(0, 1, 0), Visit(0, 1, 4, (0,)), Visit(3, 5, 0, (0,))],  # an answer is found while it grows
    None,
)
@example(
    EngineConfig(
        13, block_size=4, max_num_batched_tokens=8, max_num_seqs=2, prefix_id_tokens=4, scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
    ),
    [Visit(0, 28, 20, priority=1), Visit(5, 30, 1)],  # a chunk without blocks preempts the lower priority
    None,
)  # fmt: skip
@example(
    EngineConfig(
        13, block_size=4, max_num_batched_tokens=10, max_num_seqs=3, prefix_id_tokens=4, prefill_schedule_interval=3,
        scheduler_reserve_full_isl=False,
    ),
    [Visit(0, 9, 2), Visit(0, 11, 0), Visit(1, 1, 4)],  # a prompt that was held is before a decode
    None,
)  # fmt: skip
def test_without_drafts_it_decides_as_the_plain_scheduler(
    config: EngineConfig, story: list[Visit], limit: int | None
) -> None:
    chunks = StaticChunks(limit) if limit else None
    plain = Plant(config, chunks, 1).run(story)
    undrafted = Plant(config, chunks, 1, make=partial(speculating, 0)).run(story)
    assert (undrafted.steps, undrafted.attended, undrafted.ends) == (plain.steps, plain.attended, plain.ends)


@given(CONFIGS, VISITS, st.integers(1, 5), st.integers(0, 2**20))
def test_whatever_is_accepted_every_request_gets_its_answer_and_every_block_comes_back(
    config: EngineConfig, story: list[Visit], drafts: int, seed: int
) -> None:
    rng = random.Random(seed)
    make = partial(speculating, drafts, propose=lambda sequence, limit: rng.randint(0, limit))
    plant = Plant(config, None, 1, make=make, accept=lambda number, drafted: rng.randint(0, drafted)).run(story)
    check_ends(plant, story)
    stats = plant.core.stats
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens <= stats.num_draft_tokens


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_accepted_drafts_shorten_a_run_as_they_should(drafts: int) -> None:
    """Every draft right: an answer of 61 tokens takes its prompt's step and 60 / (k + 1) more."""
    make = partial(speculating, drafts)
    plant = Plant(EngineConfig(40), None, 1, make=make, accept=lambda number, drafted: drafted).run([Visit(0, 10, 61)])
    assert len(plant.steps) == 1 + 60 // (drafts + 1)
    assert plant.core.stats.num_accepted_tokens == 60 // (drafts + 1) * drafts


def test_a_sequence_gets_its_token_before_another_gets_drafts() -> None:
    """Three decodes and room for 4 tokens: one draft, and nothing for prompts."""
    config = EngineConfig(num_gpu_blocks=40, max_num_batched_tokens=4, max_num_seqs=3)
    core = SpeculativeEngineCore(config, FixedDrafts(3), 3)
    batches = []
    for number in range(3):
        core.submit(Request(number, 0.0, 1, 9), 0.0)
    for _ in range(2):
        batch = core.begin_step(0.0)
        batches.append((batch.n_decodes, list(batch.draft_tokens), batch.prefill_tokens))
        core.record_outputs(batch, [0] * batch.n_decodes, [1] * batch.n_decodes)
        core.end_step(batch, (), 0.0)
    assert batches == [(0, [], 3), (3, [1, 0, 0], 0)]


def test_by_batch_size_drafts_stop_where_the_table_ends() -> None:
    policy = DraftsByBatchSize(4, [8, 32], [4, 2])
    assert [policy.num_draft_tokens(n) for n in (1, 8, 9, 32, 33)] == [4, 4, 2, 2, 0]
    with pytest.raises(ValueError, match="rise"):
        DraftsByBatchSize(4, [8, 8], [4, 2])
    assert set(DRAFT_POLICIES) == {"fixed", "by_batch_size", "goodput"}


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9])
def test_goodput_learns_the_acceptance_and_drafts_less_the_more_a_row_costs(acceptance: float) -> None:
    """A step takes as long as its rows beyond 64: few decodes draft much, many draft nothing, as brute force says."""
    tokens, seconds = [1, 64, 1064], [1.0, 1.001, 11.0]
    policy = GoodputDrafts(6, tokens, seconds)
    rng = random.Random(5)
    for _ in range(3000):
        right = 0
        while right < 3 and rng.random() < acceptance:
            right += 1
        policy.observe(3, right)
    assert policy.acceptance == pytest.approx(acceptance, abs=0.1)

    def rate(drafts: int, decodes: int) -> float:
        emitted = sum(policy.acceptance**i for i in range(drafts + 1))
        rows = decodes * (drafts + 1)
        return emitted / (1.0 + 0.001 * (rows - 1) / 63 if rows <= 64 else 1.001 + (rows - 64) * 9.999 / 1000)

    for decodes in (1, 8, 40, 400):
        best = max(range(7), key=lambda drafts: rate(drafts, decodes))
        assert policy.num_draft_tokens(decodes) == best


@pytest.mark.parametrize(("explore", "drafts"), [(0, [0] * 7), (3, [0, 0, 1, 0, 0, 1, 0])])
def test_goodput_tries_one_draft_now_and_then_where_none_pays(explore: int, drafts: list[int]) -> None:
    policy = GoodputDrafts(6, [1, 100], [1.0, 100.0], acceptance=0.2, explore=explore)
    assert [policy.num_draft_tokens(10) for _ in range(7)] == drafts
