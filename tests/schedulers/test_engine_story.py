"""Stories worked by hand: every step of a few requests, with why it is so; and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.engine_core import EngineCore
from schedulers.sequence import WAITING, SubmitOptions
from tests.schedulers.stories import chat, judge, step, steps

BLOCKS = {"block_size": 4, "prefix_id_tokens": 4}


def test_six_requests_in_ten_blocks() -> None:
    """16 rows a step, 3 seats, 10 blocks of 4 tokens; one-shot work may take 12 rows.

    Requests: 0 is longer than a step; 1 begins like it; 2 is a judge; 3 loses its cache; 4 gives up; 5 finds a prefix
    that nobody holds any more.
    """
    core = EngineCore(
        EngineConfig(
            num_gpu_blocks=10, max_num_batched_tokens=16, max_num_seqs=3, one_shot=OneShotBudget(tokens=12), **BLOCKS
        )
    )
    # 20 tokens in steps of 16: four blocks, of which the first three have ids and can be found from now on.
    core.submit(chat(0, 20, 8, (1, 2, 3)), 0.0)
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 0:0+16", 6)
    # Whoever is under way goes first: 4 tokens, a fifth block. Of the 14 tokens of request 1 the cache spares 12; for
    # its other two it takes one block beside the three that it shares.
    core.submit(chat(1, 14, 6, (1, 2, 3)), 0.0)
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 0:16+4! 1:12+2!", 4)
    assert core.cached_tokens == 12
    # Request 0's 21st token starts a block. The judge's 10 rows leave 16 - 2 - 10 = 4 to request 3, hence one block;
    # the judge itself takes neither block nor seat. Request 4 finds no row.
    for request in (judge(2, 10), chat(3, 9, 5), chat(4, 8, 5)):
        core.submit(request, 0.0)
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 2:0+10! 3:0+4 | 0 1", 2)
    assert (len(core.running), len(core.one_shot_running)) == (3, 0)
    # Request 3's other 5 tokens want its second and third block. All seats are taken, so 4 waits.
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 3:4+5! | 0 1", 0)
    # It gives up.
    assert core.abort(4, 0.0) is not None
    # Request 1 has 16 tokens, so its next one starts a block, and none is free. The youngest, 3, loses its three
    # blocks: one goes to request 1, and two, which are full, remember what was computed in them. Nobody is admitted in
    # a step that preempts.
    assert (step(core), core.kv_cache.num_free_blocks) == ("decode | 0 1", 2)
    assert (core.preemptions, core.sequences[3].state, core.num_waiting) == (1, WAITING, 1)
    # Request 3 has to compute its 9 tokens and the one it was given: three blocks, and two are free.
    assert (step(core), core.kv_cache.num_free_blocks) == ("decode | 0 1", 2)
    # Request 0's 25th token starts a block: one of those that remembered request 3. Request 1 has its sixth token and
    # leaves two blocks of its own; the other three are shared with request 0.
    assert (step(core), core.kv_cache.num_free_blocks) == ("decode | 0 1", 3)
    # Request 3 finds the block that is left of it, 4 tokens, and computes 6. Request 5 would share three blocks and
    # lacks a fourth.
    core.submit(chat(5, 13, 2, (1, 2, 3)), 0.0)
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 3:4+6! | 0", 0)
    # Request 0 gets its eighth token and leaves: 27 cached tokens are 7 blocks, three of which stay findable.
    assert (step(core), core.kv_cache.num_free_blocks) == ("decode | 0 3", 7)
    # Request 5 takes those three from the free ones, and one for its 13th token, which it has to compute.
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 5:12+1! | 3", 3)
    # Request 3's 13th token starts a block, and is the fifth that it is given: 1 before it lost its cache, 1 with its
    # second prefill, 3 since. Request 5 gets its second.
    assert (step(core), core.kv_cache.num_free_blocks) == ("decode | 3 5", 10)
    assert (step(core), core.sequences, core.outstanding_tokens) == ("nothing", {}, 0)
    # 16 + 4, 2, 10, 4 + 5 and 6, 1; spared were 12, 4 and 12.
    assert (core.prefill_tokens, core.cached_tokens) == (48, 28)


def leading_core(rows: int = 64) -> EngineCore:
    return EngineCore(
        EngineConfig(
            num_gpu_blocks=40, max_num_batched_tokens=rows, max_num_seqs=4,
            cache_blocks_on="computed", in_batch_prefix_caching=True, one_shot=OneShotBudget(tokens=64), **BLOCKS,
        )
    )  # fmt: skip


def test_a_cold_prefix_has_one_leader_and_its_peers_wait_a_step() -> None:
    """Three judges share a rubric of 8 tokens, the fourth has one of its own."""
    core = leading_core()
    for request in (judge(0, 12, (1, 2)), judge(1, 11, (1, 2)), judge(2, 10, (9,)), judge(3, 9, (1, 2, 3))):
        core.submit(request, 0.0)
    # 0 leads. 1 and 3 miss the same first block that 0 computes, and wait; 2 misses another.
    assert step(core) == "one-shot 0:0+12! 2:0+10!"
    # The rubric is computed. What they miss now, nobody else computes: 3 + 1 rows instead of 20.
    assert step(core) == "one-shot 1:8+3! 3:8+1!"
    assert (core.prefill_tokens, core.cached_tokens) == (26, 16)
    # Three blocks are remembered (1, 2 and 9), and nobody holds any. Of judge 3's ids the third lies beyond its prompt.
    assert (core.kv_cache.num_free_blocks, core.prefix_leaders) == (40, {})
    core.submit(judge(4, 12, (1, 2)), 0.0)
    assert step(core) == "one-shot 4:8+4!"


def test_peers_follow_a_leader_that_takes_several_steps() -> None:
    """16 rows a step: 0 computes blocks 1 to 4, then 5, 6 and its own; each time its peer would miss just those."""
    core = leading_core(16)
    core.submit(chat(0, 26, 2, (1, 2, 3, 4, 5, 6)), 0.0)
    core.submit(chat(1, 26, 2, (1, 2, 3, 4, 5, 6)), 0.0)
    assert steps(core) == ["mixed 0:0+16", "mixed 0:16+10!", "mixed 1:24+2! | 0", "decode | 1"]


def test_without_leaders_peers_compute_a_cold_prefix_side_by_side() -> None:
    core = EngineCore(
        EngineConfig(num_gpu_blocks=40, max_num_batched_tokens=64, max_num_seqs=4, cache_blocks_on="computed", **BLOCKS)
    )
    for id in (0, 1):
        core.submit(chat(id, 12, 2, (1, 2)), 0.0)
    assert step(core) == "mixed 0:0+12! 1:0+12!"


def test_whoever_led_and_gave_up_leaves_the_lead_to_a_peer() -> None:
    core = leading_core()
    for id in (0, 1):
        core.submit(chat(id, 12, 2, (1, 2)), 0.0)
    batch = core.begin_step(0.0)
    assert batch is not None
    core.abort(0, 0.0)
    core.end_step(batch, (), 0.0)
    assert steps(core) == ["mixed 1:0+12!", "decode | 1"]


def test_each_class_has_its_budget() -> None:
    """32 rows a step and one seat; one-shot work may take 20 rows and two places."""
    core = EngineCore(
        EngineConfig(
            num_gpu_blocks=40, max_num_batched_tokens=32, max_num_seqs=1,
            one_shot=OneShotBudget(tokens=20, sequences=2), **BLOCKS,
        )
    )  # fmt: skip
    for request in (judge(0, 8), judge(1, 8), judge(2, 4), chat(3, 30, 3), chat(4, 5, 2)):
        core.submit(request, 0.0)
    # Two judges fill their class's places, though neither its tokens nor the step; what is left goes to the chat.
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 0:0+8! 1:0+8! 3:0+16", 36)
    # The third judge has room. Chat 4 has none: the only seat is chat 3's.
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 3:16+14! 2:0+4!", 32)
    # No step may take 25 tokens of one-shot work: 20, kept in 5 blocks, and still no seat.
    core.submit(judge(5, 25), 0.0)
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 5:0+20 | 3", 27)
    # Chat 3's 31st token and its 32nd, which was its third, needed no further block; judge 5's last 5 take two for a
    # moment.
    assert (step(core), core.kv_cache.num_free_blocks) == ("mixed 5:20+5! | 3", 40)
    assert steps(core) == ["mixed 4:0+5!", "decode | 4"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpu_blocks": 0}, "num_gpu_blocks: expected at least 1, found 0"),
        ({"block_size": -4}, "block_size: expected at least 1, found -4"),
        ({"prefix_id_tokens": 0}, "prefix_id_tokens: expected at least 1, found 0"),
        ({"prefix_id_tokens": 24}, "prefix_id_tokens: expected a multiple of block_size (16), found 24"),
        ({"max_table_blocks": -1}, "max_table_blocks: expected 0 (no limit) or more, found -1"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 7},
            "max_num_batched_tokens: expected at least max_num_seqs (8), since every running sequence gets a token a "
            "step, found 7",
        ),
        (
            {"scheduling_policy": "lifo"},
            "scheduling_policy: expected one of fcfs, priority, shortest_prompt, deadline, lpm, fair, found 'lifo'",
        ),
        ({"cache_blocks_on": "never"}, "cache_blocks_on: expected one of scheduled, computed, found 'never'"),
        ({"kv_reservation": "all"}, "kv_reservation: expected one of chunk, prompt, max_tokens, found 'all'"),
        (
            {"in_batch_prefix_caching": True},
            "in_batch_prefix_caching: expected cache_blocks_on computed, where two requests of a step can miss the "
            "same prefix, found scheduled",
        ),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        EngineConfig(**{"num_gpu_blocks": 10, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "one_shot.tokens: expected at least 1, found 0"),
        ({"sequences": 0}, "one_shot.sequences: expected at least 1, found 0"),
        ({"bytes_per_token": -1.0}, "one_shot.bytes_per_token: expected 0 or more, found -1.0"),
        (
            {"activation_bytes": 100.0, "bytes_per_token": 128.0},
            "one_shot.activation_bytes: expected room for a token, which takes bytes_per_token (128), found 100",
        ),
    ],
)
def test_budgets_under_which_nothing_could_run_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        OneShotBudget(**settings)


def test_the_least_that_is_allowed() -> None:
    config = EngineConfig(1, block_size=1, max_num_batched_tokens=1, max_num_seqs=1, prefix_id_tokens=1)
    assert config.num_gpu_blocks == 1
    assert EngineConfig(1, max_num_batched_tokens=128, max_num_seqs=128).max_num_seqs == 128
    assert OneShotBudget(tokens=1, sequences=1, activation_bytes=3.5, bytes_per_token=3.5).max_step_tokens() == 1


def test_memory_limits_one_shot_tokens() -> None:
    assert OneShotBudget(tokens=100, activation_bytes=350, bytes_per_token=10).max_step_tokens() == 35
    assert OneShotBudget(tokens=20, activation_bytes=350, bytes_per_token=10).max_step_tokens() == 20
    assert OneShotBudget(tokens=20, activation_bytes=5).max_step_tokens() == 20


def test_requests_that_are_refused_leave_nothing_behind() -> None:
    core = EngineCore(EngineConfig(num_gpu_blocks=5, max_num_batched_tokens=16, max_num_seqs=3, **BLOCKS))
    core.submit(chat(7, 8, 5), 0.0)
    refused = {
        "request 7: expected an id that is not being served, found one that is": chat(7, 3, 3),
        "request 8: expected a prompt of at least 1 token, found none": chat(8, 0, 3),
        # The last token of an answer is never cached.
        "request 9: expected at most 5 KV blocks, 21 prompt and output tokens take 6": chat(9, 10, 12),
    }
    for message, request in refused.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            core.submit(request, 0.0)
    assert (list(core.sequences), core.outstanding_tokens, core.num_waiting) == ([7], 13, 1)
    core.submit(chat(9, 10, 11), 0.0)
    # The prompt's last 2 tokens want a third block, which request 7's answer takes. So it waits for the end of that.
    assert steps(core) == ["mixed 7:0+8! 9:0+8", *["decode | 7"] * 4, "mixed 9:8+2!", *["decode | 9"] * 10]


@pytest.mark.parametrize(
    ("order", "policy", "preempted"),
    [("fcfs", None, 1), ("priority", None, 0), ("priority", "newest", 1), ("fcfs", "lowest_priority", 0)],
)
def test_which_sequence_is_preempted(order: str, policy: str | None, preempted: int) -> None:
    """The older request has the lower priority. Both start a block at their 9th token, and none is free."""
    core = EngineCore(EngineConfig(4, scheduling_policy=order, preemption_policy=policy, **BLOCKS))
    for request in (chat(0, 7, 8, priority=5), chat(1, 7, 8, priority=0)):
        core.submit(request, 0.0)
        step(core)
    steps_until = next(n for n in range(5) if step(core) and core.preemptions)
    assert steps_until <= 2
    assert [core.sequences[id].preemptions for id in (0, 1)] == [preempted == 0, preempted == 1]


def test_a_prompt_under_way_is_preempted_after_all_decodes() -> None:
    """Its third chunk and the chat's next token each need the last of four blocks."""
    limits = {"max_num_batched_tokens": 5, "max_num_seqs": 3, "scheduler_reserve_full_isl": False}
    core = EngineCore(EngineConfig(4, preemption_policy="fewest_outputs", **limits, **BLOCKS))
    core.submit(chat(0, 4, 6), 0.0)
    assert step(core) == "mixed 0:0+4!"
    core.submit(chat(1, 14, 2), 0.0)
    assert steps(core)[:4] == ["mixed 1:0+4 | 0", "mixed 1:4+4 | 0", "mixed 1:8+4", "mixed 1:12+2!"]


