"""A validation of a backend with known step times, on a machine that is slower during replays than while profiled.

The backend is the simulated engine with hidden step times; `EngineValidation` sees of it what it sees of a live one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simpy.events import Event

from latency_models.fitting.linear import BrokenLine
from latency_models.sources.engine_regression import EngineRegression, Step
from latency_models.timed_runs import ProfiledRounds, ReplayedRun
from reports.run_directory import RunDirectory, open_run
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec, ValidationScenario
from schedulers.batches import Batch
from twin.afd.role_times import TimedStretch
from twin.environment import Environment, Priority
from twin.serving.engine.engine import Engine
from twin.serving.engine.engine_state import EngineOptions
from twin.serving.records.requests import RequestRecord
from twin.validation.backend import read_rounds, read_stretches, write_stretches
from twin.validation.compare import missed
from twin.validation.profiling import fitted_document
from twin.validation.run import EngineValidation
from workloads.errors import BadInput
from workloads.request import Request

SLOWDOWN = 1.15
"""Of replays, relative to profiling."""

SCENARIO: dict[str, Any] = {
    "schema": "twin.scenario/1", "kind": "validation", "name": "drifting", "model": {"path": "none"},
    "workload": {
        "requests": 100, "arrivals": {"process": "poisson"},
        "prefill": {"distribution": "uniform", "low": 8, "high": 100},
        "decode": {"distribution": "geometric", "mean": 20},
    },
    "engine": {"num_gpu_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 128},
    "loads": [0.6], "repeats": 3,
    "profiling": {"rounds": 40, "max_steps": 30, "max_prompt_tokens": 128, "max_output_tokens": 60},
}  # fmt: skip
SLOPES = {"decodes": 1e-4, "chunks": 3e-4, "outputs": 1e-4}
LINES = {
    "rows": ([1, 8, 128], [0.001, 0.004, 0.04]),
    "decode_attention": ([2000], [0.004]),
    "chunk_attention": ([20000], [0.01]),
}


def law(slowdown: float = 1.0) -> EngineRegression:
    """Step times of a machine that takes `slowdown` times as long."""
    model = EngineRegression(16)
    model.overhead_ = 0.008 * slowdown
    model.slopes_ = {name: slope * slowdown for name, slope in SLOPES.items()}
    model.lines_ = {
        name: BrokenLine(knots=knots, values=[value * slowdown for value in values])
        for name, (knots, values) in LINES.items()
    }
    return model


class DriftingBackend:
    """A backend that is slower during replays than during profiling.

    Args:
        breaks_at: the repeat that is interrupted.
    """

    def __init__(self, breaks_at: int | None = None) -> None:
        self.replayed = 0
        self._breaks_at = breaks_at
        self.warmed: list[Sequence[tuple[Request, int]]] = []
        self.order: list[str] = []

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        self.order.append("profile")
        rng, model, now = np.random.default_rng(seed), law(), 0.0
        timed: list[list[tuple[float, Step]]] = []
        for _ in range(spec.rounds):
            timed.append([])
            for _ in range(spec.max_steps):
                decodes, chunks = int(rng.integers(0, 9)), int(rng.integers(0, 3))
                prompt = int(rng.integers(1, 60)) * chunks
                decodes = max(decodes, int(not chunks))
                attention = prompt * int(rng.integers(1, 128))
                longest = 16 * int(rng.integers(1, 12))
                step = Step(prompt + decodes, decodes * longest, attention, decodes, chunks, decodes + chunks)
                seconds = float(model.predict([step])[0] * rng.lognormal(0.0, 0.02))
                timed[-1].append((now, replace(step, seconds=seconds)))
                now += seconds
        return ProfiledRounds(timed)

    def measure_drafts(self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]) -> list[Any]:
        raise AssertionError("it does not speculate")

    def warm_up(self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]) -> bool:
        self.warmed.append(requests)
        return True

    def replay(self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]) -> ReplayedRun:
        if self.replayed == self._breaks_at:
            raise KeyboardInterrupt
        assert requests not in self.warmed, "a warm-up has requests of its own"
        self.replayed += 1
        self.order.append("replay")
        env = Environment()
        spans: list[tuple[Batch, float, float]] = []
        times: dict[int, list[float]] = defaultdict(list)

        def watch(engine: Engine, batch: Batch, begin: float, end: float) -> None:
            spans.append((batch, begin, end))
            completed = [chunk.sequence for chunk in batch.chunks if chunk.last]
            for sequence in (*batch.decodes, *completed):
                times[sequence.request.id].append(end)

        options = EngineOptions("backend", 0, fast_forward=False, watch=watch)
        engine = Engine(env, scheduler.make_core, law(SLOWDOWN), options)
        records = [RequestRecord(*request) for request in requests]

        def client() -> Generator[Event, object, None]:
            for record in records:
                yield env.at(record.request.arrival, Priority.ARRIVAL)
                engine.submit(record)

        env.process(client())
        env.run()
        columns = {
            "arrival": [record.request.arrival for record in records],
            "noticed": [record.queued for record in records],
            "first_token": [record.first_token for record in records],
            "last_token": [record.last_token for record in records],
            "output_tokens": [float(record.output_tokens) for record in records],
        }
        arrays = {name: np.array(column) for name, column in columns.items()}
        return ReplayedRun(arrays, [times[record.request.id] for record in records], spans)

    def describe(self) -> dict[str, Any]:
        return {"device": "none", "dtype": "float32", "versions": {}}


def validate(backend: DriftingBackend, run: RunDirectory) -> dict[str, Any]:
    scenario = ValidationScenario.model_validate(SCENARIO)
    return EngineValidation(backend, scenario, run.path, None, run, lambda text: None).document()


Folder = Callable[[], RunDirectory]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return lambda: open_run(tmp_path / "runs", "validate", "drifting", {}, resume=True)


def test_the_headline_is_the_forecast_and_goals_judge_it(folder: Folder) -> None:
    backend = DriftingBackend()
    with folder() as run:
        document = validate(backend, run)
        assert sorted(file.name for file in run.path.glob("engine-steps*")) == ["engine-steps.yaml"]
    (load,) = document["loads"]
    assert backend.order == ["profile"] + ["replay"] * 3
    assert not [key for entry in load["metrics"].values() for key in entry if key.startswith("error_")]
    assert load["steps"]["all"]["median"] > 0.1
    e2e = load["metrics"]["e2e.mean"]
    forecast = [summary["e2e"]["mean"] for summary in load["predicted"]]
    measured = [summary["e2e"]["mean"] for summary in load["measured"]]
    assert e2e["error"] < -0.08
    assert e2e["error"] == pytest.approx(np.mean(np.array(forecast) / np.array(measured) - 1))
    assert f"load 0.6: the forecast of e2e.mean is off by {100 * e2e['error']:+.1f} %, goal 3 %" in missed([load], 1.0)


def test_kept_profiling_gives_the_same_model_again(folder: Folder) -> None:
    with folder() as run:
        document = validate(DriftingBackend(), run)
        part = read_rounds(run.path / "profiling" / "part-1")
    assert len(part.rounds) == 40
    again = fitted_document([part], 16, "wall", {})
    del again["provenance"]
    assert {name: document["calibration"][name] for name in again} == again


def test_a_killed_validation_repeats_nothing(folder: Folder, tmp_path: Path) -> None:
    broken, resumed = DriftingBackend(breaks_at=2), DriftingBackend()
    with pytest.raises(KeyboardInterrupt), folder() as run:
        validate(broken, run)
    assert broken.replayed == 2
    with folder() as run:
        document = validate(resumed, run)
    assert resumed.replayed == 1
    assert len(broken.warmed) == len(resumed.warmed) == 1
    with open_run(tmp_path / "runs", "validate", "whole", {}, resume=False) as run:
        uninterrupted = validate(DriftingBackend(), run)
    assert document["loads"] == uninterrupted["loads"]
    with open_run(tmp_path / "runs", "validate", "whole", {}, resume=True) as run:
        idle = DriftingBackend()
        validate(idle, run)
    assert not idle.warmed
    assert not idle.order


def test_a_damaged_repeat_is_reported_in_one_line(folder: Folder) -> None:
    with pytest.raises(KeyboardInterrupt), folder() as run:
        validate(DriftingBackend(breaks_at=1), run)
    damaged = run.path / "live" / "load-0.6-repeat-1" / "steps.parquet"
    damaged.write_bytes(b"")
    with pytest.raises(OSError, match=r"no Parquet file: .*steps\.parquet"), folder() as again:
        validate(DriftingBackend(), again)


def test_stretches_come_back_as_they_were(tmp_path: Path) -> None:
    stretches = [TimedStretch(1, "attention.stage", (8.0, 640.0), 1e-3), TimedStretch(2, "ffn.wait", (), 2e-6)]
    write_stretches(tmp_path, stretches)
    assert read_stretches(tmp_path) == stretches


def test_stretches_of_another_version_are_refused(tmp_path: Path) -> None:
    write_stretches(tmp_path, [TimedStretch(1, "attention.stage", (8.0, 500.0, 640.0), 1e-3)])
    message = r"attention\.stage: got \[8\.0, 500\.0, 640\.0\], expected the features of this"
    with pytest.raises(BadInput, match=message):
        read_stretches(tmp_path)
