"""The work of one step of vLLM, and the log of steps that `latency_models.sources.vllm_step_log` reads: a CSV file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class ScheduledChunk(NamedTuple):
    """Tokens of one prompt in one step behind `context` cached ones; `last`: it also gives the request's next token."""

    request_id: str
    tokens: int
    context: int
    last: bool


class ScheduledStep(NamedTuple):
    """One step: chunks in vLLM's order, ids of decodes, their rows, and cached tokens of all and of the longest."""

    chunks: list[ScheduledChunk]
    decodes: list[str]
    decode_tokens: int
    decode_kv: int
    longest_decode: int


def scheduled_step(output: Any, requests: Mapping[str, Any]) -> ScheduledStep:
    """The step of a `SchedulerOutput`, right after vLLM's requests count it as computed."""
    chunks = []
    decodes = []
    decode_tokens = 0
    decode_kv = 0
    longest = 0
    drafts = output.scheduled_spec_decode_tokens
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = requests[request_id]
        attended = request.num_computed_tokens
        context = attended - tokens
        drafted = len(drafts[request_id]) if request_id in drafts else 0
        if tokens == 1 + drafted and context >= request.num_prompt_tokens:
            decodes.append(request_id)
            decode_tokens += tokens
            decode_kv += attended
            longest = max(longest, attended)
        else:
            chunks.append(ScheduledChunk(request_id, tokens, context, attended >= request.num_tokens))
    return ScheduledStep(chunks, decodes, decode_tokens, decode_kv, longest)


FLUSH_SECONDS = 1.0
"""Seconds after which written rows are flushed to the file, so that a killed server loses few."""

COLUMNS = (
    "experiment_id", "workload", "model", "tp", "step.clock", "step.id", "step.late", "step_time_us",
    "batch.num_prefill_reqs", "batch.prefill_tokens", "batch.prefill_kv_tokens", "batch.prefill_attention",
    "batch.num_decode_reqs", "batch.decode_tokens", "batch.decode_kv_tokens", "batch.longest_decode",
    "batch.num_outputs", "kv.usage_gpu_ratio", "kv.blocks_total_gpu", "kv.block_size",
)  # fmt: skip
"""Columns of the file. `step.late` is 0: `step_time_us` is of the row's own batch, with async scheduling as well."""


class LoggedEngine(NamedTuple):
    """The engine that a log is of; `clock`: `wall` or `direct`; blocks without the placeholder."""

    experiment: str
    workload: str
    model: str
    clock: str
    tensor_parallel: int
    num_gpu_blocks: int
    block_size: int


class StepLogWriter:
    """Appends steps to a file (or `OSError`), under a name of its own for each run; a new file begins with columns."""

    def __init__(self, path: Path, engine: LoggedEngine) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if not self._file.tell():
            self._file.write(",".join(COLUMNS) + "\n")
        names = (engine.experiment, engine.workload, engine.model, str(engine.tensor_parallel), engine.clock)
        self._begin = ",".join(map(_cell, names))
        self._end = f"{engine.num_gpu_blocks},{engine.block_size}\n"
        self._steps = 0
        self._flushed = time.monotonic()

    def write(self, step: ScheduledStep, seconds: float, usage: float) -> None:
        """Write one step. `usage`: the share of KV blocks in use."""
        prompt_tokens = 0
        prompt_kv = 0
        attention = 0
        outputs = step.decode_tokens
        for _, tokens, context, last in step.chunks:
            prompt_tokens += tokens
            prompt_kv += context + tokens
            attention += tokens * (context + tokens)
            outputs += last
        self._steps += 1
        self._file.write(
            f"{self._begin},{self._steps},0,{seconds * 1e6:.1f},{len(step.chunks)},{prompt_tokens},{prompt_kv},"
            f"{attention},{len(step.decodes)},{step.decode_tokens},{step.decode_kv},{step.longest_decode},{outputs},"
            f"{usage:.6f},{self._end}"
        )
        if (now := time.monotonic()) - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._file.close()


def _cell(text: str) -> str:
    """A cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\n') else text
