"""A simulated engine whose layers are divided into pipeline stages, with a batch in flight for each.

Batches pass the stages in the order in which they began. A stage computes one at a time, and the link behind it carries
the activations of one at a time, while the stage computes the next batch. So when a batch leaves is known when it
begins: it is the makespan recurrence of a permutation flow shop whose machines are stages and links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from latency_models.stages import Stages
from latency_models.step_time import StepTime
from schedulers.batches import Batch
from schedulers.parallel_cores import MICRO_BATCH_STEPS, PipelinedEngineCore, micro_batch_of
from schedulers.sequence import Sequence
from twin.environment import Environment
from twin.serving.engine.engine import Engine
from twin.serving.engine.engine_state import EngineOptions
from twin.serving.engine.fast_forward import AnswerEnds, StepRecords
from twin.serving.records.engine_log import EngineLog
from twin.serving.records.requests import RequestRecord


class MicroBatchRecords(StepRecords):
    """The records of a pipeline: what follows a token is the next step of the same micro-batch."""

    def __init__(self, log: EngineLog, deliver: float, expects_ends: bool) -> None:
        super().__init__(log, deliver, expects_ends)
        self._lost_of = [0] * len(log.micro_batches)  # steps of each micro-batch that earlier schedulers had

    def end_of_step(self, step: int) -> float:
        number = micro_batch_of(step)
        return self.log.micro_batches[number].end_of(self._lost_of[number] + step % MICRO_BATCH_STEPS - 1)

    def restart(self) -> None:
        super().restart()
        self._lost_of = [log.num_steps for log in self.log.micro_batches]


class PipelinedEngine(Engine):
    """An `Engine` of several `stages`, each with a micro-batch of the scheduler. Steps are visited one by one.

    `options`: with a depth of as many as there are stages, and without fast-forwarding.
    """

    def __init__(
        self,
        env: Environment,
        make_core: Callable[[], PipelinedEngineCore],
        step_time: StepTime,
        stages: Stages,
        options: EngineOptions,
    ) -> None:
        super().__init__(env, make_core, step_time, options)
        size = len(stages.layers)
        self.stage_busy = [0.0] * size
        self.log.micro_batches = [EngineLog(self.name, detail=False) for _ in range(size)]
        self.step_records = MicroBatchRecords(self.log, self.step_records.deliver, expects_ends=True)
        self.backlog = self.step_records.backlog
        self._shares = stages.shares
        self._link = stages.link
        self._stage_free = [0.0] * size
        self._link_free = [0.0] * size
        self._durations: deque[list[float]] = deque()  # of the batches in flight in each stage, seconds
        self._ends_of = [AnswerEnds() for _ in range(size)]

    @property
    def _pipeline(self) -> PipelinedEngineCore:
        core = self.core
        assert isinstance(core, PipelinedEngineCore)
        return core

    def _begin_steps(self, now: float) -> None:
        """See `Engine._begin_steps`: a batch begins while fewer are in flight than there are stages."""
        core, running = self._pipeline, self._running
        while len(running) < self._depth:
            batch = core.begin_step(now)
            if batch is None:
                return
            start, end = self._pass_stages(batch, now)
            running.append((batch, start, end))
            if self._watch is not None:
                self._watch(self, batch, start, end)
            if batch.chunks or batch.transferred:
                self.step_records.answer_ends = self._ends_of[micro_batch_of(batch.step_index)]
                self.step_records.begin(batch, now)

    def _pass_stages(self, batch: Batch, now: float) -> tuple[float, float]:
        """When a batch enters the first stage and leaves the last one, seconds."""
        durations = self._step_time.stage_seconds(batch, self._shares)
        self._durations.append(durations)
        free, last = self._stage_free, len(durations) - 1
        entered = end = max(now, free[0])
        message = self._message_seconds(batch.tokens) if last else 0.0
        for stage in range(last + 1):
            end = free[stage] = max(end, free[stage]) + durations[stage]
            if stage < last:
                end = self._link_free[stage] = max(end, self._link_free[stage]) + message
        return entered, end

    def _message_seconds(self, tokens: int) -> float:
        if self._link is not None:
            return self._link.seconds(tokens)
        seconds = self._step_time.send_seconds(tokens)
        assert seconds is not None, "the scenario states the link that step times do not know"
        return seconds

    def _end_step(self, batch: Batch, start: float, end: float) -> list[Sequence]:
        """See `Engine._end_step`. The gap to the step before is that of the same micro-batch."""
        number = micro_batch_of(batch.step_index)
        self.step_records.answer_ends = self._ends_of[number]
        self.log.micro_batches[number].step(end, batch.n_decodes - len(batch.transferred))
        for stage, seconds in enumerate(self._durations.popleft()):
            self.stage_busy[stage] += seconds
        return super()._end_step(batch, start, end)

    def _next_visit_tells(self) -> bool:
        if self._running:
            self.step_records.answer_ends = self._ends_of[micro_batch_of(self._running[0][0].step_index)]
        return super()._next_visit_tells()

    def fail(self) -> list[RequestRecord]:
        records = super().fail()
        size = len(self._ends_of)
        self._ends_of = [AnswerEnds() for _ in range(size)]
        self._durations.clear()
        self._stage_free = [self._env.now] * size
        self._link_free = [self._env.now] * size
        return records

    def _abort(self, sequence: Sequence, now: float) -> RequestRecord:
        """See `Engine._abort`. A token whose batch is in flight is lost."""
        in_flight = self._pipeline.awaits_token(sequence)
        self.core.abort(sequence.request.id, now)
        return self.step_records.abort(sequence, sequence.num_output_tokens - in_flight)