def test_blocks_of_a_whole_answer_are_taken_with_the_prompt_s() -> None:
    """Twelve tokens are cached: the last of an answer never is."""
    core = EngineCore(EngineConfig(10, max_num_seqs=3, kv_reservation="max_tokens", **BLOCKS))
    core.submit(chat(0, 4, 9), 0.0)
    assert {(step(core) != "nothing", core.kv_cache.num_free_blocks) for _ in range(8)} == {(True, 7)}
    assert step(core) == "decode | 0"
    assert core.kv_cache.num_free_blocks == 10


def test_a_sequence_preempted_by_the_step_that_admits_it_has_no_cache_to_take_back() -> None:
    """A prefill engine's cache is written when the step runs, and by then its blocks belong to another sequence."""
    core = EngineCore(EngineConfig(num_gpu_blocks=3, block_size=4, prefix_id_tokens=4))
    core.submit(chat(0, 4, 2), 0.0)
    assert step(core) == "mixed 0:0+4!"
    core.submit(chat(1, 7, 3), 0.0, SubmitOptions(remote_prefill=True))
    batch = core.begin_step(0.0)
    assert ([row.request.id for row in batch.transferred], [row.request.id for row in batch.decodes]) == ([1], [0])
    core.end_step(batch, [], 0.0)
    assert steps(core) == ["mixed 1:0+8!", "decode | 1"]
