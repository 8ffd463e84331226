"""Rules of SGLang, TensorRT-LLM and vLLM one by one, on examples that are worked out by hand."""

from __future__ import annotations

import pytest

from scenarios.engine import EngineSpec
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup
from schedulers.prefill_policies import NewTokenRatio
from schedulers.sequence import SubmitOptions
from workloads.errors import BadInput
from workloads.request import Request


def core_of(**settings: object) -> EngineCore:
    """An engine whose pages have one token, as SGLang's."""
    limits = {
        "num_gpu_blocks": 1000, "block_size": 1, "prefix_id_tokens": 1, "max_num_seqs": 8, "max_num_batched_tokens": 8,
        "cache_blocks_on": "computed", **settings,
    }  # fmt: skip
    return EngineCore(EngineConfig(**limits))  # type: ignore[arg-type]


def run(core: EngineCore, steps: int) -> list[dict[int, int]]:
    """Tokens of each request in the next steps, each of which ends before the next begins."""
    tokens = []
    for step in range(steps):
        batch = core.begin_step(step)
        core.check_integrity()
        if batch is None:
            tokens.append({})
            continue
        tokens.append({sequence.request.id: 1 for sequence in batch.decodes})
        tokens[-1].update({chunk.sequence.request.id: chunk.tokens for chunk in batch.chunks})
        core.end_step(batch, (), step)
    return tokens


def submit(core: EngineCore, *requests: tuple[int, int], ids: tuple[int, ...] = ()) -> None:
    """Submit requests of (prompt, max_tokens), numbered on."""
    for prompt, max_tokens in requests:
        core.submit(Request(core._num_submitted, 0.0, prompt, max_tokens, prefix_blocks=ids), 0)


def test_prompts_run_before_decodes_and_alone() -> None:
    for mixed, steps in ((False, [{1: 4}, {0: 1, 1: 1}]), (True, [{0: 1, 1: 4}, {0: 1, 1: 1}])):
        core = core_of(enable_mixed_chunk=mixed)
        submit(core, (4, 9))
        assert run(core, 2) == [{0: 4}, {0: 1}]
        submit(core, (4, 9))
        assert run(core, 2) == steps


def test_a_step_s_prompt_tokens_are_spent_in_whole_pages() -> None:
    """Of 12 tokens the first prompt takes a page of four, and the second, of nine, gets two of its three pages."""
    core = core_of(block_size=4, prefix_id_tokens=4, chunk_unit_size=4, max_num_batched_tokens=12)
    submit(core, (3, 1), (9, 1))
    assert run(core, 2) == [{0: 3, 1: 8}, {1: 1}]


def test_a_step_takes_no_further_prompt_beyond_its_prompt_tokens_or_its_number_of_prompts() -> None:
    core = core_of(max_num_batched_tokens=100, max_prefill_tokens=10)
    submit(core, (20, 1), (4, 1), (5, 1), (2, 1))
    assert run(core, 3) == [{0: 20}, {1: 4, 2: 5}, {3: 2}]  # the first of a step may be longer
    core = core_of(max_num_batched_tokens=100, prefill_max_requests=2)
    submit(core, (1, 1), (1, 1), (1, 1))
    assert run(core, 2) == [{0: 1, 1: 1}, {2: 1}]


def test_the_ratio_falls_with_decode_steps_and_starts_anew_when_idle() -> None:
    core = core_of(capacity_scheduler_policy="new_token_ratio")
    assert isinstance(core.capacity, NewTokenRatio)
    submit(core, (4, 500))
    run(core, 11)
    decay = (0.7 - 0.098) / 600
    assert core.capacity.ratio == pytest.approx(0.7 - 10 * decay)
    core.advance(400)
    assert core.capacity.ratio == pytest.approx(0.7 - 410 * decay)
    core.abort(0, 0)
    assert core.begin_step(0) is None
    assert core.capacity.ratio == 0.7


