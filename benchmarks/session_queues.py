"""Sessions on an engine with degenerate settings, compared with the queues that they are.

    python -m benchmarks.session_queues [--requests 4000] [--replications 10]

Steps take constant time whatever is in them, and answers are geometric with a mean of 200 tokens, so that a request's
service is exponential but for a quarter of a per cent. Users in a closed loop with think times are then the
machine-repairman queue M/M/c//N, and sessions that arrive by a Poisson process, with a geometric number of turns and
think times between them, a Jackson network: the engine has the queue of M/M/c although the requests of later turns do
not arrive by a Poisson process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.queueing import finite_source_response, mmc_wait
from reports.metrics import Estimate, controlled_mean
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

STEP = 1e-3
"""Seconds of a step."""
STEPS = 200
"""Mean steps of a service."""
SERVICE = STEP * STEPS
TURNS = 3
"""Mean turns of a session."""


@dataclass(frozen=True)
class Closed:
    """`users` users and `servers` sequences at a time. Pauses within sessions are exponential, others constant."""

    users: int
    servers: int
    within: float = 0.5
    between: float = 1.1

    def expected(self) -> float:
        """Mean time from a request to its answer, seconds."""
        think = ((TURNS - 1) * self.within + self.between) / TURNS
        return finite_source_response(self.users, think, SERVICE, self.servers)

    def measure(self, requests: int, replications: int, confidence: float) -> Estimate:
        """The same of simulations; the control is the mean service that was really drawn."""
        arrivals = {"process": "closed_loop", "concurrency": self.users, "think": self.between}
        parts = [
            _responses(run, 10.0, float("inf"))
            for run in _runs(requests, replications, self.servers, {"mean": self.within, "cv": 1.0}, arrivals)
        ]
        means = [(times.mean(), services.mean()) for times, services in parts]
        return _estimate(means, SERVICE, confidence)


@dataclass(frozen=True)
class Open:
    """Sessions by a Poisson process, at a load of `load` for each of `servers` sequences at a time."""

    load: float
    servers: int

    def expected(self) -> float:
        """Mean time from a request to its answer, seconds."""
        return mmc_wait(self.load * self.servers / SERVICE, SERVICE, self.servers) + SERVICE

    def measure(self, requests: int, replications: int, confidence: float) -> Estimate:
        """The same of simulations; the control is the load that was really drawn."""
        arrivals = {"process": "poisson", "rate": self.load * self.servers / SERVICE / TURNS}
        means = []
        for run in _runs(requests, replications, self.servers, {"mean": 1.0, "cv": 2.0}, arrivals):
            assert run.sessions is not None
            start, end = 20.0, max(record.start for record in run.sessions.finished)
            times, services = _responses(run, start, end)
            means.append((times.mean(), services.sum() / (end - start) / self.servers))
        return _estimate(means, self.load, confidence)


def _runs(
    requests: int, replications: int, servers: int, think: dict[str, float], arrivals: dict[str, Any]
) -> list[Run]:
    document = {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "session-queues",
        "workload": {
            "requests": requests,
            "prefill": {"distribution": "fixed", "mean": 20},
            "decode": {"distribution": "geometric", "mean": STEPS},
            "arrivals": arrivals,
            "sessions": {
                "source": "drawn",
                "turns": {"distribution": "geometric", "mean": TURNS},
                "growth": {"distribution": "fixed", "mean": 9},
                "think": think,
            },
        },
        "engine": {"num_gpu_blocks": 10**7, "max_num_seqs": servers, "max_num_batched_tokens": 10**6},
        "step_time": {"source": "linear", "overhead": STEP, "per_token": 0.0},
        "detail": False,
    }
    plan = prepare(document, Path("session-queues.yaml")).cases[0].plan
    return [Simulation(plan, replication).run() for replication in range(replications)]


def _responses(run: Run, start: float, end: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times to the answer of the requests that are sent between `start` and `end`, and their services, seconds."""
    arrival, answered = np.array(run.columns.arrival), np.array(run.columns.last_token)
    counted = (arrival >= start) & (arrival < end)
    return (answered - arrival)[counted], np.array(run.columns.output_tokens)[counted] * STEP


def _estimate(means: Sequence[tuple[float, float]], control: float, confidence: float) -> Estimate:
    times, controls = np.array(means).T
    return controlled_mean(times, controls, control, confidence=confidence)


CASES = (Closed(6, 1), Closed(9, 3), Closed(40, 10), Open(0.4, 1), Open(0.6, 3))


def main() -> int:
    """Simulate every case, and print both times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--replications", type=int, default=10)
    arguments = parser.parse_args()
    for case in CASES:
        expected, measured = case.expected(), case.measure(arguments.requests, arguments.replications, 0.95)
        difference, width = 100 * (measured.mean / expected - 1), 100 * measured.half_width / expected
        print(f"{case}: {1e3 * expected:.1f} ms, simulated {difference:+.2f} ± {width:.2f} %", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
