"""Records every step of vLLM's scheduler: its batch, and how long it took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live.vllm.settings import read_settings, vllm_config_of
from live.vllm.step_log import LoggedEngine, ScheduledStep, StepLogWriter, scheduled_step
from schedulers.engine_config import NULL_BLOCKS

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
