"""The twin decides what the live engine decided: a live run, replayed with its own durations through the twin's driver,
gives the identical sequence of batches.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the live engine needs the extra [live]")

from live.block_pool import BlockPool  # noqa: E402
from live.engine import Engine  # noqa: E402
from live.executor import Executor  # noqa: E402
from live.generation import Generation  # noqa: E402
from live.graphs.executor import GraphExecutor  # noqa: E402
from live.models.decoder import Decoder  # noqa: E402
from live.models.weights import random_weights  # noqa: E402
from live.validation.backend import materialise, replay  # noqa: E402
from schedulers.engine_config import EngineConfig, OneShotBudget  # noqa: E402
from schedulers.engine_core import EngineCore  # noqa: E402
from schedulers.step_policies import ChunkPolicy, StaticChunks  # noqa: E402
from tests.parity.live_and_twin import (  # noqa: E402
    BLOCK,
    CONFIG,
    Decision,
    Recorded,
    answered,
    durations_and_arrivals,
    noted,
    requests,
    simulate,
)


def config(blocks: int, seats: int, **settings: Any) -> EngineConfig:
    return EngineConfig(blocks, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=seats, **settings)


ONE_SHOT = {"cache_blocks_on": "computed", "in_batch_prefix_caching": True, "one_shot": OneShotBudget(32, 4)}
CASES: dict[str, tuple[EngineConfig, ChunkPolicy | None]] = {
    "plenty": (config(400, 8), None),
    "preemption": (config(20, 8), None),
    "small chunks": (config(60, 4), StaticChunks(6)),
    "one-shot, shared when computed": (config(60, 4, **ONE_SHOT), None),
    "by priority": (config(20, 4, scheduling_policy="priority"), None),
    "by deadline": (config(40, 3, scheduling_policy="deadline"), None),
    "fair": (config(20, 4, scheduling_policy="fair", scheduling_parameters={"weights": {"b": 2.0}}), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_twin_decides_what_the_live_plant_decided(name: str, tmp_path: Path) -> None:
    config, chunks = CASES[name]
    decoder = Decoder(CONFIG, random_weights(CONFIG, torch.float32, "cpu"))
    engine = Engine(decoder, config, chunks)
    assert isinstance(engine.core.kv_cache, BlockPool)
    queried = requests(5)
    generations = [materialise(request, answer, 50, BLOCK) for request, answer in queried]
    lived = noted(engine)
    replayed = replay(engine, generations)

    durations, arrivals = durations_and_arrivals(replayed)
    by_arrival = sorted(generations, key=lambda generation: generation.request.arrival)
    records = zip(arrivals, map(answered, by_arrival), strict=True)
    twin, simulated = simulate(lambda: EngineCore(config, chunks), Recorded(iter(durations)), records)
    assert simulated == lived
    if name == "preemption":
        assert twin.cores[0].preemptions > 0


def by_the_second(name: str, make: type[Executor], depth: int, arrivals: dict[Generation, float]) -> list[Decision]:
    """Decisions of a live engine whose every step takes a second."""
    config, chunks = CASES[name]
    decoder = Decoder(CONFIG, random_weights(CONFIG, torch.float32, "cpu"))
    engine = Engine(decoder, config, chunks, make_executor=make, depth=depth)
    lived = noted(engine)
    waiting, now = sorted(arrivals, key=lambda generation: arrivals[generation]), 0.0
    while waiting or engine.core.sequences:
        while waiting and arrivals[waiting[0]] <= now:
            engine.submit(waiting.pop(0))
        if engine.step() is not None:
            now += 1.0
        elif waiting:
            now = arrivals[waiting[0]]
    return lived


@pytest.mark.parametrize(
    ("name", "padded", "depth"),
    [*((name, False, 2) for name in CASES), ("plenty", False, 1), ("preemption", True, 2), ("fair", True, 2)],
)
def test_both_decide_alike_a_step_ahead(name: str, padded: bool, depth: int) -> None:
    """Every step takes a second in both. The model decides when outputs end; the simulation is given their lengths."""
    config, chunks = CASES[name]
    generations = [materialise(request, answer + 20, 50, BLOCK) for request, answer in requests(6)]
    for generation in generations:
        generation.end_tokens = frozenset(range(generation.request.id % 5, 50, 7))
    arrivals = {generation: float(round(generation.request.arrival * 4000)) for generation in generations}
    lived = by_the_second(name, GraphExecutor if padded else Executor, depth, arrivals)

    records = [
        (arrivals[generation], answered(generation)) for generation in sorted(generations, key=arrivals.__getitem__)
    ]
    seconds = Recorded(itertools.repeat(1.0))
    twin, simulated = simulate(lambda: EngineCore(config, chunks), seconds, records, depth=depth)
    assert simulated == lived
    assert any(generation.finish_reason == "stop" for generation in generations if generation.request.max_tokens)
    if name == "preemption":
        assert twin.cores[0].preemptions > 0