def test_a_full_batch_is_full_until_a_decode_step_has_seen_it_smaller() -> None:
    for scheduler, steps in (("sglang", [{0: 1}, {2: 4}]), ("vllm-0.33", [{2: 4}, {0: 1, 2: 1}])):
        core = core_of(
            max_num_seqs=2, enable_mixed_chunk=False, capacity_scheduler_policy="new_token_ratio", scheduler=scheduler
        )
        submit(core, (2, 9), (2, 2), (4, 9))
        assert run(core, 2) == [{0: 2, 1: 2}, {0: 1, 1: 1}]
        assert run(core, 2) == steps


def test_the_longest_cached_prefix_goes_first_but_not_in_a_long_queue() -> None:
    for waiting, first in ((1, 1 + 1), (128, 1)):
        core = core_of(scheduling_policy="lpm", enable_mixed_chunk=False)
        submit(core, (8, 1), ids=(1, 2, 3, 4, 5, 6, 7, 8))
        run(core, 1)
        for _ in range(waiting):
            submit(core, (8, 1))
        submit(core, (8, 1), ids=(1, 2, 3, 4, 5, 6, 7, 8))
        batch = core.begin_step(0)
        assert batch.chunks[0].sequence.request.id == first


def test_prompts_without_a_prefix_lead_nobody() -> None:
    core = core_of(in_batch_prefix_caching=True, max_num_batched_tokens=90, prefix_id_tokens=16)
    submit(core, (20, 1), (20, 1))
    submit(core, (20, 1), ids=(0,))  # an id like the number of a prompt before
    assert run(core, 1) == [{0: 20, 1: 20, 2: 20}]


def test_equal_blocks_are_held_once() -> None:
    for scheduler, free in (("sglang", 1000 - 4), ("vllm-0.33", 1000 - 8)):
        core = core_of(scheduler=scheduler)
        submit(core, (4, 9), (4, 9), ids=(1, 2, 3, 4))
        assert run(core, 1) == [{0: 4, 1: 4}]
        assert core.kv_cache.num_free_blocks == free


def test_prompts_beside_decodes_wait_for_more() -> None:
    """With a decode, prompts of 3 and 2 tokens wait for three steps; with 5 tokens more, ten are there and all run."""
    for chunked in (False, True):
        core = core_of(
            enable_chunked_prefill=chunked, max_num_batched_tokens=20, batch_wait_timeout_iters=3,
            batch_wait_max_tokens_ratio=0.5,
        )  # fmt: skip
        submit(core, (2, 90))
        assert run(core, 1) == [{0: 2}]  # nothing decodes
        submit(core, (3, 1), (2, 1))
        assert run(core, 4) == [{0: 1}] * 3 + [{0: 1, 1: 3, 2: 2}]
        submit(core, (4, 1))
        assert run(core, 1) == [{0: 1}]
        submit(core, (5, 1))
        assert run(core, 2) == [{0: 1, 3: 4, 4: 5}, {0: 1}]


def test_a_step_holds_prompts_that_waited_and_no_more() -> None:
    """Of 8 tokens a decode has one: prompts of 3 and 3 wait, then one of 2 for the next step, since it is not cut."""
    settings = {"batch_wait_timeout_iters": 2, "batch_wait_max_tokens_ratio": 1.0}
    core = core_of(enable_chunked_prefill=False, **settings)
    submit(core, (2, 90))
    run(core, 1)
    submit(core, (3, 1), (3, 1))
    assert run(core, 1) == [{0: 1}]
    submit(core, (2, 1))
    assert run(core, 5) == [{0: 1}, {0: 1, 1: 3, 2: 3}, {0: 1}, {0: 1}, {0: 1, 3: 2}]


def test_prompts_of_ranks_wait_for_one_another() -> None:
    """Both ranks decode, and one has a prompt: it waits for two steps, or until the other has one, and one for more."""
    for other, steps in ((False, [0, 0, 7, 0]), (True, [0, 0, 0, 14])):
        group = LockstepGroup(lambda: core_of(attention_dp_timeout_iters=3, attention_dp_batching_wait_iters=2), 2)
        for number in range(2):
            group.submit(Request(number, 0.0, 2, 90), 0)
        prompts = []
        for step in range(6):
            if step == 2:
                group.submit(Request(2, 0.0, 7, 90), 0)
            if step == 3 and other:
                group.submit(Request(3, 0.0, 7, 90), 0)
            batch = group.begin_step(step)
            prompts.append(batch.prefill_tokens)
            group.end_step(batch, (), step)
        assert prompts == [4, 0, *steps], other


