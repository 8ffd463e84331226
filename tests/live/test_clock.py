"""The clocks of live runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from kernels.shapes import Shape
from latency_models.timed_runs import ReplayedRun
from live.clock import CLOCKS, Clock, DirectClock, WallClock
from live.engine import Engine
from live.generation import Generation
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.validation.backend import materialise, replay
from schedulers.engine_config import EngineConfig
from workloads.request import Request

CONFIG = ModelConfig("llama", Shape(2, 64, 96, 4, 2, 16, 50), max_position_embeddings=256, tied=False)


def engine(depth: int = 1) -> Engine:
    torch.set_num_threads(1)
    decoder = Decoder(CONFIG, random_weights(CONFIG, torch.float32, "cpu"))
    return Engine(decoder, EngineConfig(num_gpu_blocks=64, max_num_seqs=4), depth=depth)


def compute(seconds: float) -> None:
    """Use CPU time on this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("name", CLOCKS)
def test_a_clock_starts_at_0_stops_for_a_block_and_waits(name: str) -> None:
    clock: Clock = {str(key): make for key, make in CLOCKS.items()}[name]()
    assert clock.name == name
    compute(0.01)
    assert clock() >= 0.01
    clock.start()
    assert 0 <= clock() < 0.05
    with clock.paused():
        compute(0.2)
    assert clock() < 0.15
    clock.wait_until(0.2)
    assert 0.2 <= clock() < 0.4
    clock.wait_until(0.01)  # has passed: no clock goes back
    assert clock() >= 0.2


def test_the_direct_clock_counts_its_own_computation_and_jumps_over_waits() -> None:
    clock, wall = DirectClock(), WallClock()
    time.sleep(0.02)
    assert clock() < 0.01
    compute(0.005)
    thread = threading.Thread(target=compute, args=(0.02,))
    thread.start()
    thread.join()
    assert 0.005 <= clock() < 0.02
    clock.wait_until(3600.0)
    assert clock() == pytest.approx(3600.0, abs=0.01)
    assert wall() < 10.0


def replayed(clock: Clock, gap: float, depth: int = 1) -> tuple[ReplayedRun, list[Generation]]:
    generations = [materialise(Request(i, gap * i, 20, 6), 6, 50, 16) for i in range(8)]
    return replay(engine(depth), generations, clock), generations


@pytest.mark.parametrize("depth", [1, 2])
def test_a_direct_replay_does_not_wait_and_answers_alike(depth: int) -> None:
    """Eight requests 100 s apart are served in no time; latencies count from arrivals on the virtual clock."""
    begin = time.perf_counter()
    result, generations = replayed(DirectClock(), 100.0, depth)
    assert time.perf_counter() - begin < 20.0
    columns = result.requests
    assert columns["arrival"].tolist() == [100.0 * i for i in range(8)]
    assert (columns["noticed"] - columns["arrival"] < 1e-3).all()
    latency = columns["last_token"] - columns["arrival"]
    assert (latency > 0).all()
    assert latency.max() < 1.0
    idle = [end < begin for (_, _, end), (_, begin, _) in itertools.pairwise(result.spans)]
    assert idle.count(True) == 7  # the engine is idle after each request
    _, by_wall = replayed(WallClock(), 0.0, depth)
    assert [generation.output for generation in by_wall] == [generation.output for generation in generations]


def test_steps_of_a_direct_run_sum_to_its_computation() -> None:
    """No time is counted twice, none is lost: busy spans of a saturated run cover its CPU time."""
    begin = time.thread_time()
    result, _ = replayed(DirectClock(), 0.0)
    computed = time.thread_time() - begin
    busy = sum(end - begin for _, begin, end in result.spans)
    assert 0 < busy <= result.spans[-1][2] <= computed
    assert busy == pytest.approx(result.spans[-1][2] - result.spans[0][1], rel=1e-6)


@pytest.mark.slow  # burns all cores for seconds
def test_other_processes_are_not_counted() -> None:
    """Beside burning processes the steps take no more than the thread computed, although its wall time is longer.

    How fast a lone process computes says nothing: cores that share caches or execution units slow each other.
    """
    served = engine()
    generations = [materialise(Request(i, 0.0, 20, 6), 6, 50, 16) for i in range(100)]
    burning = 2 * len(os.sched_getaffinity(0))
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(burning)]
    try:
        time.sleep(0.2)
        wall, computed = time.perf_counter(), time.thread_time()
        spans = replay(served, generations, DirectClock()).spans
        wall, computed = time.perf_counter() - wall, time.thread_time() - computed
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert wall > 1.5 * computed
    assert 0.2 * computed < sum(end - begin for _, begin, end in spans) <= computed
