"""Profiles and replays of vLLM's server by streamed completions and the wall clock. Steps are those of its log."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from latency_models.sources.engine_regression import Step, describe
from live.generation import Generation
from live.validation.clients import OpenLoop, Sessions
from live.validation.profiling import (
    WARM_UP_STEPS,
    ProfilingLimits,
    ProfilingResult,
    RandomRequests,
    Round,
    random_sizes,
    warm_up_round,
)
from live.validation.replay import ReplayResult, TimedStep
from live.vllm.server import VllmServer
from live.vllm.step_log import Span

ALONE = 4
"""Requests of each profiled round that find vLLM idle: their way to a step is measured."""

MAX_CLIENTS = 4096
"""Requests that are answered at the same time."""


@contextlib.contextmanager
def clients_at_once(number: int) -> Iterator[ThreadPoolExecutor]:
    """Threads of clients. An error in the block does not wait for answers: these end with the server."""
    pool = ThreadPoolExecutor(number)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class ServerProfile:
    """A profile of a server by rounds of random requests: each client sends its next one when it has an answer."""

    def __init__(
        self, server: VllmServer, vocabulary: int, limits: ProfilingLimits, block_size: int, seed: int
    ) -> None:
        self._server = server
        self._limits = limits
        self._rng = np.random.default_rng([seed, 23])
        self._requests = RandomRequests(self._rng, vocabulary, block_size, limits.resent)
        self._drawing = threading.Lock()
        self._sizes: list[Round] = []

    def warm_up(self) -> None:
        """Run a round that is not kept."""
        self._round(warm_up_round(self._limits), WARM_UP_STEPS)

    def run(self, rounds: int) -> ProfilingResult:
        """Run so many rounds, and measure requests' ways to steps and back (`system.frontend`)."""
        results = []
        routes = []
        deliveries = []
        for _ in range(rounds):
            if not self._sizes:
                self._sizes = list(map(Round, *random_sizes(self._rng, self._limits)))
            steps, route, deliver = self._round(self._sizes.pop(), self._limits.max_steps)
            results.append(steps)
            routes.append(route)
            deliveries.append(deliver)
        return ProfilingResult(results, {"route": float(np.median(routes)), "deliver": float(np.median(deliveries))})

    def _round(self, size: Round, max_steps: int) -> tuple[list[tuple[float, Step]], float, float]:
        """Timed steps, and mean seconds from a request to its step, and from steps' ends to their tokens."""
        answers: list[Generation] = []
        spans: list[Span] = []
        routes = []
        for _ in range(ALONE):
            sent = time.perf_counter()
            self._answer(size._replace(max_output_tokens=1), answers)
            steps = self._server.steps(1)
            routes.append(steps[0][1] - sent)
            spans += steps
        # All go on until the middle of the round, then they leave one after the other, as `sequences_left` says.
        quotas = [max(round(max_steps * (1 - i / size.num_seqs / 2)), 1) for i in range(size.num_seqs)]
        with clients_at_once(size.num_seqs) as clients:
            for client in [clients.submit(self._client, size, quota, answers) for quota in quotas]:
                client.result()
        times = np.array([at for generation in answers for at in generation.times])
        spans += self._server.steps(len(times) - ALONE)
        ends = [end for batch, _, end in spans for _ in range(batch.outputs)]
        timed = [(begin, describe(batch, 0, end - begin)) for batch, begin, end in spans]
        return timed, float(np.mean(routes)), float(times.mean() - np.mean(ends))

    def _client(self, size: Round, quota: int, answers: list[Generation]) -> None:
        """Send requests whose answers have `quota` tokens together."""
        while quota > 0:
            limit = min(size.max_output_tokens, quota)
            quota -= self._answer(size._replace(max_output_tokens=limit), answers)

    def _answer(self, size: Round, answers: list[Generation]) -> int:
        with self._drawing:
            generation = self._requests.make(size)
        self._server.answer(generation, time.perf_counter)
        answers.append(generation)
        return len(generation.output)


def replay_served(
    server: VllmServer, requests: Sequence[Generation] | Sessions, profiled: ProfilingResult | None
) -> ReplayResult:
    """Send each request to an idle server when it arrives; as `live.validation.replay.replay`, by the wall clock."""
    clients = OpenLoop(requests) if isinstance(requests, Sequence) else requests
    by_arrival: list[Generation] = []
    noticed: list[float] = []
    cached: dict[int, int] = {}
    answers = queue.Queue[Future[Generation]]()
    num_finished = 0
    begin = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - begin

    def answer(generation: Generation) -> Generation:
        cached[generation.request.id] = server.answer(generation, now)
        return generation

    with clients_at_once(MAX_CLIENTS) as senders:
        while (arrival := clients.next_arrival) is not None or num_finished < len(by_arrival):
            try:
                wait = None if arrival is None else max(arrival - now(), 0.0)
                clients.finished(answers.get(timeout=wait).result())
                num_finished += 1
            except queue.Empty:
                for generation in clients.due(now()):
                    by_arrival.append(generation)
                    noticed.append(now())
                    senders.submit(answer, generation).add_done_callback(answers.put)
    spans = server.steps(sum(len(generation.output) or 1 for generation in by_arrival))
    steps = [TimedStep(batch, start - begin, end - begin) for batch, start, end in spans]
    generations = list(requests) if isinstance(requests, Sequence) else by_arrival
    columns = clients.columns(generations)
    if columns:
        columns["cached_tokens"] = np.array([float(cached[row.request.id]) for row in generations])
    return ReplayResult(generations, by_arrival, noticed, steps, [False] * len(steps), columns, profiled=profiled)
