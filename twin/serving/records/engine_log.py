"""The log of an engine: its steps in order, its counters, state and queue over time; and a file to which steps move."""

from __future__ import annotations

import os
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from reports.run_directory import naming

if TYPE_CHECKING:
    from schedulers.engine_core import EngineCore


class StepFile:
    """Arrays of numbers, appended to a file and read by their place in it. An `OSError` of a full disk has a path.

    `path`: of the file; None: a nameless one that ends with this object. `new`: begin an empty file.
    """

    def __init__(self, path: Path | None = None, *, new: bool = True) -> None:
        self._path = path or Path(tempfile.gettempdir())
        self._file = -1
        with naming(self._path), path.open("w+b" if new else "rb") if path else tempfile.TemporaryFile() as opened:
            self._file = os.dup(opened.fileno())
        self._end = 0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def append(self, values: array[Any]) -> int:
        """Append numbers; returns their place, a byte offset."""
        place, remainder = self._end, memoryview(values).cast("B")
        with naming(self._path):
            while remainder:
                size = os.pwrite(self._file, remainder, self._end)
                self._end = self._end + size
                remainder = remainder[size:]
        return place

    def read(self, place: int, count: int, typecode: str) -> NDArray[Any]:
        """Read `count` numbers of a type of `array` that begin at a place."""
        size = count * array(typecode).itemsize
        return np.frombuffer(os.pread(self._file, size, place), dtype=typecode)


DECODE_STEP, MIXED_STEP, ONE_SHOT_STEP = 0, 1, 2
"""Kinds of steps in an engine's log."""

WORTH_A_PART = 1 << 10
"""Steps of an engine from which on they are moved to a file."""

RUNS_OF_PART: Final = 1 << 15
"""Runs of steps with equal numbers of decodes that are copied at a time."""


StepColumns = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""When steps ended, and the run-length encoded decodes of them."""


def numbers(values: array[Any]) -> NDArray[Any]:
    """A copy of an array as numpy's."""
    return np.array(values, dtype=values.typecode)


def _joined(parts: list[StepColumns]) -> StepColumns:
    if len(parts) == 1:
        return parts[0]
    ends, decodes, repeats = zip(*parts, strict=True)
    return np.concatenate(ends), np.concatenate(decodes), np.concatenate(repeats)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of an engine's scheduler.

    Attributes:
        prefill_tokens: prompt tokens scheduled. cached_tokens: prompt tokens supplied by the prefix cache.
        model_loads: models that were loaded into slots (`schedulers.model_slots`).
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    model_loads: int = 0

    def plus(self, cores: Iterable[EngineCore]) -> Counters:
        """These counts and those of `cores`."""
        every: list[Counters | EngineCore] = [self, *cores]
        return Counters(
            sum(counts.prefill_tokens for counts in every),
            sum(counts.cached_tokens for counts in every),
            sum(counts.preemptions for counts in every),
            sum(counts.model_loads for counts in every),
        )


class StepIntegral:
    """The integral over time of a count that changes in steps, in counts times seconds.

    Attributes:
        area: the integral up to `since`, when the count became `value`.
    """

    __slots__ = ("area", "since", "value")

    def __init__(self) -> None:
        self.area = self.since = 0.0
        self.value = 0

    def set(self, now: float, value: int) -> None:
        """Set the count from `now` on.

        An unchanged value adds no term, so the sum does not depend on how often it is set.
        """
        if value != self.value:
            self.area += self.value * (now - self.since)
            self.since = now
            self.value = value

    def until(self, now: float) -> float:
        """The integral up to now, which is not before `since`."""
        return self.area + self.value * (now - self.since)


class Backlog:
    """Counts the requests that wait at one engine for their first step there, in constant memory.

    Attributes:
        first: when the first request arrived, seconds; None before.
        last: the latest arrival, seconds, and of that moment: requests arrived and started, when the queue was last
            empty, seconds, and requests that had arrived by then; None before the first.
    """

    __slots__ = ("_arrived", "_before", "_emptied", "_started", "first", "last")

    def __init__(self, first: float | None = None, last: tuple[float, int, int, float, int] | None = None) -> None:
        self.first = first
        self.last = last
        self._arrived = self._started = self._before = 0
        self._emptied = 0.0

    def arrive(self, now: float) -> None:
        """Count a request that is submitted."""
        if self.first is None:
            self.first = self._emptied = now
        self._arrived += 1
        self.last = now, self._arrived, self._started, self._emptied, self._before

    def start(self, now: float) -> None:
        """Count a request whose first step begins."""
        self._started += 1
        if self._started == self._arrived:
            self._empty(now)

    def withdraw(self, now: float) -> None:
        """Count a request out that was shed on arrival."""
        self._arrived -= 1
        if self.last is not None:
            time, arrived, started, emptied, before = self.last
            self.last = time, arrived - 1, started, emptied, before
        if self._started == self._arrived:
            self._empty(now)

    def lose_all(self, now: float) -> None:
        """Empty the queue: the engine has failed, and its requests go elsewhere."""
        self._started = self._arrived
        self._empty(now)

    def _empty(self, now: float) -> None:
        self._emptied = now
        self._before = self._arrived


