"""One-shot work beside chats (Prelude 3): one forward pass where a step can hold it, within budgets of its own."""

from __future__ import annotations

import pytest

from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.engine_core import EngineCore
from schedulers.step_policies import StaticChunks
from tests.schedulers.stories import batch_text, chat, judge, step, steps
from workloads.request import Request


def core(
    rows: int = 64, budget: OneShotBudget | None = None, blocks: int = 100, policy: int | None = None
) -> EngineCore:
    config = EngineConfig(
        num_gpu_blocks=blocks, block_size=4, max_num_batched_tokens=rows, max_num_seqs=4, prefix_id_tokens=4,
        one_shot=budget or OneShotBudget(tokens=64, sequences=8),
    )  # fmt: skip
    return EngineCore(config, None if policy is None else StaticChunks(policy))


def submit(engine: EngineCore, *requests: object) -> None:
    for request in requests:
        engine.submit(request, 0.0)  # type: ignore[arg-type]


def test_a_prompt_that_the_next_step_holds_whole_waits_for_it() -> None:
    """The chat leaves 34 of 64 rows, the judge wants 40: cut, it would take two passes and KV blocks."""
    engine = core()
    submit(engine, chat(0, 30, 2), judge(1, 40))
    assert step(engine) == "mixed 0:0+30!"
    assert engine.kv_cache.num_free_blocks == 100 - 8
    assert step(engine) == "mixed 1:0+40! | 0"


