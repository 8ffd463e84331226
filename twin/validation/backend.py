"""Live backends, which profile a model on a machine and replay a workload, and recordings of what they measured.

`live.validation` implements the protocols: `LiveBackend`, `PoolsBackend` and `FleetBackend` for engines, `LiveBundle`
for bundles. Recordings are kept in the run folder, so that a killed validation repeats nothing;
docs/reference/run-folder.md lists the files and their columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.engine_regression import Step, describe
from latency_models.timed_runs import ProfiledRounds, ReplayedRun
from reports.metrics import BundleTimes, Transfers
from reports.run_directory import RunDirectory, read_columns, write_columns
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec
from schedulers.batches import Batch, DecodeBatch, OneShotBatch
from schedulers.replica_set import ScalingLog
from schedulers.speculation import AnswerDrafts, SpeculationStats
from twin.afd.role_bundle import FEATURES
from twin.afd.role_times import TimedStretch
from workloads.errors import BadInput
from workloads.request import Request
from workloads.sessions import Session

Integers = NDArray[np.int64]

Requests: TypeAlias = Sequence[tuple[Request, int]] | Sequence[Session]
"""Requests, each paired with its number of output tokens, or sessions, whose rounds have not begun."""


class Backend(Protocol):
    """A model on a machine."""

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        """Time the steps of requests of random lengths."""

    def measure_drafts(
        self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]
    ) -> Sequence[AnswerDrafts]:
        """Answer requests, and find the outcomes of drafts at every position of their answers. Nothing is timed."""

    def warm_up(self, scheduler: SchedulerPlan, requests: Requests) -> bool:
        """Do the work that only the first replay of these requests would do. False if there is none."""

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
        """Send each request to an empty engine at its arrival time, and turns of sessions after their answers."""

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""

    def close(self) -> None:
        """End the processes that it has started, if any."""


class AbsentBackend:
    """A backend whose device is not on this machine, for a validation measured on another: methods raise `reason`."""

    def __init__(self, reason: BadInput) -> None:
        self._reason = reason

    def close(self) -> None:
        """Do nothing: there are no processes."""

    def __getattr__(self, name: str) -> NoReturn:
        raise self._reason


def description(backend: Backend, run: RunDirectory) -> dict[str, Any]:
    """The description of the backend that a run was measured on; the first call records it in the run folder."""
    file = run.path / "backend.json"
    if not file.exists():
        run.write_json(file.name, backend.describe())
    recorded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return recorded


class BundleBackend(Protocol):
    """Bundles of one model on a machine."""

    @property
    def layers(self) -> int:
        """Layers of the model."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's row, on its way to the FFN and back."""

    def run_in_turns(
        self, instances: int, loads: Sequence[tuple[Integers, Integers, int]]
    ) -> Sequence[tuple[BundleTimes, Mapping[int, Sequence[float]]]]:
        """Run bundles with `instances` attention instances each in turns of milliseconds, until the first is over.

        Returns the times of requests, steps and roles, and by rank the stretches of each role's work.
        """

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""


Floats = NDArray[np.float64]

SPECULATION_FILE = "speculation.parquet"
SCALING_FILE = "scaling.json"
BUNDLE_REQUESTS = ("ids", "tokens", "first_token", "finish")


@dataclass(frozen=True)
class TimedBatch:
    """A measured step: its kind, its batch in words, its begin (seconds since the start), and its features."""

    kind: str
    batch: str
    begin: float
    step: Step

    @classmethod
    def of(cls, batch: Batch, begin: float, end: float, block_size: int) -> Self:
        """Describe a batch that ran from `begin` to `end`."""
        return cls(kind_of(batch), _in_words(batch), begin, describe(batch, block_size, end - begin))


