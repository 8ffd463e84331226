"""Contention of the machine while a validation measures: waits for a processor, involuntary switches, equal work.

A program that computes on the same processors makes steps slower, and it does so by other amounts during the profile
and during the replays. An error of the forecast then says nothing about the twin.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

Document = dict[str, Any]
Verdict = Literal["met", "missed", "undecided"]

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds on a processor, nanoseconds in the run queue, and turns, of the thread that reads it."""

PACKAGES = Path("/sys/class/powercap")
"""Linux: `intel-rapl:N/energy_uj` is the energy of processor package N so far, microjoules; AMD's have it, too."""

WAITED, SWITCHES, EQUAL_WORK = 0.02, 20.0, 0.05
"""Limits: the share of its time that the thread waits in the run queue, involuntary switches a second of CPU time, and
the spread of the CPU time of equal work. A thread with a processor of its own waits for per mille, and is interrupted a
few times a second. A spread of 5 % is that of the median step's goal."""

PIECES, SIZE = 20, 50_000
"""Pieces of equal work before and after each measured part, and the numbers that each sorts: some milliseconds."""


class ContentionMeter:
    """Measures contention on the thread that enters its block; then `document` has its seconds and counts."""

    def __init__(self) -> None:
        self._numbers = np.random.default_rng(0).random(SIZE)
        self.document: Document = {}

    def __enter__(self) -> ContentionMeter:
        self._pieces = self._equal_work()
        self._before = _counters()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        counts = {name: after - self._before[name] for name, after in _counters().items() if name in self._before}
        pieces = self._pieces + self._equal_work()
        self.document = {**counts, "equal_work_seconds": float(np.median(pieces))}

    def _equal_work(self) -> list[float]:
        """CPU seconds of pieces of equal work."""
        seconds = []
        for _ in range(PIECES):
            begin = time.thread_time()
            np.sort(self._numbers)
            seconds.append(time.thread_time() - begin)
        return seconds


def _counters() -> dict[str, float]:
    """Seconds and counts of this process so far, and the packages' energy; without what the system does not tell."""
    counters = {
        "cpu_seconds": time.process_time(),
        "wall_seconds": time.perf_counter(),
        "involuntary_switches": float(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw),
    }
    with suppress(OSError, ValueError, IndexError):
        counters["waited_seconds"] = float(SCHEDSTAT.read_text().split()[1]) / 1e9
    with suppress(OSError, ValueError):
        if packages := [path for path in PACKAGES.glob("intel-rapl:*") if path.name.count(":") == 1]:
            counters["package_joules"] = sum(int((path / "energy_uj").read_text()) for path in packages) / 1e6
    return counters


def contention(points: Iterable[Mapping[str, Any]]) -> Document:
    """The contention of all measured points together, reasons to call the machine contended, and replays' joules."""
    points = [point for point in points if "contention" in point]
    parts = [point["contention"] for point in points]
    cpu, wall, switches = (
        sum(part[name] for part in parts) for name in ("cpu_seconds", "wall_seconds", "involuntary_switches")
    )
    waits = [part["waited_seconds"] for part in parts if "waited_seconds" in part]
    work = [part["equal_work_seconds"] for part in parts]
    joules = [point["contention"].get("package_joules", -1.0) for point in points if "requests" in point]
    share = sum(waits) / max(cpu + sum(waits), 1e-9) if waits else None
    rate, spread = switches / max(cpu, 1e-9), max(work) / max(min(work), 1e-9) - 1
    reasons = []
    if share is not None and share > WAITED:
        reasons.append(f"the engine waited for a processor {100 * share:.1f} % of its time (limit {100 * WAITED:g} %)")
    if rate > SWITCHES:
        reasons.append(f"it was interrupted {rate:.0f} times a second of CPU time (limit {SWITCHES:g})")
    if spread > EQUAL_WORK:
        reasons.append(f"CPU times of equal work differed by {100 * spread:.0f} % (limit {100 * EQUAL_WORK:g} %)")
    return {
        "parts": len(parts),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "waited_share": share,
        "involuntary_switches_per_second": rate,
        "equal_work_spread": spread,
        "package_joules": sum(joules) if joules and min(joules) >= 0 else None,  # a counter may wrap
        "contended": bool(reasons),
        "reasons": reasons,
    }


def verdict(missed: list[str], contention: Document) -> Verdict:
    """`undecided` where goals were missed on a contended machine."""
    if not missed:
        return "met"
    return "undecided" if contention["contended"] else "missed"