def test_an_idle_rank_whose_batch_was_full_takes_requests_again() -> None:
    """The blocks of a prompt that is sent away keep the next one waiting, while the other rank decodes."""
    settings = {"scheduler": "sglang", "capacity_scheduler_policy": "new_token_ratio", "enable_mixed_chunk": False}
    group = LockstepGroup(lambda: core_of(num_gpu_blocks=40, max_num_batched_tokens=30, **settings), 2)
    sent = group.submit(Request(0, 0.0, 30, 1), 0, SubmitOptions(max_tokens=1, hold_blocks=True))
    group.submit(Request(1, 0.0, 2, 30), 0)
    prompts = []
    for step in range(6):
        if step == 1:
            group.submit(Request(2, 0.0, 30, 1), step)
        if step == 4:
            group.release(sent)
        batch = group.begin_step(step)
        prompts.append(batch.prefill_tokens)
        group.end_step(batch, (), step)
    assert prompts == [32, 0, 0, 0, 30, 0]


def test_a_scheduler_brings_settings_that_a_scenario_may_replace() -> None:
    spec = EngineSpec(num_gpu_blocks=100, scheduler="sglang")
    assert (spec.block_size, spec.enable_mixed_chunk, spec.capacity_scheduler_policy) == (1, False, "new_token_ratio")
    assert spec.async_scheduling
    spec = EngineSpec(num_gpu_blocks=100, scheduler="sglang", block_size=64, enable_mixed_chunk=True)
    assert (spec.chunk_unit_size, spec.enable_mixed_chunk, spec.max_num_batched_tokens) == (64, True, 8192)
    spec = EngineSpec(num_gpu_blocks=100, scheduler="tensorrt-llm")
    assert (spec.block_size, spec.capacity_scheduler_policy) == (32, "guaranteed_no_evict")
    assert EngineSpec(num_gpu_blocks=100).block_size == 16


def test_a_prompt_that_no_step_holds_whole_beside_others_waits_without_chunks() -> None:
    core = core_of(max_num_batched_tokens=16, enable_chunked_prefill=False)
    submit(core, (10, 1), (10, 1))
    assert run(core, 2) == [{0: 10}, {1: 10}]


def test_one_token_of_a_prompt_is_neither_held_nor_does_it_hold_others() -> None:
    core = core_of(max_num_batched_tokens=10, prefill_schedule_interval=3)
    submit(core, (9, 2), (11, 1))
    assert run(core, 1) == [{0: 9, 1: 1}]
    submit(core, (1, 3))
    assert run(core, 4) == [{0: 1, 2: 1}, {2: 1}, {1: 10}, {2: 1}]  # the prompt comes first for the step's tokens


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises((ValueError, BadInput), match="enable_mixed_chunk true"):
        EngineSpec(num_gpu_blocks=100, enable_mixed_chunk=False, pipeline_parallel_size=2)
    with pytest.raises((ValueError, BadInput), match="batch_wait_timeout_iters 0 with data_parallel_size"):
        EngineSpec(num_gpu_blocks=100, batch_wait_timeout_iters=9, data_parallel_size=2)
    with pytest.raises(ValueError, match="batch_wait_timeout_iters: expected 0 with enable_mixed_chunk false"):
        core_of(batch_wait_timeout_iters=9, enable_mixed_chunk=False)
    with pytest.raises(ValueError, match="prefill_schedule_interval: expected 1 with enable_mixed_chunk false"):
        core_of(prefill_schedule_interval=2, enable_mixed_chunk=False)
    with pytest.raises(ValueError, match="chunk_unit_size: expected at most"):
        core_of(chunk_unit_size=16)
    core = core_of(enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="expected at most 8 prompt tokens"):
        submit(core, (9, 1))