@dataclass(frozen=True)
class Recording:
    """One measured repeat of a load, seconds since its start; fields as of `ReplayedRun`."""

    requests: Mapping[str, Floats]
    token_times: Sequence[Sequence[float]]
    steps: Sequence[TimedBatch]
    speculation: SpeculationStats | None = None
    scaling: ScalingLog | None = None

    @classmethod
    def of(cls, run: ReplayedRun, block_size: int) -> Self:
        """Keep the parts of a replayed run that a validation needs."""
        steps = [TimedBatch.of(batch, begin, end, block_size) for batch, begin, end in run.spans]
        return cls(run.requests, run.token_times, steps, run.speculation, run.scaling)

    def columns(self) -> dict[str, Floats]:
        """`requests`, and `gaps`: seconds between successive outputs (what one step emits is one) of all requests."""
        gaps = [np.diff(np.unique(times)) for times in self.token_times if len(times) > 1]
        return {**self.requests, "gaps": np.concatenate(gaps) if gaps else np.empty(0)}

    @property
    def late(self) -> float:
        """Mean seconds from a request's arrival until the engine takes it in."""
        return float(np.mean(self.requests["noticed"] - self.requests["arrival"]))

    def write(self, folder: Path) -> None:
        write_columns(folder / "requests.parquet", {**self.requests, "token_times": [*map(list, self.token_times)]})
        rows = [{"kind": row.kind, "batch": row.batch, "begin": row.begin, **asdict(row.step)} for row in self.steps]
        _write_steps(folder, rows)
        if self.speculation is not None:
            write_columns(folder / SPECULATION_FILE, {k: [v] for k, v in self.speculation.counters().items()})
        if self.scaling is not None:
            (folder / SCALING_FILE).write_text(json.dumps(asdict(self.scaling)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        requests = read_columns(folder / "requests.parquet")
        token_times = requests.pop("token_times")
        columns = read_columns(folder / "steps.parquet")
        batches = zip(columns.pop("kind"), columns.pop("batch"), columns.pop("begin"), strict=True)
        return cls(
            {name: np.array(values, dtype=np.float64) for name, values in requests.items()},
            token_times,
            [TimedBatch(*batch, step) for batch, step in zip(batches, _steps(columns), strict=True)],
            _read_speculation(folder),
            _read_scaling(folder),
        )


def write_rounds(folder: Path, rounds: Sequence[Sequence[tuple[float, Step]]]) -> None:
    rows = [{"round": i, "begin": begin, **asdict(step)} for i, steps in enumerate(rounds) for begin, step in steps]
    _write_steps(folder, rows)


def read_rounds(folder: Path, frontend: Mapping[str, float] = MappingProxyType({})) -> ProfiledRounds:
    """Read the rounds that `write_rounds` wrote."""
    columns = read_columns(folder / "steps.parquet")
    numbers, begins = columns.pop("round"), columns.pop("begin")
    rounds: list[list[tuple[float, Step]]] = [[] for _ in range(max(numbers) + 1)]
    for number, begin, step in zip(numbers, begins, _steps(columns), strict=True):
        rounds[number].append((begin, step))
    return ProfiledRounds(rounds, frontend)


def _write_steps(folder: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    write_columns(folder / "steps.parquet", {name: [row[name] for row in steps] for name in steps[0]})


def _steps(columns: Mapping[str, Sequence[Any]]) -> list[Step]:
    return [Step(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _read_speculation(folder: Path) -> SpeculationStats | None:
    if not (folder / SPECULATION_FILE).exists():
        return None
    counters = read_columns(folder / SPECULATION_FILE)
    stats = SpeculationStats(0)
    for name, (value,) in counters.items():
        setattr(stats, name, value)
    return stats


def _read_scaling(folder: Path) -> ScalingLog | None:
    file = folder / SCALING_FILE
    return ScalingLog(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def kind_of(batch: Batch) -> str:
    """The kind of a batch, as in `TimedBatch.kind`."""
    if isinstance(batch, OneShotBatch):
        return "one-shot"
    if isinstance(batch, DecodeBatch):
        return "decode"
    return "mixed" if batch.n_decodes else "prefill"


def _in_words(batch: Batch) -> str:
    chunks = ", ".join(f"{chunk.context}+{chunk.tokens}" for chunk in batch.chunks)
    drafts = f" with {sum(batch.draft_tokens)} draft tokens" if any(batch.draft_tokens) else ""
    return f"{batch.n_decodes} decodes of {batch.decode_kv} tokens{drafts}" + (f"; prompts {chunks}" if chunks else "")


def write_times(folder: Path, times: BundleTimes) -> None:
    write_columns(folder / "requests.parquet", {name: getattr(times, name) for name in BUNDLE_REQUESTS})
    write_columns(folder / "steps.parquet", {"end": times.step_ends, "tokens": times.step_tokens})
    instances = np.concatenate([times.attention, times.ffn])
    names = ["attention"] * len(times.attention) + ["ffn"] * len(times.ffn)
    write_columns(folder / "roles.parquet", {"role": names, "busy": instances[:, 0], "elapsed": instances[:, 1]})
    directions = [asdict(times.attention_to_ffn), asdict(times.ffn_to_attention)]
    write_columns(folder / "transfers.parquet", {name: [row[name] for row in directions] for name in directions[0]})


def read_times(folder: Path) -> BundleTimes:
    requests = {name: np.array(values) for name, values in read_columns(folder / "requests.parquet").items()}
    steps, roles = read_columns(folder / "steps.parquet"), read_columns(folder / "roles.parquet")
    columns = read_columns(folder / "transfers.parquet")
    busy_and_elapsed = np.array([roles["busy"], roles["elapsed"]]).T
    is_attention = np.array(roles["role"]) == "attention"
    to_ffn, to_attention = (Transfers(*row) for row in zip(*columns.values(), strict=True))
    return BundleTimes(
        **requests,
        step_ends=np.array(steps["end"]),
        step_tokens=np.array(steps["tokens"]),
        attention=busy_and_elapsed[is_attention],
        ffn=busy_and_elapsed[~is_attention],
        attention_to_ffn=to_ffn,
        ffn_to_attention=to_attention,
    )


def write_stretches(folder: Path, stretches: Sequence[TimedStretch]) -> None:
    rank, kind, features, seconds = zip(*stretches, strict=True)
    columns = {"rank": rank, "kind": kind, "features": [list(row) for row in features], "seconds": seconds}
    write_columns(folder / "stretches.parquet", {name: list(column) for name, column in columns.items()})


def read_stretches(folder: Path) -> list[TimedStretch]:
    file = folder / "stretches.parquet"
    columns = read_columns(file)
    rows = zip(columns["rank"], columns["kind"], columns["features"], columns["seconds"], strict=True)
    stretches = [TimedStretch(rank, kind, tuple(features), seconds) for rank, kind, features, seconds in rows]
    for stretch in stretches:
        if len(stretch.features) != len(FEATURES.get(stretch.kind, ())):
            expected = "expected the features of this version; --fresh profiles anew"
            raise BadInput(expected, field=stretch.kind, value=list(stretch.features), file=file)
    return stretches
