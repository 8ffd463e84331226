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

from latency_models.engine_steps import BrokenLine, EngineSteps, Step
from latency_models.strict import write_yaml
from latency_models.yardsticks import Reading
from reports.records.columns import read_columns
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
from twin.validation.learning import HELD_OUT, at_pace, learn, usual
from twin.validation.run import run_validation
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

    def probe(self, config: EngineConfig, *, rounds: int, steps: int, seed: int, **_: Any) -> Gave:
        rng, model, pace, now = np.random.default_rng(seed), law(), drift(1.0), 0.0
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
        return Gave(self._readings(pace, now), found, [], [], [])

    def warm_up(self, config: EngineConfig, chunks: object, requests: Sequence[tuple[Request, int]]) -> bool:
        self.warmed.append(requests)
        return True

    def play(self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]) -> Gave:
        if self.played == self._breaks_at:
            raise KeyboardInterrupt
        assert requests not in self.warmed, "what warms up is nobody's repeat"
        self.played += 1
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
        readings = self._readings(pace, clock.now)
        return Gave(readings, [], spans, records, [times[each.request.id] for each in records])

    def describe(self) -> dict[str, Any]:
        return {"device": "none", "dtype": "float32", "versions": {}}

    def _readings(self, pace: Pace, end: float) -> list[Reading]:
        return [
            Reading(float(when), rows, YARDSTICKS[rows] * pace.of_rows(rows).at(float(when)))
            for when in np.arange(0.0, end, READINGS)
            for rows in self.yardsticks
        ]


def validate(plant: DriftingPlant, run: RunDirectory) -> dict[str, Any]:
    scenario = ValidationScenario.model_validate(SCENARIO)
    told: Callable[[str], None] = lambda text: None  # noqa: E731
    config = EngineConfig(kv_blocks=400, max_num_seqs=8, max_num_batched_tokens=128)
    steps = run.path / "engine-steps.yaml"
    steps.write_text(write_yaml(learn(plant, scenario, config, None, run.path / "probe", told)))
    return run_validation(plant, scenario, steps, run, told)


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
    assert load["metrics"]["e2e.mean"]["error_at_usual_pace"] < -0.08
    assert max(means[1] for means in load["pace"]) > 1.05


def test_a_drift_that_is_not_read_is_one(folder: Callable[[], RunDirectory]) -> None:
    with folder() as run:
        document = validate(DriftingPlant(yardsticks=()), run)
    load = document["loads"][0]
    assert document["calibration"]["yardsticks"] == {}
    assert load["pace"] == [{1: 1.0}] * 3
    assert load["steps"]["all"]["median"] > 0.1
    assert load["metrics"]["e2e.mean"]["error"] == load["metrics"]["e2e.mean"]["error_at_usual_pace"] < -0.08


def test_what_was_probed_is_kept_and_teaches_the_same_again(folder: Callable[[], RunDirectory]) -> None:
    with folder() as run:
        document = validate(DriftingPlant(), run)
        told = read_columns(run.path / "probe" / "steps.parquet")
        pace = read_columns(run.path / "probe" / "pace.parquet")
    readings = [Reading(*row) for row in zip(*pace.values(), strict=True)]
    numbers, begins = told.pop("round"), told.pop("begin")
    rounds: list[list[tuple[float, Step]]] = [[] for _ in range(max(numbers) + 1)]
    for number, begin, *fields in zip(numbers, begins, *told.values(), strict=True):
        rounds[number].append((begin, Step(**dict(zip(told, fields, strict=True)))))
    steps = at_pace(rounds, Pace.of(readings, usual(readings)))
    model = EngineSteps(16).fit([step for i, each in enumerate(steps) if i % HELD_OUT for step in each])
    assert model.overhead_ == document["calibration"]["overhead"]
    assert {name: line.values for name, line in model.lines_.items()} == {
        name: line["values"] for name, line in document["calibration"]["lines"].items()
    }


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
