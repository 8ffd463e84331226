"""What was timed live, kept in the run folder: every request and every step, so that a killed run loses no repeat.

probe/part-2/steps.parquet                 one row a step of probing: its round, what ran, its begin and its duration
probe/part-2/pace.parquet                  one row a reading of the machine's pace
live/load-0.7-repeat-2/requests.parquet    one row a request: its times, and when each of its tokens came
live/load-0.7-repeat-2/steps.parquet       one row a step: what ran, its begin and its end
live/load-0.7-repeat-2/pace.parquet        one row a reading of the machine's pace
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from latency_models.engine_steps import Step, describe
from latency_models.yardsticks import Reading
from reports.records.columns import read_columns, write_columns
from schedulers.batches import Batch, DecodeBatch, OneShotBatch
from twin.validation.plant import PlayedRun

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TimedBatch:
    """A step that ran.

    Attributes:
        kind: decode, mixed (prompts beside decodes), prefill (prompts alone) or one-shot. batch: in words.
        begin: seconds since the start. step: what its duration depends on, and the duration.
    """

    kind: str
    batch: str
    begin: float
    step: Step

    @classmethod
    def of(cls, batch: Batch, begin: float, end: float, page_tokens: int) -> Self:
        """Of a batch that ran from `begin` to `end`."""
        return cls(kind_of(batch), _in_words(batch), begin, describe(batch, page_tokens, end - begin))


@dataclass(frozen=True)
class Take:
    """One repeat of a load as it was played. Times are seconds since its start.

    Attributes:
        requests: one entry a request: arrival, noticed (the engine took it in), first_token, last_token, output_tokens.
        token_times: when each token of each request came.
        steps: in order. readings: of the machine's pace.
    """

    requests: Mapping[str, Floats]
    token_times: Sequence[Sequence[float]]
    steps: Sequence[TimedBatch]
    readings: Sequence[Reading]

    @classmethod
    def of(cls, played: PlayedRun, page_tokens: int) -> Self:
        """What is kept of a run."""
        steps = [TimedBatch.of(batch, begin, end, page_tokens) for batch, begin, end in played.spans]
        return cls(played.columns(), played.token_times, steps, played.readings)

    def columns(self) -> dict[str, Floats]:
        """`requests`, and `gaps`: the seconds between successive tokens of a request, of all of them together."""
        gaps = [np.diff(np.array(times)) for times in self.token_times if len(times) > 1]
        return {**self.requests, "gaps": np.concatenate(gaps) if gaps else np.empty(0)}

    @property
    def late(self) -> float:
        """Seconds by which requests reached the engine after their time, on average."""
        return float(np.mean(self.requests["noticed"] - self.requests["arrival"]))

    def write(self, folder: Path) -> None:
        """Put it down.

        Raises:
            OSError: the disk does not take it.
        """
        write_columns(folder / "requests.parquet", {**self.requests, "token_times": [*map(list, self.token_times)]})
        rows = [
            {"kind": each.kind, "batch": each.batch, "begin": each.begin, **asdict(each.step)} for each in self.steps
        ]
        _write_timed(folder, rows, self.readings)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` put down.

        Raises:
            OSError: it cannot be read.
        """
        requests = read_columns(folder / "requests.parquet")
        token_times = requests.pop("token_times")
        told = read_columns(folder / "steps.parquet")
        names = zip(told.pop("kind"), told.pop("batch"), told.pop("begin"), strict=True)
        return cls(
            {name: np.array(values, dtype=np.float64) for name, values in requests.items()},
            token_times,
            [TimedBatch(*named, step) for named, step in zip(names, _steps(told), strict=True)],
            _read_pace(folder),
        )


@dataclass(frozen=True)
class Probing:
    """A part of probing. Times are seconds since its start.

    Attributes:
        rounds: of each, its steps in order, with the times at which they began. readings: of the machine's pace.
    """

    rounds: Sequence[Sequence[tuple[float, Step]]]
    readings: Sequence[Reading]

    def write(self, folder: Path) -> None:
        """Put it down.

        Raises:
            OSError: the disk does not take it.
        """
        rows = [
            {"round": i, "begin": begin, **asdict(step)} for i, steps in enumerate(self.rounds) for begin, step in steps
        ]
        _write_timed(folder, rows, self.readings)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What `write` put down.

        Raises:
            OSError: it cannot be read.
        """
        told = read_columns(folder / "steps.parquet")
        numbers, begins = told.pop("round"), told.pop("begin")
        rounds: list[list[tuple[float, Step]]] = [[] for _ in range(max(numbers) + 1)]
        for number, begin, step in zip(numbers, begins, _steps(told), strict=True):
            rounds[number].append((begin, step))
        return cls(rounds, _read_pace(folder))


def _write_timed(folder: Path, steps: Sequence[Mapping[str, Any]], readings: Sequence[Reading]) -> None:
    """Steps, of which there is one at least, and readings of the pace, of which there may be none."""
    write_columns(folder / "steps.parquet", {name: [row[name] for row in steps] for name in steps[0]})
    pace = {name: [getattr(each, name) for each in readings] for name in Reading._fields}
    write_columns(folder / "pace.parquet", pace)


def _steps(columns: Mapping[str, Sequence[Any]]) -> list[Step]:
    return [Step(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _read_pace(folder: Path) -> list[Reading]:
    pace = read_columns(folder / "pace.parquet")
    return [Reading(*row) for row in zip(*(pace[name] for name in Reading._fields), strict=True)]


def kind_of(batch: Batch) -> str:
    """`TimedBatch.kind`."""
    if isinstance(batch, OneShotBatch):
        return "one-shot"
    if isinstance(batch, DecodeBatch):
        return "decode"
    return "mixed" if batch.n_decodes else "prefill"


def _in_words(batch: Batch) -> str:
    chunks = ", ".join(f"{chunk.context}+{chunk.tokens}" for chunk in batch.chunks)
    return f"{batch.n_decodes} decodes of {batch.decode_kv} tokens" + (f"; prompts {chunks}" if chunks else "")