_LOGGED: Final[tuple[str, ...]] = (
    "name", "detail", "ends", "decodes", "repeats", "odd_gaps", "changes", "index", "starts", "prefill_tokens", "kinds",
    "outages", "events", "_busy", "_span_start", "_span_end", "_stored", "_num_stored",
)  # fmt: skip


class EngineLog:
    """The steps of one engine, in order, and its state over time.

    Attributes:
        ends: when each step ended, seconds.
        decodes, repeats: run-length encoded decodes of successive steps. The gap to the step before is an inter-token
            latency of each of these decodes.
        odd_gaps: inter-token latencies that span other than one step, after a transfer or a preemption, seconds.
        index, starts, prefill_tokens, kinds: index, start (seconds), prompt tokens and kind of the steps that were not
            fast-forwarded.
        changes: flat rows (time, running, waiting, free blocks): the state from `time` on.
        micro_batches: of an engine that is a pipeline, the steps of each micro-batch: inter-token latencies are gaps
            between them, not between successive steps of the engine.
        running_seqs: the integral of running sequences that count towards `max_num_seqs`.
        outages: start and end of each, seconds. events: how often the engine's process has been at a step end.

    `store` moves the first steps to a file; `ends`, `decodes` and `repeats` then have the others alone, while
    `num_steps`, `end_of` and `step_parts` are of all.
    """

    def __init__(self, name: str, *, detail: bool) -> None:
        self.name = name
        self.detail = detail
        self.ends = array("d")
        self.decodes = array("i")
        self.repeats = array("i")
        self.odd_gaps = array("d")
        self.changes = array("d")
        self.index = array("q")
        self.starts = array("d")
        self.prefill_tokens = array("q")
        self.kinds = array("b")
        self.running_seqs = StepIntegral()
        self.outages: list[tuple[float, float]] = []
        self.micro_batches: list[EngineLog] = []
        self.events = 0
        self._busy = self._span_start = self._span_end = 0.0
        self._file: StepFile | None = None
        # Of each part in the file, flat: the number of the step after it, its runs, its place.
        self._stored = array("q")
        self._num_stored = 0

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._num_stored + len(self.ends)

    def end_of(self, step: int) -> float:
        """When a step ended, by its number from 0, or from -1 backwards; seconds."""
        if step < 0:
            step += self.num_steps
        if step >= self._num_stored:
            return self.ends[step - self._num_stored]
        part = bisect_right(self._stored[::3], step)
        first = self._stored[3 * part - 3] if part else 0
        assert self._file is not None, "steps that are stored are in a file"
        return float(self._file.read(self._stored[3 * part + 2] + 8 * (step - first), 1, "d")[0])

    def store(self, file: StepFile) -> None:
        """Move the steps so far to the file. Not for a log with detail."""
        steps, runs = len(self.ends), len(self.repeats)
        place = file.append(self.ends)
        file.append(self.decodes)
        file.append(self.repeats)
        self._file = file
        self._num_stored = self._num_stored + steps
        self._stored.extend((self._num_stored, runs, place))
        self.ends = array("d")
        self.decodes = array("i")
        self.repeats = array("i")

    def step_parts(self, steps: int) -> Iterator[StepColumns]:
        """`ends`, `decodes` and `repeats` of all steps in order, in parts of some `steps` steps or more."""
        waiting: list[StepColumns] = []
        size = 0
        for part in self._parts_as_stored():
            waiting.append(part)
            size += len(part[0])
            if size >= steps:
                yield _joined(waiting)
                waiting, size = [], 0
        if waiting:
            yield _joined(waiting)

    def _parts_as_stored(self) -> Iterator[StepColumns]:
        first = 0
        for i in range(0, len(self._stored), 3):
            after, runs, place = self._stored[i : i + 3]
            file, steps, first = self._file, after - first, after
            assert file is not None, "steps that are stored are in a file"
            behind = place + 8 * steps
            yield file.read(place, steps, "d"), file.read(behind, runs, "i"), file.read(behind + 4 * runs, runs, "i")
        first = 0
        for run in range(0, len(self.repeats), RUNS_OF_PART):
            repeats = numbers(self.repeats[run : run + RUNS_OF_PART])
            after = first + int(repeats.sum())
            yield numbers(self.ends[first:after]), numbers(self.decodes[run : run + RUNS_OF_PART]), repeats
            first = after

    def dump(self) -> dict[str, Any]:
        """All but the file as plain objects, for `load` in another process."""
        sums = self.running_seqs
        return {name: getattr(self, name) for name in _LOGGED} | {"running_seqs": (sums.area, sums.since, sums.value)}

    @classmethod
    def load(cls, dumped: dict[str, Any], file: StepFile | None) -> EngineLog:
        """The log that was dumped, with the file of its stored steps, if there is one."""
        log = cls(dumped["name"], detail=dumped["detail"])
        for name in _LOGGED:
            setattr(log, name, dumped[name])
        log.running_seqs.area, log.running_seqs.since, log.running_seqs.value = dumped["running_seqs"]
        log._file = file
        return log

    @property
    def busy(self) -> float:
        """The time in which steps ran, seconds."""
        return self._busy + (self._span_end - self._span_start)

    def busy_until(self, start: float, now: float) -> float:
        """The time in which steps ran, with one that has run since `start` and is not yet counted; seconds."""
        if start <= self._span_end:
            return self._busy + (now - self._span_start)
        return self.busy + (now - start)

    def ran(self, start: float, end: float) -> None:
        """Count steps that ran without a break from `start` to `end`.

        Adjacent steps are summed as one span, so the sum does not depend on how many are counted at a time. Those that
        overlap, in a pipeline, are one span too.
        """
        if start > self._span_end:
            self._busy += self._span_end - self._span_start
            self._span_start = start
        self._span_end = end

    def states(self) -> NDArray[np.float64]:
        """The rows of `changes` that differ from the row before, shape (n, 4)."""
        rows = np.frombuffer(self.changes, dtype=np.float64).reshape(-1, 4)
        differs = np.ones(len(rows), dtype=np.bool_)
        differs[1:] = (rows[1:, 1:] != rows[:-1, 1:]).any(axis=1)
        return rows[differs]

    def state(self, now: float, running: int, waiting: int, free_blocks: int) -> None:
        """Set the state from `now` on; without detail nothing is kept."""
        if self.detail:
            self.changes.extend((now, running, waiting, free_blocks))

    def step_details(self, kind: int, prefill_tokens: int, start: float) -> None:
        """Add details of the step added last; without detail nothing is kept."""
        if self.detail:
            self.index.append(len(self.ends) - 1)
            self.starts.append(start)
            self.prefill_tokens.append(prefill_tokens)
            self.kinds.append(kind)

    def step(self, end: float, decodes: int) -> None:
        """Add a step that ended at `end`, with `decodes` tokens that follow tokens of the step before."""
        self.ends.append(end)
        if self.repeats and self.decodes[-1] == decodes:
            self.repeats[-1] += 1
        else:
            self.decodes.append(decodes)
            self.repeats.append(1)

    def steps(self, ends: list[float], decodes: int) -> None:
        """Add several steps with equal numbers of decodes."""
        self.ends.extend(ends)
        if self.repeats and self.decodes[-1] == decodes:
            self.repeats[-1] += len(ends)
        else:
            self.decodes.append(decodes)
            self.repeats.append(len(ends))


class StepKeeper:
    """Moves the steps of engines to a file each time that it is called. Logs with detail keep them in memory.

    Args:
        make_file: makes the file when there is something to move.
    """

    def __init__(self, make_file: Callable[[], StepFile]) -> None:
        self._make_file = make_file
        self._file: StepFile | None = None

    def __call__(self, logs: Iterable[EngineLog]) -> None:
        """Move steps of these logs."""
        for log in [log for engine in logs for log in (engine, *engine.micro_batches)]:
            if not log.detail and len(log.ends) >= WORTH_A_PART:
                if self._file is None:
                    self._file = self._make_file()
                log.store(self._file)
