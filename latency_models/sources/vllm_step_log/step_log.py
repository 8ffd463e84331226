"""Logged engine steps: the batch of each, and its duration.

An engine that schedules asynchronously logs one step late. Step i is scheduled while step i - 1 runs on the GPU, so
"start of the next step minus start of this one" is the duration of step i - 1. vLLM 0.15.1's log shows it: a step with
581 prompt tokens took no longer than its neighbours without any, and long intervals stand in rows whose requests have
just been prefilled. `StepLog.executed` moves each interval to the batch that ran in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from latency_models.fitting.estimator import Floats
from latency_models.io.files import Columns, read_columns
from latency_models.sources.engine_regression import Step
from latency_models.step_time import Origin, same_model
from workloads.errors import BadInput

_Cell = TypeVar("_Cell", str, int)


@dataclass(frozen=True, eq=False)
class StepLog:
    """Steps of one or more runs, in columns of shape (n,), in the order of each run.

    `run`: the source's name of an experiment. `step`: its number, rising; a log may contain a sample. `seconds`: start
    of the next step minus start of this one. `prompts`: requests with prompt tokens. `kv_tokens`: in the KV cache.
    `late`: each interval belongs to the batch of the step before.
    """

    run: NDArray[np.str_]
    workload: NDArray[np.str_]
    step: NDArray[np.int64]
    seconds: Floats
    prompts: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    decodes: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    origin: Origin = field(default_factory=Origin)
    late: bool = True

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, rows: NDArray[np.bool_]) -> StepLog:
        """The rows that a mask of shape (n,) selects."""
        columns = {name: column[rows] for name, column in vars(self).items() if name not in ("origin", "late")}
        return StepLog(**columns, origin=self.origin, late=self.late)

    def split(self, share: float = 0.5) -> tuple[StepLog, StepLog]:
        """Split the rows of each run: the first `share` of them, and the rest."""
        if not 0 < share < 1:
            raise BadInput("expected a share above 0 and below 1", field="share", value=share)
        early = np.zeros(len(self), dtype=np.bool_)
        for run in np.unique(self.run):
            rows = np.flatnonzero(self.run == run)
            early[rows[: round(share * len(rows))]] = True
        return self.where(early), self.where(~early)

    @property
    def decode_only(self) -> NDArray[np.bool_]:
        """Mask of the rows without prompt tokens."""
        without: NDArray[np.bool_] = self.prompt_tokens == 0
        return without

    def executed(self) -> StepLog:
        """The same intervals beside the batches that ran in them; this log itself if it is not late.

        Each interval belongs to the batch of the step before; where that was not logged, to this row's without prompts.
        A row with one prompt token per prompt says more: a request counts as prefilling until its first token is known,
        also one step late, so its prompt of unknown length ran in the step before.
        """
        if not self.late:
            return self
        follows = np.zeros(len(self), dtype=np.bool_)
        follows[1:] = (self.run[1:] == self.run[:-1]) & (self.step[1:] == self.step[:-1] + 1)
        before = np.maximum(np.arange(len(self)) - 1, 0)
        first_tokens = (self.prompt_tokens == self.prompts) & (self.prompts > 0)
        prompts = np.where(first_tokens, self.prompts, 0)
        executed = replace(
            self,
            decodes=np.where(follows, (self.decodes + prompts)[before], self.decodes),
            kv_tokens=np.where(follows, self.kv_tokens[before], self.kv_tokens),
            prompts=np.where(follows, (self.prompts - prompts)[before], prompts),
            prompt_tokens=np.where(follows, np.where(first_tokens, 0, self.prompt_tokens)[before], 0),
        )
        return executed.where(follows | ~first_tokens)


def read_step_log(path: Path, block_tokens: int = 16) -> StepLog:
    """Steps from a CSV file, gzipped or not, as the inference-sim project logs them from vLLM.

    A log of `live.vllm.schedulers` has more: step.late is 0; kv.block_size replaces `block_tokens`;
    batch.decode_kv_tokens and batch.prefill_kv_tokens count tokens, not blocks.
    """
    table = read_columns(path)
    model = _one(table, "model", table.text("model")) if "model" in table.names else ""
    ranks = _one(table, "tp", table.wholes("tp", low=1)) if "tp" in table.names else None
    usage = table.numbers("kv.usage_gpu_ratio")
    for row, share in enumerate(usage):
        if not 0 <= share <= 1:
            raise table.fault("expected a share from 0 to 1", row, "kv.usage_gpu_ratio")
    if "kv.block_size" in table.names:
        block_tokens = _one(table, "kv.block_size", table.wholes("kv.block_size", low=1))
    blocks = np.rint(np.array(usage) * np.array(table.wholes("kv.blocks_total_gpu", low=1)))
    kv_tokens = blocks.astype(np.int64) * block_tokens
    if "batch.decode_kv_tokens" in table.names:
        parts = [table.wholes(f"batch.{kind}_kv_tokens", low=0) for kind in ("decode", "prefill")]
        kv_tokens = np.sum(parts, axis=0)
    late = "step.late" not in table.names or bool(_one(table, "step.late", table.wholes("step.late", low=0)))
    steps = StepLog(
        run=np.array(table.text("experiment_id")),
        workload=np.array(table.text("workload")),
        step=np.array(table.wholes("step.id", low=0)),
        seconds=np.array(table.numbers("step_time_us", above=0.0)) * 1e-6,
        prompts=np.array(table.wholes("batch.num_prefill_reqs", low=0)),
        prompt_tokens=np.array(table.wholes("batch.prefill_tokens", low=0)),
        decodes=np.array(table.wholes("batch.num_decode_reqs", low=0)),
        kv_tokens=kv_tokens,
        origin=Origin(engine="vllm", model=model, tensor_parallel=ranks),
        late=late,
    )
    _check_order(steps, table)
    return steps


def _one(table: Columns, name: str, cells: Sequence[_Cell]) -> _Cell:
    for row, cell in enumerate(cells):
        if cell != cells[0] and not (isinstance(cell, str) and same_model(cell, str(cells[0]))):
            raise table.fault(f"expected steps of one engine, as the first ({cells[0]})", row, name)
    return cells[0]


def _check_order(steps: StepLog, table: Columns) -> None:
    latest: dict[str, int] = {}
    for row, (run, step) in enumerate(zip(steps.run.tolist(), steps.step.tolist(), strict=True)):
        if step <= latest.get(run, -1):
            raise table.fault(
                f"expected steps that rise within a run (the one before is {latest[run]})", row, "step.id"
            )
        latest[run] = step


FILE = "steps.csv"
"""The log in the folder of a run."""

UNPADDED = 0
"""Block size of the regression: vLLM's attention pads no decode to the longest."""

