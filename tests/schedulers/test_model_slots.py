"""Slots for models: replacement against a brute force, vLLM's `max_loras`, turns of swapped weights, conservation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.engine_core import EngineCore
from schedulers.model_slots import SlotsConfig
from tests.schedulers.plant import Plant, Visit, check_ends
from workloads.request import Request


def core_of(slots: SlotsConfig, seats: int = 4, blocks: int = 400) -> EngineCore:
    return EngineCore(EngineConfig(blocks, max_num_seqs=seats, max_num_batched_tokens=64, model_slots=slots))


def submit(core: EngineCore, models: str, tokens: int = 3) -> None:
    """Submit a request of each model, all with this many output tokens."""
    for i, model in enumerate(models):
        core.submit(Request(len(core.sequences) + 100 * i, 0.0, 8, tokens, model), 0.0)


def models_of_step(core: EngineCore, now: float = 0.0) -> str:
    """Run a step; the models of its rows, in order, with those it loads behind a bar."""
    batch = core.begin_step(now)
    rows = [*batch.decodes, *(chunk.sequence for chunk in batch.chunks)]
    core.end_step(batch, (), now)
    core.check_integrity()
    return "".join(row.request.model for row in rows) + "|" + "".join(load.model for load in batch.loads)


def test_adapters_beyond_max_loras_wait_and_those_behind_them_do_not() -> None:
    core = core_of(SlotsConfig(2))
    submit(core, "abcab")
    assert [models_of_step(core) for _ in range(4)] == ["abab|ab", "abab|", "abab|", "c|c"]


def test_the_base_model_needs_no_slot() -> None:
    core = core_of(SlotsConfig(1, base="base"))
    submit(core, "ab")
    core.submit(Request(7, 0.0, 8, 3, "base"), 0.0)
    rows, _, loads = models_of_step(core).partition("|")
    assert (rows, loads) == ("abase", "a")


def test_weights_that_are_swapped_run_one_after_another() -> None:
    core = core_of(SlotsConfig(2, exclusive=True), seats=8)
    submit(core, "aba", tokens=2)
    steps = [models_of_step(core) for _ in range(6)]
    assert steps == ["a|a", "a|", "b|b", "b|", "a|", "a|"]  # first come, first served; the second a finds its weights


def test_a_turn_lets_the_loaded_model_overtake_for_so_many_seconds() -> None:
    core = core_of(SlotsConfig(1, exclusive=True, turn=1.5), seats=8)
    submit(core, "aba", tokens=2)
    assert models_of_step(core, 0.0) == "aa|a"
    core.submit(Request(50, 0.0, 8, 2, "a"), 1.0)
    assert models_of_step(core, 1.0) == "aaa|"
    core.submit(Request(51, 0.0, 8, 2, "a"), 2.0)
    assert models_of_step(core, 2.0) == "a|"  # its turn is over
    assert models_of_step(core, 3.0) == "b|b"


def test_models_idle_for_longer_than_keep_alive_leave() -> None:
    core = core_of(SlotsConfig(2, exclusive=True, keep_alive=5.0))
    for at, model, loaded in [(0.0, "a", "a"), (4.0, "a", ""), (10.0, "b", "b"), (11.0, "a", "a")]:
        core.submit(Request(int(at), at, 8, 1, model), at)
        assert models_of_step(core, at) == f"{model}|{loaded}"
        assert core.begin_step(at) is None  # notes when it fell idle


def test_models_that_host_memory_gave_up_come_from_disk() -> None:
    core = core_of(SlotsConfig(1, host=2, exclusive=True), seats=1)
    colds = []
    for i, model in enumerate("abacab"):
        core.submit(Request(i, 0.0, 8, 1, model), 0.0)
        batch = core.begin_step(0.0)
        colds += [load.cold for load in batch.loads]
        core.end_step(batch, (), 0.0)
    assert colds == [True, True, False, True, False, True]  # b was used least recently when c came


def naive_loads(models: list[str], slots: int) -> int:
    """Loads of least-recently-used replacement, from its definition: the slots hold the models used last."""
    loads = 0
    for i, model in enumerate(models):
        latest: list[str] = []
        for earlier in reversed(models[:i]):
            if earlier not in latest:
                latest.append(earlier)
        loads += model not in latest[:slots]
    return loads


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40), st.integers(1, 4), st.booleans())
def test_replacement_is_least_recently_used(models: list[str], slots: int, exclusive: bool) -> None:
    core = core_of(SlotsConfig(slots, exclusive=exclusive), seats=1)
    for i, model in enumerate(models):
        core.submit(Request(i, 0.0, 8, 1, model), 0.0)
    while core.sequences:
        models_of_step(core)
    assert core.model_loads == naive_loads(models, slots)


@given(
    story=st.lists(
        st.builds(
            Visit, at=st.integers(0, 12), model=st.sampled_from("abcdz"), prompt=st.integers(1, 30),
            limit=st.integers(1, 12), abort=st.sampled_from([None, 3]),
        ),
        min_size=1, max_size=25,
    ),
    slots=st.integers(1, 3), exclusive=st.booleans(), turn=st.sampled_from([0.0, 3.0]),
    keep_alive=st.sampled_from([None, 0.0, 4.0]), blocks=st.integers(6, 40),
    policy=st.sampled_from(["fcfs", "priority", "shortest_prompt"]),
)  # fmt: skip
def test_every_request_ends_and_no_step_has_more_models_than_slots(
    story: list[Visit], slots: int, exclusive: bool, turn: float, keep_alive: float | None, blocks: int, policy: str
) -> None:
    """`Plant` checks the models of each step and counts loads."""
    config = EngineConfig(
        blocks, block_size=8, max_num_seqs=6, max_num_batched_tokens=16, scheduling_policy=policy, prefix_id_tokens=8,
        model_slots=SlotsConfig(slots, None, "z" if not exclusive else "", exclusive, turn, keep_alive),
    )  # fmt: skip
    check_ends(Plant(config, None, 1).run(story), story)


@pytest.mark.parametrize(("slots", "host", "expected"), [(0, None, "at least 1 slot"), (3, 2, "as many as slots")])
def test_unusable_slots(slots: int, host: int | None, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        SlotsConfig(slots, host)


def test_one_shot_work_has_no_slots() -> None:
    with pytest.raises(ValueError, match="one_shot: expected none"):
        EngineConfig(10, one_shot=OneShotBudget(), model_slots=SlotsConfig(1))
