"""Steps of a topology's engines and the work between them: turns and messages by hand, and a real profile."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from latency_models.io.config_io import read_yaml
from live.topologies.direct_time import Post, RecordedTime, Turn
from live.validation.pools import PoolsBackend, frontend_times, role_steps, route_seconds
from scenarios.engine import SchedulerPlan
from scenarios.validation import check_validation
from schedulers.batches import DecodeBatch, MixedBatch
from schedulers.engine_config import EngineConfig
from tests.live.test_pools_validation import SCENARIO
from tests.live.tiny_validation import write_validation

PREFILL, DECODE, FRONT = 1, 2, 0


def test_a_prefill_engine_by_hand() -> None:
    """It takes a request at 1, reports its step at 5, is told at 7 where the prompt goes, and has sent it at 8.8."""
    time = RecordedTime()
    time.turns[PREFILL] = [
        Turn(1.0, 1.5, True), Turn(1.5, 5.0, False), Turn(7.0, 9.0, True), Turn(9.0, 9.1, False),
        Turn(9.1, 13.0, False),
    ]  # fmt: skip
    time.posts[PREFILL] = [
        Post(PREFILL, FRONT, 4.9, 5.1, 8), Post(PREFILL, DECODE, 8.0, 8.5, 8), Post(PREFILL, FRONT, 8.8, 8.9, 8),
        Post(PREFILL, FRONT, 12.8, 12.9, 8),
    ]  # fmt: skip
    batches = [MixedBatch([]), MixedBatch([])]
    result = role_steps(time, PREFILL, [(batches[0], 1.6, 4.5), (batches[1], 9.2, 12.0)])
    assert result.spans == [(batches[0], 1.0, 5.0), (batches[1], 8.8, 13.0)]
    assert result.hand_overs == [(1, pytest.approx(3.8))]


def test_a_decode_engine_by_hand() -> None:
    """Two steps follow each other; the third waits until 9 for a request."""
    time = RecordedTime()
    time.turns[DECODE] = [Turn(0.0, 3.0, True), Turn(3.0, 3.2, False), Turn(3.2, 6.0, False), Turn(9.0, 12.0, True)]
    time.posts[DECODE] = [Post(DECODE, FRONT, now, now, 8) for now in (2.9, 5.9, 11.9)]
    batches = [DecodeBatch([]) for _ in range(3)]
    steps = [(batches[0], 0.5, 2.8), (batches[1], 3.3, 5.8), (batches[2], 9.5, 11.8)]
    result = role_steps(time, DECODE, steps)
    assert [(begin, end) for _, begin, end in result.spans] == [(0.0, 3.0), (3.0, 6.0), (9.0, 12.0)]
    assert result.hand_overs == []


def test_frontend_times_are_medians() -> None:
    time = RecordedTime()
    time.posts[FRONT] = [
        Post(FRONT, PREFILL, 1.1, 1.2, 0),
        Post(FRONT, PREFILL, 1.2, 1.5, 8),
        Post(FRONT, DECODE, 3.0, 3.4, 8),
    ]
    assert route_seconds(time, [1.0, 2.0, 5.0]) == pytest.approx([0.5, 1.4])
    times = frontend_times([0.5, 1.4, 0.6], [], [(2, 0.8), (1, 0.3), (1, 0.5)])
    assert times == {"route": 0.6, "deliver": 0.0, "hand_over": pytest.approx(0.4)}


@pytest.mark.slow
def test_a_profile_of_a_topology(tmp_path: Path) -> None:
    """Rounds have steps of both pools, of sequences that came with a cache too, and times for what is between."""
    path = write_validation(tmp_path, SCENARIO)
    scenario = check_validation(read_yaml(path), {}, path).on_device("cpu")
    config = EngineConfig(num_gpu_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    result = PoolsBackend(scenario, tmp_path).profile(SchedulerPlan(config), scenario.profiling, 1)
    assert len(result.rounds) == 10
    steps = [step for timed in result.rounds for _, step in timed]
    assert all(step.seconds > 0 for step in steps)
    assert {step.chunks > 0 for step in steps} == {True, False}
    assert not any(step.chunks and step.decodes for step in steps)
    assert sum(step.transfers for step in steps) > 0
    assert all((step.received > 0) is (step.transfers > 0) for step in steps)
    assert set(result.frontend) == {"route", "deliver", "hand_over"}
    assert min(result.frontend["route"], result.frontend["deliver"]) >= 1e-4  # the link's latency
    assert result.frontend["hand_over"] >= 2e-4  # a message to the front and one back