ROUND = 60
"""Steps of a stretch, of which every fifth is held out: neighbours share the machine's speed."""


@dataclass(frozen=True)
class LoggedSteps:
    """The steps of a log: successive ones of a run in each stretch, `ROUND` at most."""

    source: Path
    stretches: list[list[Step]]
    clock: Literal["wall", "direct"]
    model: str


def read_logged_steps(path: Path) -> LoggedSteps:
    """Read a log, or the one in a run's folder; `BadInput` without the columns that tell whole batches."""
    file = path / FILE if path.is_dir() else path
    table = read_columns(file)
    if "batch.decode_kv_tokens" not in table.names:
        expected = "expected a log of live.vllm.schedulers, whose columns tell whole batches"
        raise BadInput(expected, field="batch.decode_kv_tokens", file=file)
    clock = table.text("step.clock")[0]
    if clock not in ("wall", "direct"):
        raise BadInput("expected wall or direct", field="step.clock", value=clock, file=file)
    stretches: list[list[Step]] = []
    previous = ""
    for run, step in zip(table.text("experiment_id"), _steps(table), strict=True):
        if run != previous or len(stretches[-1]) == ROUND:
            stretches.append([])
        stretches[-1].append(step)
        previous = run
    return LoggedSteps(file, stretches, "wall" if clock == "wall" else "direct", table.text("model")[0])


def _steps(table: Columns) -> list[Step]:
    names = (
        "prefill_tokens", "decode_tokens", "num_decode_reqs", "decode_kv_tokens", "prefill_attention",
        "num_prefill_reqs", "num_outputs",
    )  # fmt: skip
    columns = [table.wholes(f"batch.{name}", low=0) for name in names]
    microseconds = table.numbers("step_time_us", above=0.0)
    return [
        Step(prompts + rows, kv_tokens, attention, decodes, chunks, outputs, us * 1e-6)
        for (prompts, rows, decodes, kv_tokens, attention, chunks, outputs), us in zip(
            zip(*columns, strict=True), microseconds, strict=True
        )
    ]