STORIES = {
    # The chat's last 6 tokens leave 58 rows to a judge of 60.
    "a prompt under way is no reason to cut": (
        core(), [chat(0, 70, 2), judge(1, 60)], ["mixed 0:0+64", "mixed 0:64+6!", "mixed 1:0+60! | 0"],
    ),
    "other one-shot work ahead is no reason either": (
        core(), [chat(0, 10, 2), judge(1, 30), judge(2, 30)], ["mixed 0:0+10! 1:0+30!", "mixed 2:0+30! | 0"],
    ),
    # Chat 2 could begin in the 34 rows that are left, and its other 66 tokens would come first in the next step.
    "nobody behind takes the room of the step that it waits for": (
        core(), [chat(0, 30, 3), judge(1, 60), chat(2, 100, 2), chat(3, 20, 2)],
        ["mixed 0:0+30!", "mixed 1:0+60! 2:0+3 | 0", "mixed 2:3+63 | 0", "mixed 2:66+34! 3:0+20!", "decode | 2 3"],
    ),
    "a chunk policy's allowance is a step's room": (
        core(policy=20), [chat(0, 8, 3), judge(1, 18), judge(2, 30)],
        ["mixed 0:0+8!", "mixed 1:0+18! 2:0+1 | 0", "mixed 2:1+19 | 0", "one-shot 2:20+10!"],
    ),
    # A step has 64 rows, but one-shot work may take 16 of them: activation memory for 16.
    "what is cut stays within the class's tokens": (
        core(budget=OneShotBudget(tokens=64, activation_bytes=33.0, bytes_per_token=2.0)), [judge(0, 40)],
        ["one-shot 0:0+16", "one-shot 0:16+16", "one-shot 0:32+8!"],
    ),
    # Its second chunk takes 8 of 16 tokens and one of two places: judge 1 fits, judge 2 would be a third.
    "what is cut counts in the class's budgets of every step": (
        core(budget=OneShotBudget(tokens=16, sequences=2)), [judge(0, 24), judge(1, 4), judge(2, 4)],
        ["one-shot 0:0+16", "one-shot 0:16+8! 1:0+4!", "one-shot 2:0+4!"],
    ),
    # Judge 1 has another output head than judge 0, which is under way; judge 2 has the same and goes ahead.
    "what is cut is of the step's kind": (
        core(budget=OneShotBudget(tokens=16, sequences=8)),
        [judge(0, 24), judge(1, 4, task="embed"), judge(2, 4)],
        ["one-shot 0:0+16", "one-shot 0:16+8! 2:0+4!", "one-shot 1:0+4!"],
    ),
    "a prompt may fill the whole cache": (core(blocks=10), [judge(0, 40)], ["one-shot 0:0+40!"]),
    "a full class does not hold up chats": (
        core(budget=OneShotBudget(tokens=64, sequences=1)), [judge(0, 4), judge(1, 4), chat(2, 100, 2)],
        ["mixed 0:0+4! 2:0+60", "mixed 2:60+40! 1:0+4!", "decode | 2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("engine", "requests", "expected"), STORIES.values(), ids=STORIES)
def test_steps(engine: EngineCore, requests: list[Request], expected: list[str]) -> None:
    submit(engine, *requests)
    assert steps(engine) == expected


def test_whoever_behind_leaves_nothing_for_the_next_step_may_go() -> None:
    engine = core()
    submit(engine, chat(0, 30, 3), judge(1, 60), chat(2, 34, 2))
    assert step(engine) == "mixed 0:0+30! 2:0+34!"
    assert step(engine) == "mixed 1:0+60! | 0 2"


def test_a_prompt_that_no_step_holds_is_cut_at_once_and_gets_its_blocks() -> None:
    engine = core()
    submit(engine, chat(0, 30, 4), judge(1, 70))
    assert step(engine) == "mixed 0:0+30! 1:0+34"
    assert engine.kv_cache.num_free_blocks == 100 - 8 - 9
    assert step(engine) == "mixed 1:34+36! | 0"
    assert (list(engine.one_shot_running), engine.kv_cache.num_free_blocks) == ([], 100 - 8)


def test_what_decodes_take_they_take_of_every_step() -> None:
    """Beside one decode no step holds 64: it is cut rather than kept until the chats have ended."""
    engine = core()
    submit(engine, chat(0, 4, 4))
    assert step(engine) == "mixed 0:0+4!"
    submit(engine, judge(1, 64))
    assert steps(engine) == ["mixed 1:0+63 | 0", "mixed 1:63+1! | 0", "decode | 0"]


def test_what_is_cut_again_needs_its_own_free_blocks_and_further_ones() -> None:
    """Preempted, the judge left 16 tokens in four of five free blocks. Its next chunk takes two more: it waits."""
    engine = core(9, OneShotBudget(tokens=8), blocks=7)
    submit(engine, chat(0, 4, 5))
    assert step(engine) == "mixed 0:0+4!"
    submit(engine, judge(1, 28))
    assert [step(engine) for _ in range(3)] == ["mixed 1:0+8 | 0", "mixed 1:8+8 | 0", "decode | 0"]
    assert (engine.preemptions, engine.kv_cache.num_free_blocks) == (1, 5)
    assert steps(engine) == ["decode | 0", "one-shot 1:16+8", "one-shot 1:24+4!"]


def test_what_is_left_of_a_prompt_that_was_preempted_counts_as_taken() -> None:
    """The judge's 12 tokens are more than a step's 8, so it takes two blocks of four. A chat takes the other two, and
    the judge loses its own before they are cached. It finds them again. A third one for the cache is not free.
    """
    core = EngineCore(
        EngineConfig(
            4, block_size=4, prefix_id_tokens=4, max_num_batched_tokens=9, max_num_seqs=4, cache_blocks_on="computed",
            one_shot=OneShotBudget(tokens=8),
        )
    )  # fmt: skip
    core.submit(chat(0, 4, 6), 0.0)
    assert step(core) == "mixed 0:0+4!"
    core.submit(judge(1, 12, (1, 2, 3)), 0.0)
    ahead = core.begin_step(0.0)
    assert ahead is not None
    assert batch_text(ahead) == "mixed 1:0+8 | 0"
    # A step ahead, nothing is cached yet when the judge wants a third block and there is none.
    then = core.begin_step(0.0)
    assert then is not None
    assert (batch_text(then), core.preemptions, core.kv_cache.num_free_blocks) == ("decode | 0", 1, 2)
    core.end_step(ahead, (), 0.0)
    core.end_step(then, (), 0.0)
    assert step(core) == "mixed 1:8+4! | 0"
    assert steps(core) == ["decode | 0"] * 2
    core.check_integrity()
