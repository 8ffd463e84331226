"""Live runs, and simulated engines that are given the same requests and step times: what each of them decides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from random import Random
from typing import Any

from simpy.events import Event

from kernels.shapes import Shape
from latency_models.sources.engine_regression import describe
from latency_models.step_time import StepTime
from latency_models.timed_runs import ReplayedRun
from live.engine import Engine
from live.generation import Generation
from live.models.config import ModelConfig
from schedulers.batches import Batch
from schedulers.engine_core import EngineCore
from twin.environment import Environment, Priority
from twin.serving.engine.engine import Engine as SimulatedEngine
from twin.serving.engine.engine_state import EngineOptions
from twin.serving.records.requests import RequestRecord
from workloads.request import Request

Decision = tuple[object, ...]

BLOCK = 4
CONFIG = ModelConfig("llama", Shape(2, 16, 24, 2, 1, 8, 50), max_position_embeddings=512, tied=True)


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


def trace(batch: Batch) -> Decision:
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


def durations_and_arrivals(replayed: ReplayedRun) -> tuple[list[float], list[float]]:
    """Durations of the steps, and arrivals of the requests in their order, on the clock of the simulation."""
    durations, begins, now = [], [], 0.0
    began = [begin for _, begin, _ in replayed.spans]
    for (_, begin, end), following in zip(replayed.spans, [*began[1:], None], strict=True):
        durations.append(max(round((end - begin) / GRID), 1) * GRID)
        begins.append(now)
        now += durations[-1] + (0.0 if end == following else 1.0)
    return durations, [begins[bisect_right(began, noticed)] for noticed in sorted(replayed.requests["noticed"])]


class NotedCore:
    """A scheduler that notes the batches which it decides."""

    def __init__(self, core: EngineCore, result: list[Decision]) -> None:
        self._core = core
        self._found = result

    def begin_step(self, now: float) -> Batch | None:
        batch = self._core.begin_step(now)
        if batch is not None:
            self._found.append(trace(batch))
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def noted(engine: Engine) -> list[Decision]:
    """Decisions of the engine from now on, appended as they are made."""
    results: list[Decision] = []
    engine.core = NotedCore(engine.core, results)  # type: ignore[assignment]
    return results


def answered(generation: Generation) -> RequestRecord:
    """The record of a request whose answer is as long as a live engine's was."""
    return RequestRecord(generation.request, len(generation.output) if generation.request.max_tokens else 0)


def simulate(
    make_core: Callable[[], EngineCore], step_time: StepTime, records: Iterable[tuple[float, RequestRecord]],
    **options: Any,
) -> tuple[SimulatedEngine, list[Decision]]:  # fmt: skip
    """An engine that has simulated requests, of stated arrivals, and its decisions."""
    env, decided = Environment(), list[Decision]()

    def watch(engine: SimulatedEngine, batch: Batch, start: float, end: float) -> None:
        decided.append(trace(batch))

    twin = SimulatedEngine(
        env, make_core, step_time, EngineOptions("twin", 0, fast_forward=False, watch=watch, **options)
    )

    def client() -> Generator[Event, object, None]:
        for arrival, record in records:
            yield env.at(arrival, Priority.ARRIVAL)
            twin.submit(record, record.request)

    env.process(client())
    env.run()
    return twin, decided
