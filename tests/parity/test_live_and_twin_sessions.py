"""Sessions on a live engine and in the twin: where steps take as long in both, turns are sent at the same times, and
batches, cached blocks and metrics are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the live engine needs the extra [live]")

from latency_models.step_time import StepTime  # noqa: E402
from latency_models.timed_runs import ReplayedRun  # noqa: E402
from live.clock import Clock  # noqa: E402
from live.engine import Engine, InFlightStep  # noqa: E402
from live.generation import Generation  # noqa: E402
from live.models.decoder import Decoder  # noqa: E402
from live.models.weights import random_weights  # noqa: E402
from live.validation.backend import Sessions, replay  # noqa: E402
from schedulers.batches import Batch  # noqa: E402
from tests.parity.live_and_twin import BLOCK, CONFIG, noted, trace  # noqa: E402
from tests.twin.serving.scenarios import plan_for  # noqa: E402
from twin.serving.plan.plan import ServingPlan  # noqa: E402
from twin.serving.results.summary import summarise  # noqa: E402
from twin.serving.run.simulation import Simulation, realised_sessions  # noqa: E402
from twin.validation.compare import summary  # noqa: E402

SCENARIO: dict[str, Any] = {
    "schema": "twin.scenario/1",
    "kind": "serving",
    "name": "sessions",
    "detail": True,
    "fast_forward": False,
    "workload": {
        "requests": 60,
        "prefill": {"distribution": "uniform", "low": 3, "high": 30},
        "decode": {"distribution": "uniform", "low": 1, "high": 12},
        "sessions": {
            "source": "drawn",
            "turns": {"distribution": "uniform", "low": 1, "high": 6},
            "growth": {"distribution": "uniform", "low": 1, "high": 15},
            "think": {"mean": 0.05},
            "branches": {"share": 0.3, "count": 2},
            "block_tokens": BLOCK,
        },
        "prefixes": {"groups": 2, "tokens": 8, "block_tokens": BLOCK},
        "arrivals": {"process": "poisson", "rate": 6.0},
    },
    "step_time": {"source": "linear", "overhead": 0.01, "per_token": 0.001},
}
PLENTY = {"num_gpu_blocks": 400, "block_size": BLOCK, "max_num_seqs": 6, "max_num_batched_tokens": 24}
ENGINES = {
    "plenty": PLENTY,
    "little memory": PLENTY | {"num_gpu_blocks": 50},
    "no caching": PLENTY | {"enable_prefix_caching": False},
}


def seconds(batch: Batch) -> float:
    return (10 + batch.tokens) / 1024


class Fixed(StepTime):
    def seconds(self, batch: Batch) -> float:
        return seconds(batch)

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        raise AssertionError("simulated step by step")


class StepClock(Clock):
    """A clock that stands still but for steps and waits."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def __call__(self) -> float:
        return self.now

    def elapsed(self) -> float:
        return 0.0

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class SteppingEngine(Engine):
    """An engine whose steps last as long as `seconds` says."""

    def _launch(self) -> InFlightStep | None:
        launched = super()._launch()
        if launched is not None:
            assert isinstance(self.clock, StepClock)
            self.clock.now += seconds(launched.batch)
        return launched


def planned(engine: dict[str, Any]) -> ServingPlan:
    return plan_for(SCENARIO | {"engine": engine})


class NotedSessions(Sessions):
    """Sessions that note their requests."""

    def due(self, now: float) -> list[Generation]:
        self.generations = [*getattr(self, "generations", []), *(due := super().due(now))]
        return due


def lived(plan: ServingPlan) -> tuple[ReplayedRun, list[Generation], list[tuple[object, ...]], Engine]:
    decoder = Decoder(CONFIG, random_weights(CONFIG, torch.float64, "cpu"))
    engine = SteppingEngine(decoder, plan.scheduler.config)
    result = noted(engine)
    sessions = NotedSessions(
        realised_sessions(plan, 0), CONFIG.shape.vocabulary, plan.scheduler.config.prefix_id_tokens
    )
    return replay(engine, sessions, StepClock()), sessions.generations, result, engine


@pytest.mark.parametrize("name", ENGINES)
def test_the_twin_holds_the_conversations_that_the_live_engine_held(name: str) -> None:
    plan = planned(ENGINES[name])
    replayed, _, decided, engine = lived(plan)
    engine.core.check_integrity()
    simulated: list[tuple[object, ...]] = []
    run = Simulation(
        plan.with_step_time(Fixed()), watch=lambda engine, batch, start, end: simulated.append(trace(batch))
    ).run()  # fmt: skip
    assert simulated == decided
    columns = replayed.requests
    table = run.request_table()
    order = np.argsort(table["id"])
    for column in ("arrival", "first_token", "last_token"):
        assert columns[column].tolist() == table[column][order].tolist()
    assert columns["session"].tolist() == table["session"][order].tolist()
    assert columns["turn"].tolist() == table["turn"][order].tolist()
    live = summary({**columns, "gaps": np.ones(1)})["sessions"]
    twin = summarise(run, plan.scenario.measure)["sessions"]
    assert live["count"] == twin["count"]
    for part in ("time", "waited"):
        assert live[part] == pytest.approx(twin[part])
    if name != "little memory":  # there, a request may be preempted and find other blocks when it comes back
        assert columns["cached_tokens"].tolist() == table["cached_tokens"][order].tolist()
        assert live["resent_cached"] == pytest.approx(twin["resent_cached"])
        assert (live["resent_cached"] > 0.5) is (name == "plenty")


def test_answers_from_cached_conversations_are_those_that_are_computed_anew() -> None:
    """Prompts repeat real answers, whose blocks were written by decodes."""
    _, cached, _, _ = lived(planned(PLENTY))
    _, anew, _, _ = lived(planned(ENGINES["no caching"]))
    of_cached = {generation.prompt.tobytes(): generation.output for generation in cached}
    of_anew = {generation.prompt.tobytes(): generation.output for generation in anew}
    assert len(of_cached) == 60
    assert of_cached == of_anew
