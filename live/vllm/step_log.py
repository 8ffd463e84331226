"""The steps of vLLM's scheduler, and their log that `latency_models.sources.vllm_step_log` reads: a CSV file."""

from __future__ import annotations

import csv
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from live.vllm.settings import read_settings, vllm_config_of
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.engine_config import NULL_BLOCKS
from schedulers.sequence import Sequence
from workloads.request import Request


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
    drafts = output.scheduled_spec_decode_tokens
    scheduled = output.num_scheduled_tokens
    attended = {
        request_id: request.num_computed_tokens
        for request_id, tokens in scheduled.items()
        if (tokens == 1 or tokens == 1 + len(drafts.get(request_id, ())))
        and (request := requests[request_id]).num_computed_tokens - tokens >= request.num_prompt_tokens
    }
    chunks = []
    if len(attended) < len(scheduled):
        for request_id, tokens in scheduled.items():
            if request_id not in attended:
                request = requests[request_id]
                computed = request.num_computed_tokens
                chunks.append(ScheduledChunk(request_id, tokens, computed - tokens, computed >= request.num_tokens))
    decode_tokens = sum([scheduled[request_id] for request_id in attended]) if drafts else len(attended)
    lengths = attended.values()
    return ScheduledStep(chunks, list(attended), decode_tokens, sum(lengths), max(lengths, default=0))


FLUSH_SECONDS = 1.0
"""Seconds after which written rows are flushed to the file, so that a killed server loses few."""

COLUMNS = (
    "experiment_id", "workload", "model", "tp", "step.clock", "step.id", "step.late", "step_time_us",
    "batch.num_prefill_reqs", "batch.prefill_tokens", "batch.prefill_kv_tokens", "batch.prefill_attention",
    "batch.num_decode_reqs", "batch.decode_tokens", "batch.decode_kv_tokens", "batch.longest_decode",
    "batch.num_outputs", "batch.chunks", "step.end_s", "kv.usage_gpu_ratio", "kv.blocks_total_gpu", "kv.block_size",
)  # fmt: skip
"""Columns of the file. `step.late` is 0: `step_time_us` is of the row's own batch, with async scheduling as well.
`batch.chunks`: context+tokens of each. `step.end_s`: by the log's clock, whose zero is arbitrary."""


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

    def write(self, step: ScheduledStep, begin: float, end: float, usage: float) -> None:
        """Write one step. `usage`: the share of KV blocks in use."""
        prompt_tokens = 0
        prompt_kv = 0
        attention = 0
        outputs = step.decode_tokens
        chunks = ""
        for _, tokens, context, last in step.chunks:
            chunks += f"{context}+{tokens} "
            prompt_tokens += tokens
            prompt_kv += context + tokens
            attention += tokens * (context + tokens)
            outputs += last
        self._steps += 1
        self._file.write(
            f"{self._begin},{self._steps},0,{(end - begin) * 1e6:.1f},{len(step.chunks)},{prompt_tokens},{prompt_kv},"
            f"{attention},{len(step.decodes)},{step.decode_tokens},{step.decode_kv},{step.longest_decode},{outputs},"
            f"{chunks},{end:.7f},{usage:.6f},{self._end}"
        )
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Let other processes read the rows that are written."""
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._file.close()


def _cell(text: str) -> str:
    """A cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\n') else text


UNKNOWN = Sequence(Request(-1, 0.0, 1, 1), -1, one_shot=False)
"""Stands for sequences that only vLLM knows."""


Span: TypeAlias = tuple[Batch, float, float]
"""A step: its batch, whose sequences are `UNKNOWN`, its begin and its end by the log's clock."""


class StepLogReader:
    """Reads the steps that another process appends to a log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[Span]:
        """The steps since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._position)
            text, line_end, _ = file.read().rpartition(b"\n")
        self._position += len(text + line_end)
        rows = csv.reader(text.decode().splitlines())
        return [_timed_batch(dict(zip(COLUMNS, row, strict=True))) for row in rows if row[0] != COLUMNS[0]]


def _timed_batch(row: Mapping[str, str]) -> Span:
    decodes = int(row["batch.num_decode_reqs"])
    completed = int(row["batch.num_outputs"]) - int(row["batch.decode_tokens"])
    sizes = [chunk.split("+") for chunk in row["batch.chunks"].split()]
    chunks = [Chunk(UNKNOWN, int(tokens), int(context), i < completed) for i, (context, tokens) in enumerate(sizes)]
    kind = MixedBatch if chunks else DecodeBatch
    kv_tokens, longest = int(row["batch.decode_kv_tokens"]), int(row["batch.longest_decode"])
    end = float(row["step.end_s"])
    return kind(chunks, [UNKNOWN] * decodes, kv_tokens, longest), end - float(row["step_time_us"]) * 1e-6, end


CLOCKS = {"wall": time.perf_counter, "direct": time.process_time}
"""Clocks by name; `direct` is the CPU time of the scheduler's process, where that runs the model, too."""


class RecordsSteps:
    """Mixin of vLLM's `Scheduler` and `AsyncScheduler`: writes a step log, if the settings name a file.

    A step lasts from the end of the step before, or from its scheduling if the engine was idle, until its output is
    processed: times add up with async scheduling, too. `watch` is called with each step then.
    """

    requests: dict[str, Any]
    kv_cache_manager: Any
    watch: Callable[[ScheduledStep], None] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = vllm_config_of(args, kwargs)
        settings = read_settings(config.additional_config)
        self._step_log: StepLogWriter | None = None
        self._now = CLOCKS[settings.clock]
        self._in_flight = deque[tuple[float, ScheduledStep | None, float]]()
        self._last_end: float | None = None  # None: the engine is idle
        if settings.step_log is not None:
            parallel = config.parallel_config
            cache = config.cache_config
            rank = parallel.data_parallel_rank
            file = Path(settings.step_log)
            path = file.with_stem(f"{file.stem}-{rank}") if rank else file
            experiment = settings.experiment or time.strftime("%Y-%m-%dT%H:%M:%S")
            engine = LoggedEngine(
                experiment, settings.workload, config.model_config.model, settings.clock, parallel.tensor_parallel_size,
                cache.num_gpu_blocks - NULL_BLOCKS, cache.block_size,
            )  # fmt: skip
            self._step_log = StepLogWriter(path, engine)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and note its batch."""
        begin = self._now()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            reads = self._step_log is not None or self.watch is not None
            step = scheduled_step(output, self.requests) if reads else None
            self._in_flight.append((begin, step, self.kv_cache_manager.usage))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process the output of a step, and record the step."""
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens:
            begin, step, usage = self._in_flight.popleft()
            if step is None:
                return result
            if self._step_log is not None:
                end = self._now()
                self._step_log.write(step, begin if self._last_end is None else self._last_end, end, usage)
                busy = bool(self._in_flight) or self.has_unfinished_requests()  # type: ignore[attr-defined]
                self._last_end = end if busy else None
                if not busy:
                    self._step_log.flush()
            if self.watch is not None:
                self.watch(step)
        return result

    def shutdown(self) -> None:
        """Close the log, and shut the scheduler down."""
        if self._step_log is not None:
            self._step_log.close()
        super().shutdown()  # type: ignore[misc]
