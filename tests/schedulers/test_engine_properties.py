"""Any story under any configuration: blocks are conserved, every request ends once, no step exceeds a budget, and quiet
steps are quiet."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig, KVOffloading, OneShotBudget, TierConfig
from schedulers.prefill_policies import CAPACITY_POLICIES
from schedulers.step_policies import ChunkPolicy, SloChunks, StaticChunks
from tests.schedulers.plant import NEVER, Plant, Visit, check_ends

chats = st.builds(
    Visit, at=st.integers(0, 30), prompt=st.integers(1, 24), limit=st.integers(2, 24),
    ids=st.lists(st.integers(0, 1), max_size=6).map(tuple), stop=st.one_of(st.just(NEVER), st.integers(1, 24)),
    abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)), in_flight=st.booleans(),
    way=st.sampled_from(["here", "here", "here", "sent", "received"]), kept=st.integers(0, 9),
    priority=st.integers(0, 2), model=st.sampled_from(["a", "a", "b"]),
)  # fmt: skip
judges = st.builds(
    Visit, at=st.integers(0, 30), prompt=st.integers(1, 24), limit=st.integers(0, 1),
    ids=st.lists(st.integers(0, 1), max_size=6).map(tuple),
    abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20)), in_flight=st.booleans(),
    task=st.sampled_from(["generate", "classify", "embed"]), model=st.sampled_from(["a", "a", "b"]),
    priority=st.integers(0, 2),
)  # fmt: skip
stories = st.lists(st.one_of(chats, chats, judges), min_size=1, max_size=20)

budgets = st.builds(
    OneShotBudget, tokens=st.integers(1, 30), sequences=st.integers(1, 4),
    activation_bytes=st.sampled_from([float("inf"), 24.0]), bytes_per_token=st.sampled_from([0.0, 2.0]),
)  # fmt: skip
policies = st.one_of(
    st.none(),
    st.builds(StaticChunks, st.integers(1, 20), st.booleans()),
    st.builds(
        SloChunks, st.just([1, 8, 40]), st.just([1.0, 2.0, 9.0]), st.floats(1, 8), st.integers(1, 4), st.integers(4, 30)
    ),
)


tiers = st.builds(TierConfig, st.just("host"), st.integers(1, 8), st.sampled_from(["lru", "cost_aware"]))
offloading = st.builds(
    KVOffloading,
    st.lists(tiers, min_size=1, max_size=2).map(tuple),
    st.sampled_from(["write_through", "write_back"]),
    st.sampled_from([4.0, 1000.0]),
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    """Every setting; pools so small that blocks run out, sometimes too small for the longest requests."""
    block = draw(st.sampled_from([1, 2, 4]))
    seats = draw(st.integers(1, 8))
    share = draw(st.sampled_from(["scheduled", "computed"]))
    caching = draw(st.sampled_from([True, True, True, False]))
    one_shot = draw(st.one_of(st.none(), budgets))
    sharing = None if one_shot else draw(st.sampled_from([None, None, "first_come_first_served", "equal_progress"]))
    return EngineConfig(
        num_gpu_blocks=draw(st.integers(12, 48)) // block + 3, block_size=block,
        max_num_batched_tokens=max(draw(st.integers(1, 40)), seats), max_num_seqs=seats,
        max_table_blocks=draw(st.sampled_from([0, 0, 8])), enable_prefix_caching=caching,
        prefix_id_tokens=block * draw(st.sampled_from([1, 1, 2])), cache_blocks_on=share,
        in_batch_prefix_caching=share == "computed" and draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority", "shortest_prompt", "deadline", "fair", "lpm"])),
        preemption_policy=draw(st.sampled_from([None, None, "fewest_outputs"])),
        enable_mixed_chunk=draw(st.sampled_from([True, True, False])), context_chunking_policy=sharing,
        capacity_scheduler_policy=draw(st.sampled_from([*CAPACITY_POLICIES, "max_utilization"])),
        scheduler=draw(st.sampled_from(["vllm-0.33", "vllm-0.33", "sglang"])),
        kv_reservation=draw(st.sampled_from(["chunk", "prompt", "max_tokens"])), one_shot=one_shot,
        kv_offloading=draw(st.one_of(st.none(), offloading)) if caching else None,
    )  # fmt: skip


@given(configs(), policies, st.sampled_from([1, 2]), stories)
def test_any_story(config: EngineConfig, policy: ChunkPolicy | None, depth: int, story: list[Visit]) -> None:
    """`Plant` checks each step; at the end every request has ended once, and every block is free."""
    plant = Plant(config, policy, depth).run(story)
    check_ends(plant, story)


@given(configs(), policies, stories)
def test_steady_decode_steps_taken_at_once_are_the_steps_themselves(
    config: EngineConfig, policy: ChunkPolicy | None, story: list[Visit]
) -> None:
    walked, leapt = Plant(config, policy, 1).run(story), Plant(config, policy, 1, leaps=True).run(story)
    assert leapt.steps == walked.steps
    assert leapt.ends == walked.ends


@given(configs(), policies, st.sampled_from([1, 2]), stories)
def test_whoever_is_passed_over_as_lacking_blocks_would_not_have_got_them(
    config: EngineConfig, policy: ChunkPolicy | None, depth: int, story: list[Visit]
) -> None:
    # With leaders, asking again is another policy: a peer that now waits for its leader lets those behind it pass,
    # while one that is known to lack blocks does not.
    # So it is with tiers: whoever is looked at counts as using what tiers have of its prompt.
    config = replace(config, in_batch_prefix_caching=False, kv_offloading=None)
    remembering = Plant(config, policy, depth).run(story)
    asking = Plant(config, policy, depth, forgetful=True).run(story)
    assert remembering.steps == asking.steps


def test_a_policy_that_allows_less_makes_a_chunk_fit() -> None:
    """The second prompt wants all 10 blocks beside no decode, and one of the 9 that are left beside the first's."""
    config = EngineConfig(
        num_gpu_blocks=10, block_size=4, max_num_batched_tokens=64, max_num_seqs=4, prefix_id_tokens=4,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    policy = SloChunks([1, 64], [1.0, 2.0], slo_seconds=2.0, min_tokens=4, max_tokens=64)
    assert (policy.max_prefill_tokens(0), policy.max_prefill_tokens(1)) == (64, 4)
    plant = Plant(config, policy, 1).run([Visit(0, 2, 9), Visit(0, 40, 1)])
    assert plant.steps[:3] == ["0: mixed 0:0+2!", "1: mixed 1:0+4 | 0", "2: mixed 1:4+4 | 0"]


def test_a_decode_that_has_begun_its_last_step_makes_a_one_shot_prompt_fit() -> None:
    """A step ahead of the plant: beside the decode, 9 tokens would be cut and want 8 blocks of the 7 that are free."""
    budget = OneShotBudget(tokens=9)
    config = EngineConfig(
        num_gpu_blocks=15, block_size=1, prefix_id_tokens=1, max_num_batched_tokens=9, max_num_seqs=1, one_shot=budget
    )
    plant = Plant(config, None, 2).run([Visit(0, 7, 2), Visit(0, 9, 0)])
    assert plant.steps[:3] == ["0: mixed 0:0+7!", "1: decode | 0", "2: one-shot 1:0+9!"]


def test_blocks_that_only_others_would_profit_from_keep_nobody_out() -> None:
    """A prompt that was cut lost its 12 blocks, all still there; what is missing fits a step and wants no further ones.

    To keep its prompt for others takes none either: its own blocks serve.
    """
    config = EngineConfig(
        num_gpu_blocks=30, block_size=1, prefix_id_tokens=2, max_num_batched_tokens=19, max_num_seqs=2,
        cache_blocks_on="computed", one_shot=OneShotBudget(tokens=12),
    )  # fmt: skip
    plant = Plant(config, None, 2).run([Visit(0, 10, 12), Visit(5, 15, 0, (0, 0, 0, 0, 1, 0))])
    assert plant.steps[5:8] == ["5: mixed 1:0+12 | 0", "6: decode | 0", "7: mixed 1:12+3! | 0"]


@given(configs(), policies, st.sampled_from([1, 2]), st.lists(chats, min_size=1, max_size=20))
def test_first_come_first_served(
    config: EngineConfig, policy: ChunkPolicy | None, depth: int, story: list[Visit]
) -> None:
    """The sequence that came first begins first, and a burst of later requests cannot put it off.

    Without tiers: later requests overtake one that waits for its prefix.
    """
    config = replace(config, scheduling_policy="fcfs", in_batch_prefix_caching=False, kv_offloading=None)
    story = [replace(visit, way="here") for visit in sorted(story, key=lambda visit: visit.at)]
    plant = Plant(config, policy, depth).run(story)
    assert plant.first == sorted(plant.first)
    assert {id for id, (how, _) in plant.ends.items() if how == "finished"} <= set(plant.first)
