"""Steps of a log that has whole batches, as `live.vllm.schedulers` writes it, for the regression on engine steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from latency_models.io.tables import Columns, read_columns
from latency_models.sources.engine_regression import Step
from workloads.errors import BadInput

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
