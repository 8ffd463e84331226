"""Running sequences are scheduled one by one where blocks or tokens are short."""

from __future__ import annotations

from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from workloads.request import Request


def core_of(**settings: object) -> EngineCore:
    limits = {"block_size": 4, "prefix_id_tokens": 4, "max_num_seqs": 4, **settings}
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


def test_a_prompt_under_way_preempts_what_has_a_lower_priority() -> None:
    core = core_of(
        num_gpu_blocks=6, max_num_batched_tokens=8, scheduling_policy="priority", scheduler_reserve_full_isl=False
    )
    core.submit(Request(0, 0.0, 4, 8, priority=1), 0)
    assert run(core, 1) == [{0: 4}]
    core.submit(Request(1, 1.0, 24, 1, priority=0), 1)
    assert run(core, 4) == [{0: 1, 1: 7}, {0: 1, 1: 7}, {1: 7}, {1: 3}]


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    for reserve, steps in ((True, [{0: 1}]), (False, [{0: 1, 1: 7}])):
        core = core_of(num_gpu_blocks=6, max_num_batched_tokens=8, scheduler_reserve_full_isl=reserve)
        core.submit(Request(0, 0.0, 4, 8), 0)
        run(core, 1)
        core.submit(Request(1, 1.0, 24, 1), 1)
        assert run(core, 1) == steps


def test_a_long_prompt_leaves_tokens_for_another() -> None:
    core = core_of(num_gpu_blocks=20, max_num_batched_tokens=16, long_prefill_token_threshold=10)
    core.submit(Request(0, 0.0, 30, 1), 0)
    core.submit(Request(1, 0.0, 4, 3), 0)
    assert run(core, 3) == [{0: 10, 1: 4}, {0: 10, 1: 1}, {0: 10, 1: 1}]
    core.submit(Request(2, 0.0, 30, 1), 3)
    assert run(core, 2) == [{2: 16}, {2: 14}]  # alone


def test_a_prompt_that_no_step_holds_whole_beside_others_waits_without_chunks() -> None:
    core = core_of(num_gpu_blocks=20, max_num_batched_tokens=16, enable_chunked_prefill=False)
    core.submit(Request(0, 0.0, 10, 1), 0)
    core.submit(Request(1, 0.0, 10, 1), 0)
    assert run(core, 2) == [{0: 10}, {1: 10}]


def test_some_blocks_stay_free_and_fewer_sequences_are_admitted() -> None:
    core = core_of(num_gpu_blocks=9, max_num_batched_tokens=64, watermark=0.3)
    for number in range(4):
        core.submit(Request(number, 0.0, 12, 2), 0)
    assert run(core, 1) == [{0: 12, 1: 12}]  # a third would leave none of 3
    core = core_of(num_gpu_blocks=9, max_num_batched_tokens=64, max_num_active_seqs=1)
    for number in range(2):
        core.submit(Request(number, 0.0, 4, 1), 0)
    assert run(core, 2) == [{0: 4}, {1: 4}]


def test_prompts_wait_for_some_steps_beside_decodes() -> None:
    core = core_of(num_gpu_blocks=40, max_num_batched_tokens=64, prefill_schedule_interval=3)
    core.submit(Request(0, 0.0, 4, 9), 0)
    assert run(core, 1) == [{0: 4}]
    core.submit(Request(1, 0.0, 4, 1), 0)
    assert run(core, 3) == [{0: 1}, {0: 1}, {0: 1, 1: 4}]


def test_one_token_of_a_prompt_is_neither_held_nor_does_it_hold_others() -> None:
    core = core_of(num_gpu_blocks=20, max_num_batched_tokens=10, prefill_schedule_interval=3)
    core.submit(Request(0, 0.0, 9, 2), 0)
    core.submit(Request(1, 0.0, 11, 1), 0)
    assert run(core, 1) == [{0: 9, 1: 1}]
    core.submit(Request(2, 0.0, 1, 3), 0)
    assert run(core, 4) == [{0: 1, 2: 1}, {2: 1}, {1: 10}, {2: 1}]  # the prompt comes first for the step's tokens


def test_behind_one_that_preempted_itself_decodes_pause_before_0_33() -> None:
    for scheduler, behind in (("vllm-0.33", {1: 1}), ("vllm-0.32", {})):
        core = core_of(num_gpu_blocks=4, max_num_batched_tokens=32, scheduling_policy="priority", scheduler=scheduler)
        core.submit(Request(0, 0.0, 8, 9, priority=1), 0)
        assert run(core, 2) == [{0: 8}, {0: 1}]
        core.submit(Request(1, 1.0, 1, 4, priority=0), 2)
        assert run(core, 4) == [{0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, behind]  # the fifth block is not there
        core.check_integrity()
