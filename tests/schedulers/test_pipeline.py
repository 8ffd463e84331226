"""Several batches in flight: any story, each sequence in one of them, and the same as the plain scheduler with one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.stages import StageLink, Stages, stage_layers
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import PipelinedEngineCore
from schedulers.step_policies import ChunkPolicy
from tests.schedulers.plant import Plant, Visit, check_ends
from tests.schedulers.test_engine_properties import configs, policies, stories
from workloads.request import Request


def allowed(config: EngineConfig) -> EngineConfig:
    """The configuration without what a pipeline is refused."""
    return replace(config, max_table_blocks=0, kv_offloading=None)


def pipelined(stages: int, config: EngineConfig, policy: ChunkPolicy | None) -> PipelinedEngineCore:
    return PipelinedEngineCore(config, stages, policy)


@given(configs(), policies, st.integers(1, 5), stories)
def test_any_story(config: EngineConfig, policy: ChunkPolicy | None, stages: int, story: list[Visit]) -> None:
    """`Plant` checks each step; `check_integrity`, that a sequence decodes in one batch in flight."""
    plant = Plant(allowed(config), policy, stages, make=partial(pipelined, stages)).run(story)
    check_ends(plant, story)


@given(configs(), policies, stories)
def test_a_single_stage_is_the_plain_scheduler(
    config: EngineConfig, policy: ChunkPolicy | None, story: list[Visit]
) -> None:
    plain, staged = (
        Plant(allowed(config), policy, 1, make=make).run(story) for make in (EngineCore, partial(pipelined, 1))
    )
    assert staged.steps == plain.steps
    assert staged.ends == plain.ends


def core_of(stages: int, **settings: int) -> PipelinedEngineCore:
    config = EngineConfig(**{"num_gpu_blocks": 40, "block_size": 4, "prefix_id_tokens": 4, **settings})
    return PipelinedEngineCore(config, stages)


def request(id: int, prompt: int, answer: int) -> Request:
    return Request(id, 0.0, prompt, answer)


def test_sequences_circulate_in_micro_batches_and_a_prompt_passes_in_chunks() -> None:
    """Two prompts of 4 and one of 10, 8 tokens a step, and three stages."""
    core = core_of(3, max_num_batched_tokens=8, max_num_seqs=8)
    a, b, c = (core.submit(request(i, prompt, 9), 0.0) for i, prompt in enumerate((4, 4, 10)))
    first, second, third = (core.begin_step(0.0) for _ in range(3))
    assert [chunk.sequence for chunk in first.chunks] == [a, b]
    # The second chunk begins while the first one is in flight: stages compute them in order.
    assert [(chunk.sequence, chunk.context, chunk.tokens) for chunk in second.chunks] == [(c, 0, 8)]
    assert [(chunk.sequence, chunk.context, chunk.tokens) for chunk in third.chunks] == [(c, 8, 2)]
    assert core.begin_step(0.0) is None, "three stages, three batches"
    core.end_step(first, (), 0.0)
    again = core.begin_step(0.0)
    assert again.decodes == (a, b), "those whose tokens came together"
    core.end_step(second, (), 0.0)
    assert core.begin_step(0.0) is None, "the second batch gave no token, and the third is in flight"
    core.end_step(third, (), 0.0)
    latest = core.begin_step(0.0)
    assert latest.decodes == (c,)
    core.check_integrity()


def test_a_sequence_that_is_preempted_in_flight_is_queued_when_its_batch_has_ended() -> None:
    """Five blocks of one token. The youngest sequence loses its blocks to the oldest while its own batch runs."""
    core = core_of(3, num_gpu_blocks=5, block_size=1, prefix_id_tokens=1, max_num_batched_tokens=2, max_num_seqs=2)
    a, b = (core.submit(request(i, 2, 3), 0.0) for i in range(2))
    first, second = core.begin_step(0.0), core.begin_step(0.0)
    assert first is not None
    assert second is not None
    core.end_step(first, (), 0.0)
    third = core.begin_step(0.0)  # the fifth block
    assert third is not None
    core.end_step(third, (), 0.0)
    fourth = core.begin_step(0.0)
    assert fourth is not None
    assert (b.preemptions, core.num_waiting) == (1, 1)
    assert core.begin_step(0.0) is None, "its token is in flight"
    assert core.awaits_token(b)
    core.check_integrity()
    core.end_step(second, (), 0.0)
    assert not core.awaits_token(b)
    assert core.end_step(fourth, (), 0.0) == [a]
    again = core.begin_step(0.0)
    assert [(chunk.sequence, chunk.tokens) for chunk in again.chunks] == [(b, 2)]  # of its three tokens now
    core.check_integrity()


@pytest.mark.parametrize("stages", [0, 1, 3])
def test_the_input_of_an_aborted_step_is_cached(stages: int) -> None:
    """0 stages: the plain scheduler. The third token was known when its step began."""
    config = EngineConfig(num_gpu_blocks=20, block_size=1, prefix_id_tokens=1)
    core = PipelinedEngineCore(config, stages) if stages else EngineCore(config)
    chat = Request(0, 0.0, 2, 9, prefix_blocks=(0, 1, 2, 3))
    core.submit(chat, 0.0)
    first = core.begin_step(0.0)
    assert first is not None
    core.end_step(first, (), 0.0)
    core.begin_step(0.0)
    core.abort(0, 0.0)
    assert core.cached_prefix_tokens(replace(chat, prompt_tokens=9)) == 3


@pytest.mark.parametrize(
    ("layers", "stages", "divided"),
    [
        (2, 2, [1, 1]),  # of tests/distributed/test_pipeline_partition.py in vLLM, up to (5, 3)
        (3, 2, [2, 1]),
        (3, 3, [1, 1, 1]),
        (4, 3, [1, 2, 1]),
        (5, 3, [2, 2, 1]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (80, 4, [20, 20, 20, 20]),
    ],
)
def test_layers_are_divided_as_vllm_divides_them(layers: int, stages: int, divided: list[int]) -> None:
    assert sum(stage_layers(layers, stages)) == layers
    assert stage_layers(layers, stages) == divided


def test_shares_and_messages() -> None:
    stages = Stages((3, 1), StageLink(latency=0.5, bandwidth=100.0, bytes_per_token=4.0))
    assert stages.shares == [0.75, 0.25]
    assert stages.link.seconds(25) == 1.5
    assert Stages((7,)).shares == [1.0]
