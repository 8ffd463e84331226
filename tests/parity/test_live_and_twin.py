"""The twin decides what the live engine decided: a live run, replayed with its own durations through the twin's driver,
gives the identical sequence of batches.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Generator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simpy.events import Event

torch = pytest.importorskip("torch", reason="the live engine needs the extra [live]")

from kernels.shapes import Shape  # noqa: E402
from latency_models.sources.engine_regression import describe  # noqa: E402
from latency_models.step_time import StepTime  # noqa: E402
from live.block_pool import BlockPool  # noqa: E402
from live.engine import Engine  # noqa: E402
from live.executor import Executor  # noqa: E402
from live.generation import Generation  # noqa: E402
from live.graphs.executor import GraphExecutor  # noqa: E402
from live.models.config import ModelConfig  # noqa: E402
from live.models.decoder import Decoder  # noqa: E402
from live.models.weights import random_weights  # noqa: E402
from live.validation.clients import materialise  # noqa: E402
from live.validation.replay import ReplayResult, replay  # noqa: E402
from schedulers.batches import Batch  # noqa: E402
from schedulers.chunking import ChunkPolicy, StaticChunks  # noqa: E402
from schedulers.engine_config import EngineConfig, OneShotBudget  # noqa: E402
from schedulers.engine_core import EngineCore  # noqa: E402
from twin.environment import Environment, Priority  # noqa: E402
from twin.serving.engine.engine import Engine as SimulatedEngine  # noqa: E402
from twin.serving.records.requests import RequestRecord  # noqa: E402
from workloads.request import Request  # noqa: E402

BLOCK = 4
CONFIG = ModelConfig("llama", Shape(2, 16, 24, 2, 1, 8, 50), max_position_embeddings=512, tied=True)

CASES: dict[str, tuple[EngineConfig, ChunkPolicy | None]] = {
    "plenty": (EngineConfig(num_gpu_blocks=400, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=8), None),
    "preemption": (EngineConfig(num_gpu_blocks=20, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=8), None),
    "small chunks": (
        EngineConfig(num_gpu_blocks=60, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=4), StaticChunks(6)
    ),
    "one-shot, shared when computed": (
        EngineConfig(
            num_gpu_blocks=60, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=4, cache_blocks_on="computed",
            in_batch_prefix_caching=True, one_shot=OneShotBudget(32, 4),
        ),
        None,
    ),
    "by priority": (
        EngineConfig(
            num_gpu_blocks=20, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=4, scheduling_policy="priority"
        ),
        None,
    ),
    "by deadline": (
        EngineConfig(
            num_gpu_blocks=40, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=3, scheduling_policy="deadline"
        ),
        None,
    ),
    "fair": (
        EngineConfig(
            num_gpu_blocks=20, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=4, scheduling_policy="fair",
            scheduling_parameters={"weights": {"b": 2.0}},
        ),
        None,
    ),
}  # fmt: skip


def requests(seed: int) -> list[tuple[Request, int]]:
    """Thirty within 30 ms, some of a common prefix, some that want no answer."""
    random = Random(seed)
    generations = []
    for i in range(30):
        prompt, answer = random.randint(1, 40), random.randint(1, 20)
        ids = tuple(100 * random.randint(0, 1) + k for k in range(random.randint(0, prompt // BLOCK)))
        task = "embed" if random.random() < 0.2 else "generate"
        arrival = random.uniform(0, 0.03)
        limit = 0 if task == "embed" else answer
        contract = {"priority": i % 3, "tenant": "aab"[i % 3], "ttft_goal": (0.004, 0.02)[i % 2]}
        generations.append((Request(i, arrival, prompt, limit, prefix_blocks=ids, task=task, **contract), answer))
    return generations


def trace(batch: Batch) -> tuple[object, ...]:
    """All that was decided: who, how much, and over which context."""
    chunks = tuple((c.sequence.request.id, c.context, c.tokens, c.last) for c in batch.chunks)
    decodes = tuple(sequence.request.id for sequence in batch.decodes)
    ending = tuple(sequence.request.id for sequence in batch.finishing)
    return type(batch).__name__, chunks, decodes, ending, describe(batch, BLOCK)


class Recorded(StepTime):
    """Step times that have happened, one after the other."""

    def __init__(self, durations: Iterator[float]) -> None:
        self._durations = durations

    def seconds(self, batch: Batch) -> float:
        return next(self._durations)

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        raise AssertionError("replayed step by step")


GRID = 2.0**-20
"""Live durations are rounded to it, so that sums of them are exact and a request comes at the very boundary at which it
was noticed."""


def durations_and_arrivals(replayed: ReplayResult) -> tuple[list[float], list[float]]:
    """Durations of the steps, and the arrival of each request, on the clock of the simulation."""
    durations, begins, now = [], [], 0.0
    for i, step in enumerate(replayed.steps):
        follows = replayed.followed[i] and i + 1 < len(replayed.steps)
        lasted = (replayed.steps[i + 1].begin if follows else step.end) - step.begin
        durations.append(max(round(lasted / GRID), 1) * GRID)
        begins.append(now)
        now += durations[-1] + (0.0 if follows else 1.0)
    began = [step.begin for step in replayed.steps]
    return durations, [begins[bisect_right(began, noticed)] for noticed in replayed.noticed]


class NotedCore:
    """A scheduler that notes the batches which it decides."""

    def __init__(self, core: EngineCore, result: list[tuple[object, ...]]) -> None:
        self._core = core
        self._found = result

    def begin_step(self, now: float) -> Batch | None:
        batch = self._core.begin_step(now)
        if batch is not None:
            self._found.append(trace(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def noted(engine: Engine) -> list[tuple[object, ...]]:
    """Decisions of the engine from now on, appended as they are made."""
    results: list[tuple[object, ...]] = []
    engine.core = NotedCore(engine.core, results)  # type: ignore[assignment]
    return results


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

    simulated: list[tuple[object, ...]] = []
    durations, arrivals = durations_and_arrivals(replayed)
    env = Environment()
    twin = SimulatedEngine(
        env, lambda: EngineCore(config, chunks), Recorded(iter(durations)), name="twin", index=0,
        fast_forward=False, watch=lambda engine, batch, start, end: simulated.append(trace(batch)),
    )  # fmt: skip

    def client() -> Generator[Event, object, None]:
        for generation, arrival in zip(replayed.by_arrival, arrivals, strict=True):
            yield env.at(arrival, Priority.ARRIVAL)
            request = generation.request
            answer = len(generation.output) if request.max_tokens else 0
            twin.submit(RequestRecord(request, answer), request)

    env.process(client())
    env.run()
    assert simulated == lived
    if name == "preemption":
        assert twin.cores[0].preemptions > 0


def by_the_second(
    name: str, make: type[Executor], depth: int, arrivals: dict[Generation, float]
) -> list[tuple[object, ...]]:
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


@pytest.mark.parametrize(("padded", "depth"), [(False, 1), (False, 2), (True, 2)])
@pytest.mark.parametrize("name", CASES)
def test_both_decide_alike_a_step_ahead(name: str, padded: bool, depth: int) -> None:
    """Every step takes a second in both. The model decides when outputs end; the simulation is given their lengths."""
    config, chunks = CASES[name]
    generations = [materialise(request, answer + 20, 50, BLOCK) for request, answer in requests(6)]
    for generation in generations:
        generation.end_tokens = frozenset(range(generation.request.id % 5, 50, 7))
    arrivals = {generation: float(round(generation.request.arrival * 4000)) for generation in generations}
    lived = by_the_second(name, GraphExecutor if padded else Executor, depth, arrivals)

    simulated: list[tuple[object, ...]] = []
    env = Environment()
    twin = SimulatedEngine(
        env, lambda: EngineCore(config, chunks), Recorded(itertools.repeat(1.0)), name="twin", index=0, depth=depth,
        fast_forward=False, watch=lambda engine, batch, start, end: simulated.append(trace(batch)),
    )  # fmt: skip

    def client() -> Generator[Event, object, None]:
        for generation in sorted(generations, key=lambda generation: arrivals[generation]):
            yield env.at(arrivals[generation], Priority.ARRIVAL)
            answer = len(generation.output) if generation.request.max_tokens else 0
            twin.submit(RequestRecord(generation.request, answer), generation.request)

    env.process(client())
    env.run()
    assert simulated == lived
    assert any(generation.finish_reason == "stop" for generation in generations if generation.request.max_tokens)
    if name == "preemption":
        assert twin.cores[0].preemptions > 0
