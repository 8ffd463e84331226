"""A validation of a plant whose law is known and whose machine drifts: what error is left when the drift is read.

The plant is the twin's own engine with hidden step times and a hidden pace; `run_validation` sees only what it would
see of a live one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.engine_steps import BrokenLine, EngineSteps, Step, read_engine_steps_file
from latency_models.yardsticks import Reading
from reports.records.run_directory import RunDirectory, open_run
from schedulers.batches import Batch
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from twin.clock import Clock
from twin.scenarios.validation import ValidationScenario
from twin.serving.engine import Engine
from twin.serving.pace import Pace, PaceLine
from twin.serving.records import RequestRecord
from twin.validation.learning import learnt, shares
from twin.validation.run import run_validation
from twin.validation.takes import Probing
from workloads.errors import BadInput
from workloads.request import Request

YARDSTICKS = {1: 0.01, 16: 0.03}
READINGS = 0.1
"""Seconds from one to the next."""

SCENARIO: dict[str, Any] = {
    "schema": "twin.scenario/1",
    "kind": "validation",
    "name": "drifting",
    "model": {"path": "none"},
    "workload": {
        "requests": 100,
        "prefill": {"distribution": "uniform", "low": 8, "high": 100},
        "decode": {"distribution": "geometric", "mean": 20},
        "arrivals": {"process": "poisson"},
    },
    "engine": {"kv_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 128},
    "loads": [0.6],
    "repeats": 3,
    "probe": {"rounds": 40, "steps": 30, "prompt": 128, "answer": 60},
}


def law() -> EngineSteps:
    """What a step takes when the pace is 1."""
    made = EngineSteps(16)
    made.overhead_ = 0.008
    made.slopes_ = {"decodes": 1e-4, "chunks": 3e-4, "outputs": 1e-4}
    made.tails_ = [0.0, 0.0, 0.0, 0.0]
    made.lines_ = {
        "rows": BrokenLine(knots=[1, 8, 128], values=[0.001, 0.004, 0.04]),
        "decode_attention": BrokenLine(knots=[2000], values=[0.004]),
        "chunk_attention": BrokenLine(knots=[20000], values=[0.01]),
    }
    return made


def drift(usual: float) -> Pace:
    """Up and down by two fifths within seven seconds; small steps otherwise than large ones."""
    times = np.arange(0.0, 60.0, 0.05)
    waves = {1: 1 + 0.4 * np.sin(2 * math.pi * times / 7), 16: 1 + 0.4 * np.cos(2 * math.pi * times / 5)}
    return Pace({rows: PaceLine(times.tolist(), (usual * wave).tolist()) for rows, wave in waves.items()})


@dataclass
class Gave:
    """What a plant gave: both `ProbedRounds` and `PlayedRun`."""

    readings: list[Reading]
    rounds: list[list[tuple[float, Step]]]
    spans: list[tuple[Batch, float, float]]
    records: list[RequestRecord]
    token_times: list[list[float]]

    def columns(self) -> dict[str, Any]:
        answered = self.records
        return {
            "arrival": np.array([each.request.arrival for each in answered]),
            "noticed": np.array([each.queued for each in answered]),
            "first_token": np.array([each.first_token for each in answered]),
            "last_token": np.array([each.last_token for each in answered]),
            "output_tokens": np.array([float(each.output_tokens) for each in answered]),
        }


class DriftingPlant:
    """Every repeat finds the machine somewhat slower than the last one did.

    Args:
        breaks_at: the repeat with which it comes to nothing. yardsticks: by which it reads its pace.
    """

    def __init__(self, breaks_at: int | None = None, yardsticks: Sequence[int] = (*YARDSTICKS,)) -> None:
        self.played, self._breaks_at, self.yardsticks = 0, breaks_at, yardsticks
        self.warmed: list[Sequence[tuple[Request, int]]] = []
        self.order: list[str] = []
        self.probed = 0.0

    def probe(self, config: EngineConfig, *, rounds: int, steps: int, seed: int, **_: Any) -> Gave:
        self.order.append("probe")
        rng, model, pace = np.random.default_rng(seed), law(), drift(1.0)
        begin = now = self.probed  # a part goes on where the one before it ended
        found: list[list[tuple[float, Step]]] = []
        for _ in range(rounds):
            found.append([])
            for _ in range(steps):
                decodes, chunks = int(rng.integers(0, 9)), int(rng.integers(0, 3))
                prompt = int(rng.integers(1, 60)) * chunks
                decodes = max(decodes, int(not chunks))
                seen = prompt * int(rng.integers(1, 128))
                longest = 16 * int(rng.integers(1, 12))
                made = Step(prompt + decodes, decodes * longest, seen, decodes, chunks, decodes + chunks)
                seconds = float(model.predict([made])[0]) * pace.of_rows(made.rows).at(now)
                found[-1].append((now, Step(*(getattr(made, name) for name in made.__slots__[:-1]), seconds)))
                now += seconds
        self.probed = now
        return Gave(self._readings(pace, begin, now), found, [], [], [])

    def warm_up(self, config: EngineConfig, chunks: object, requests: Sequence[tuple[Request, int]]) -> bool:
        self.warmed.append(requests)
        return True

    def play(self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]) -> Gave:
        if self.played == self._breaks_at:
            raise KeyboardInterrupt
        assert requests not in self.warmed, "what warms up is nobody's repeat"
        self.played += 1
        self.order.append("play")
        clock, pace = Clock(), drift(1.0 + 0.15 * requests[0][0].prompt_tokens / 100)
        spans: list[tuple[Batch, float, float]] = []
        times: dict[int, list[float]] = defaultdict(list)

        def watch(engine: Engine, batch: Batch, begin: float, end: float) -> None:
            spans.append((batch, begin, end))
            completed = [chunk.sequence for chunk in batch.chunks if chunk.last]
            for sequence in (*batch.decodes, *completed):
                times[sequence.request.id].append(end)

        engine = Engine(
            clock, lambda: EngineCore(config, chunks), law(), name="plant", index=0, fast_forward=False, watch=watch,
            pace=pace,
        )  # fmt: skip
        records = [RequestRecord(*each) for each in requests]
        for each in records:
            clock.call(each.request.arrival, 0, lambda number, record=each: engine.submit(record))
        clock.run()
        readings = self._readings(pace, 0.0, clock.now)
        return Gave(readings, [], spans, records, [times[each.request.id] for each in records])

    def describe(self) -> dict[str, Any]:
        return {"device": "none", "dtype": "float32", "versions": {}}

    def _readings(self, pace: Pace, begin: float, end: float) -> list[Reading]:
        return [
            Reading(float(when), rows, YARDSTICKS[rows] * pace.of_rows(rows).at(float(when)))
            for when in np.arange(begin, end, READINGS)
            for rows in self.yardsticks
        ]


def validate(plant: DriftingPlant, run: RunDirectory) -> dict[str, Any]:
    return run_validation(plant, ValidationScenario.model_validate(SCENARIO), None, run, lambda text: None)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[], RunDirectory]:
    return lambda: open_run(tmp_path / "runs", "validate", "drifting", {}, resume=True)


def test_a_drift_that_is_read_is_no_error(folder: Callable[[], RunDirectory]) -> None:
    with folder() as run:
        document = validate(DriftingPlant(), run)
    load = document["loads"][0]
    assert document["calibration"]["yardsticks"] == pytest.approx(YARDSTICKS, rel=0.1)
    assert load["steps"]["all"]["median"] < 0.03
    for name in ("ttft.mean", "tpot.mean", "e2e.mean", "output_throughput"):
        entry = load["metrics"][name]
        assert abs(entry["error"]) < 0.02, name
        assert abs(entry["error_at_own_pace"]) < 0.02, name
    assert load["metrics"]["e2e.mean"]["error_beforehand"] < -0.08
    assert max(means[1] for means in load["pace"]) > 1.05


def test_a_drift_that_is_not_read_is_one(folder: Callable[[], RunDirectory]) -> None:
    with folder() as run:
        document = validate(DriftingPlant(yardsticks=()), run)
    load = document["loads"][0]
    assert document["calibration"]["yardsticks"] == {}
    assert load["pace"] == [{1: 1.0}] * 3
    assert load["steps"]["all"]["median"] > 0.1
    assert load["metrics"]["e2e.mean"]["error"] < -0.08
    assert load["metrics"]["e2e.mean"]["error_beforehand"] < -0.08


def test_what_was_probed_is_kept_and_teaches_the_same_again(folder: Callable[[], RunDirectory]) -> None:
    with folder() as run:
        document = validate(DriftingPlant(), run)
        parts = [Probing.read(run.path / "probe" / f"part-{i}") for i in (1, 2, 3)]
    assert [len(part.rounds) for part in parts] == shares(40, 3) == [14, 13, 13]
    again = learnt(parts, 16, {})
    assert {name: document["calibration"][name] for name in again if name != "provenance"} == {
        name: value for name, value in again.items() if name != "provenance"
    }


def test_probing_and_playing_take_turns(folder: Callable[[], RunDirectory]) -> None:
    """So that what the yardsticks do not tell is the same for both; and of what was said beforehand nothing changes."""
    plant = DriftingPlant()
    with folder() as run:
        validate(plant, run)
        assert plant.order == ["probe", "play"] * 3
        first = read_engine_steps_file(run.path / "engine-steps-beforehand.yaml")
        whole = read_engine_steps_file(run.path / "engine-steps.yaml")
    assert first.points < whole.points / 2
    assert [shares(*each) for each in ((10, 3), (10, 2), (23, 4), (90, 1))] == [[5, 5], [5, 5], [6, 6, 6, 5], [90]]


def test_what_was_played_before_a_kill_is_not_played_again(folder: Callable[[], RunDirectory], tmp_path: Path) -> None:
    broken, other = DriftingPlant(breaks_at=2), DriftingPlant()
    with pytest.raises(KeyboardInterrupt), folder() as run:
        validate(broken, run)
    assert broken.played == 2
    with folder() as run:
        document = validate(other, run)
    assert other.played == 1
    assert len(broken.warmed) == len(other.warmed) == 1
    with open_run(tmp_path / "runs", "validate", "whole", {}, resume=False) as run:
        whole = validate(DriftingPlant(), run)
    assert document["loads"] == whole["loads"]
    with open_run(tmp_path / "runs", "validate", "whole", {}, resume=True) as run:
        nothing = DriftingPlant()
        validate(nothing, run)
    assert not nothing.warmed


def test_a_calibration_by_other_yardsticks_is_refused_before_anything_is_played(
    folder: Callable[[], RunDirectory],
) -> None:
    other, scenario = DriftingPlant(), ValidationScenario.model_validate(SCENARIO)
    with folder() as run:
        validate(DriftingPlant(yardsticks=[1]), run)
        with pytest.raises(BadInput, match="yardsticks: expected the seconds of 1, 16 rows"):
            run_validation(other, scenario, run.path / "engine-steps.yaml", run, lambda text: None)
    assert other.played == 0


def test_a_kept_repeat_that_was_damaged_is_told_in_one_line(folder: Callable[[], RunDirectory]) -> None:
    with pytest.raises(KeyboardInterrupt), folder() as run:
        validate(DriftingPlant(breaks_at=1), run)
    damaged = run.path / "live" / "load-0.6-repeat-1" / "steps.parquet"
    damaged.write_bytes(b"")
    with pytest.raises(OSError, match=r"no Parquet file: .*steps\.parquet"), folder() as again:
        validate(DriftingPlant(), again)
