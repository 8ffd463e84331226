"""A live fleet and the twin's, with the same step times: which engine gets a request, and how many there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the live engine needs the extra [live]")

from live.clock import Clock
from live.engine import Engine
from live.executor import AsyncModelRunnerOutput
from live.generation import Generation
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.validation.backend import materialise
from live.validation.fleet import Fleet, FleetEngine
from scenarios.engine import make_router
from schedulers.batches import Batch
from schedulers.routing import Router
from tests.parity.live_and_twin import CONFIG
from tests.twin.serving.scenarios import plan_for, scenario
from twin.serving.run.simulation import Simulation, realisation
from workloads.request import Request

torch = pytest.importorskip("torch")

START = 0.125
"""Seconds in which an engine loads its weights and warms up; its node takes as many."""

POLICIES: dict[str, dict[str, Any]] = {
    "target_utilization": {"metric": "load", "target": 0.4},
    "busy": {"policy": "target_utilization", "metric": "busy", "target": 0.6},
    "queue_length": {"count": "unfinished", "target": 5},
}


class StatedClock(Clock):
    """A clock that counts the seconds that it is told."""

    seconds = 0.0

    def elapsed(self) -> float:
        return self.seconds


class NotedRouter:
    """A router that notes its choices by request."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.choices: dict[int, str] = {}

    def choose(self, request: Request, engines: Any) -> Any:
        engine = self._router.choose(request, engines)
        self.choices[request.id] = engine.name
        return engine


@pytest.mark.parametrize(
    ("policy", "routing"),
    [("target_utilization", "prefix_aware"), ("busy", "least_loaded"), ("queue_length", "prefix_aware")],
)
def test_decisions_are_those_of_the_twin(policy: str, routing: str) -> None:
    section = {
        "policy": policy, "max_replicas": 4, "sync_period": 0.2, "scale_down": {"stabilization_window": 0.5},
        "start_up": {"node": START, "warm_up": START}, **POLICIES[policy],
    }  # fmt: skip
    document = scenario(
        workload={
            "requests": 150,
            "arrivals": {"process": "poisson", "rate": 100, "profile": {"swing": 0.9, "period": 1.5, "peak_at": 0.75}},
            "prefixes": {"groups": 6, "tokens": 32},
        },
        engine={"num_gpu_blocks": 100, "max_num_seqs": 8},
        system={"replicas": 1, "routing": routing, "autoscaling": {"engine": section}},
    )
    plan = plan_for(document)
    decoder = Decoder(CONFIG, random_weights(CONFIG, torch.float32, "cpu"))
    spec = plan.scenario.system.autoscaling["engine"]
    spec = spec.model_copy(update={"start_up": spec.start_up.model_copy(update={"warm_up": 0.0})})

    def make_engine(clock: Clock) -> Engine:
        assert isinstance(clock, StatedClock)
        engine = Engine(decoder.for_another_stream(), plan.scheduler.config, clock=clock)
        launch = engine.executor.launch

        def timed(batch: Batch) -> AsyncModelRunnerOutput:
            clock.seconds += plan.pools[0].step_time.seconds(batch)
            return launch(batch)

        engine.executor.launch = timed  # type: ignore[method-assign]
        clock.seconds += START
        return engine

    router = NotedRouter(make_router(routing, lambda size: 0))
    fleet = Fleet([FleetEngine(i, make_engine, StatedClock()) for i in range(4)], router, spec, 1)
    tokens = plan.scheduler.config.prefix_id_tokens
    generations: list[Generation] = [materialise(*entry, 50, tokens) for entry in realisation(plan, 0)]
    fleet.run(generations)

    run = Simulation(plan).run()
    columns, names = run.columns, list(run.columns.replicas)
    order = np.argsort(columns.id)
    assert router.choices == {columns.id[i]: names[columns.replica[i]] for i in order}
    (log,) = run.scaling or ()
    times, counts = zip(*((row[0], row[1:]) for row in log.changes if row[0] <= run.end), strict=True)
    live = [row for row in fleet.replicas.log.changes if row[0] <= run.end]
    assert [row[1:] for row in live] == list(counts)
    assert [row[0] for row in live] == pytest.approx(times)
    assert max(sum(row[1:]) for row in live) > 2 < fleet.replicas.log.started
    for name in ("first_token", "last_token"):
        assert [getattr(entry, name) for entry in generations] == pytest.approx(
            np.asarray(getattr(columns, name))[order]
        )
