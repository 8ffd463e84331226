"""vLLM's engine in this process, with its clock, and the interface by which profiles and replays time an engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from live.clock import DirectClock
from live.generation import Generation
from live.vllm.step_log import UNKNOWN, ScheduledStep
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence
from schedulers.step_policies import ChunkPolicy


class ProcessClock(DirectClock):
    """`DirectClock` over the CPU time of all threads, for an engine that computes on one but has others beside it."""

    def elapsed(self) -> float:
        return time.process_time()


Clock = Callable[[], float]
Watch = Callable[[Batch, float, float], None]


class StepResult(NamedTuple):
    """The generations that ended with a step."""

    finished: list[Generation]


class VllmEngine:
    """One `LLMEngine` of vLLM, whose scheduler is one of `live.vllm.schedulers`, as a `TimedEngine`.

    A step lasts from the end of the step before, or from the first request of an idle engine, to its output's end.
    """

    clock: Clock
    watch: Watch | None
    attention_block: int = 0

    def __init__(self, llm: Any, block_size: int) -> None:
        self.clock = time.perf_counter
        self.watch = None
        self.keep_times = False
        self.sequences: dict[int, Sequence] = {}
        self.block_size = block_size
        self._llm = llm
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._steps = deque[ScheduledStep]()
        self._scheduler.watch = self._steps.append
        self._count = 0
        self._begin: float | None = None  # of the next step; None: the engine is idle

    def share_weights(self, engine: VllmEngine) -> None:
        """Compute with another engine's weights: where these lie in memory, steps differ by up to 15 %."""
        self._model_runner.model = engine._model_runner.model

    @property
    def _model_runner(self) -> Any:
        return self._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def reset(self, chunk_policy: ChunkPolicy | None = None) -> None:
        """Forget the prefix cache, and take another chunk policy. The engine must have no requests."""
        assert not self.sequences, "an engine with requests cannot be reset"
        self.step()
        self._llm.reset_prefix_cache()
        self._scheduler.chunk_policy = chunk_policy
        self.watch = None
        self.keep_times = False
        self._begin = None

    def submit(self, generation: Generation) -> Sequence:
        """Add a request. Raises ValueError for one that vLLM refuses."""
        request = generation.request
        begin = self.clock()
        sequence = Sequence(request, self._count, one_shot=False)
        sequence.payload = generation
        self._count += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=max(request.max_tokens, 1), ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompt = {"prompt_token_ids": generation.prompt.tolist()}
        self._llm.add_request(str(request.id), prompt, params, priority=request.priority)
        self.sequences[request.id] = sequence
        if self._begin is None:
            self._begin = begin
        return sequence

    def step(self) -> StepResult | None:
        """Let vLLM run a step; None when there is nothing to run."""
        while self._llm.has_unfinished_requests() or self._llm.engine_core.engine_core.batch_queue:
            outputs = self._llm.step()
            if self._steps:
                return self._finish(self._steps.popleft(), outputs)
        if self._scheduler.has_finished_requests():  # the runner frees their states in an empty step
            self._llm.step()
        return None

    def abort(self, request_id: int) -> None:
        del self.sequences[request_id]
        self._llm.abort_request([str(request_id)])

    def _finish(self, step: ScheduledStep, outputs: list[Any]) -> StepResult:
        """Write the outputs of a step to their generations."""
        end = self.clock()
        finished = []
        batch = self._batch(step)
        for output in outputs:
            sequence = self.sequences.get(int(output.request_id))
            if sequence is None:
                continue
            generation = sequence.payload
            assert isinstance(generation, Generation)
            tokens = output.outputs[0].token_ids
            one_shot = not generation.request.max_tokens  # vLLM runs it for one token, which the request does not have
            if generation.first_token < 0 and tokens:
                generation.first_token = end
                sequence.num_cached_tokens = output.num_cached_tokens or 0
            if not one_shot:
                generation.output.extend(tokens)
            if self.keep_times and not one_shot:
                generation.times.extend([end] * len(tokens))
            if output.finished:
                generation.last_token = end
                generation.finish_reason = "length"
                finished.append(generation)
                del self.sequences[generation.request.id]
        assert self._begin is not None
        if self.watch is not None:
            self.watch(batch, self._begin, end)
        self._begin = end if self.sequences else None
        return StepResult(finished)

    def _batch(self, step: ScheduledStep) -> Batch:
        """The step as the twin's latency models see it."""
        decodes = [self._sequence(request_id) for request_id in step.decodes]
        chunks = [Chunk(self._sequence(row.request_id), row.tokens, row.context, row.last) for row in step.chunks]
        kind = MixedBatch if chunks else DecodeBatch
        return kind(chunks, decodes, step.decode_kv, step.longest_decode)

    def _sequence(self, request_id: str) -> Sequence:
        """The sequence of vLLM's internal request id, `number-suffix`; a placeholder for one that was aborted."""
        return self.sequences.get(int(request_id.partition("-")[0]), UNKNOWN)
