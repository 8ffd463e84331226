"""Times kernels: the median of many calls, warmed up, with inputs rotated past the caches, and the spread of repeats.

`kernels.cases` has what can be measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

COLD_BYTES = {"cpu": 64 << 20, "cuda": 192 << 20}
"""Bytes of buffers used between two uses of one buffer: more than the last-level cache holds (60 MB on an H100)."""

MAX_SETS = {"cpu": 64, "cuda": 512}
"""Sets of inputs at most, each of which a graph on a GPU goes through."""

SLEEP_CYCLES = 200_000
SLEEP_CYCLES_PER_CALL = 2_000
"""Cycles that a GPU waits before the timed window, 100 µs and 1 µs a call: longer than the host takes to launch a
graph, so that no launch lies in the window."""

WARM_SECONDS = 0.05
"""Seconds of work before the first sample of a case on a GPU, whose clock falls while it is idle."""


@dataclass(frozen=True)
class Case:
    """One point of an operation's grid.

    Attributes:
        operation: the folder's name, with a suffix if an operation has several forms: "w4_gemm/group".
        sizes: the axes of the point: {"tokens": 64, "hidden": 4096}.
        prepare: makes a set of inputs and returns the call that works on them.
        moved: bytes that must at least be read and written. flops: floating-point operations.
        footprint: bytes of one set of inputs, where they are more than `moved`.
    """

    operation: str
    sizes: Mapping[str, int]
    prepare: Callable[[], Callable[[], object]]
    moved: int
    flops: int
    footprint: int = 0

    @property
    def set_bytes(self) -> int:
        """Bytes of one set of inputs."""
        return max(self.moved, self.footprint)


@dataclass(frozen=True)
class Timing:
    """The measurement of a case.

    Attributes:
        seconds: median of the samples. spread: (third quartile − first) / median.
        samples: their number. calls: of the kernel in each sample.
        clock: of the GPU's multiprocessors behind the samples, MHz; None on a CPU, or if it cannot be read.
    """

    seconds: float
    spread: float
    samples: int
    calls: int
    clock: int | None = None

    def bandwidth(self, case: Case) -> float:
        """Bytes a second that the case must have moved at least."""
        return case.moved / self.seconds

    def throughput(self, case: Case) -> float:
        """Floating-point operations a second."""
        return case.flops / self.seconds


def measure(
    case: Case, device: str, *, budget: float = 0.3, samples: int = 15, rotate: bool = True, cold: int | None = None
) -> Timing:
    """Time a case.

    On CUDA the calls are captured in a graph, which is launched while the GPU sleeps, so that no launch is waited for,
    once the clock is warm; on the CPU each call is timed by the
    clock, several at once where one takes less than 50 µs. With one thread (`torch.set_num_threads(1)`) the clock is
    the thread's processor time, which stands still while other programs have the processor.

    Args:
        device: "cpu" or "cuda".
        budget: seconds after which no further sample is begun, once there are 5.
        samples: at most this many.
        rotate: inputs that are not in a cache; else the same inputs each time.
        cold: bytes gone through between two uses of an input, in place of COLD_BYTES.
    """
    through = COLD_BYTES[device] if cold is None else cold
    sets = min(MAX_SETS[device], max(1, through // max(case.set_bytes, 1) + 1)) if rotate else 1
    calls = [case.prepare() for _ in range(sets)]
    times = _cuda_times(calls, budget, samples) if device == "cuda" else _cpu_times(calls, budget, samples)
    quartiles = statistics.quantiles([seconds for seconds, _ in times], n=4)
    middle = statistics.median(seconds for seconds, _ in times)
    clock = gpu_clock() if device == "cuda" else None
    return Timing(middle, (quartiles[2] - quartiles[0]) / middle, len(times), times[0][1], clock)


def gpu_clock() -> int | None:
    """The present clock of the GPU's multiprocessors, MHz; None if it cannot be read (PyTorch asks nvidia-ml-py)."""
    try:
        return torch.cuda.clock_rate()
    except (ModuleNotFoundError, RuntimeError):
        return None


def _cpu_times(calls: list[Callable[[], object]], budget: float, samples: int) -> list[tuple[float, int]]:
    """(seconds a call, calls) of each sample."""
    for call in calls[:3]:
        call()
    once = _elapsed(calls[:1])
    repeat = max(1, round(50e-6 / max(once, 1e-7)))
    following = 1 % len(calls)
    times: list[tuple[float, int]] = []
    end = time.perf_counter() + budget
    while len(times) < samples and (len(times) < 5 or time.perf_counter() < end):
        rotated = [calls[(following + i) % len(calls)] for i in range(repeat)]
        following = (following + repeat) % len(calls)
        times.append((_elapsed(rotated) / repeat, repeat))
    return times


def _elapsed(calls: list[Callable[[], object]]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for call in calls:
        call()
    return clock() - begin


def _cuda_times(calls: list[Callable[[], object]], budget: float, samples: int) -> list[tuple[float, int]]:
    """The result of `_cpu_times`, from events around a graph that goes through all buffers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:  # compiles and tunes, which a graph cannot hold
            call()
    stream.synchronize()
    repeat = max(1, -(-20 // len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            for call in calls:
                call()
    n = repeat * len(calls)
    warm = time.perf_counter() + WARM_SECONDS
    while True:
        graph.replay()
        torch.cuda.synchronize()
        if time.perf_counter() >= warm:
            break
    times: list[tuple[float, int]] = []
    end = time.perf_counter() + budget
    while len(times) < samples and (len(times) < 5 or time.perf_counter() < end):
        begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES + n * SLEEP_CYCLES_PER_CALL)
        begin.record()
        graph.replay()
        finish.record()
        finish.synchronize()
        times.append((begin.elapsed_time(finish) * 1e-3 / n, n))
    return times
