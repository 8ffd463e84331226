"""The speed of an engine, as routers over engines that differ weigh it.

It is the load that a full engine works off a second: requests of mean lengths, whose prompts and answers it computes
one after the other, prompts in chunks as large as may be, and answers with as many others as fit.
"""

from __future__ import annotations

from typing import Final

from latency_models.step_time import StepTime
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence
from twin.serving.pools import PlannedPool
from workloads.request import Request

_SEQUENCE: Final = Sequence(Request(0, 0.0, 1, 1), 0, False)


def engine_speed(pool: PlannedPool, step_time: StepTime, prompt: float, answer: float) -> float:
    """Tokens of load a second of one engine of a pool: as stated, else of requests of these mean lengths."""
    if pool.spec.speed is not None:
        return pool.spec.speed
    config, role = pool.scheduler.config, pool.spec.role
    seconds = 0.0
    if role != "decode":
        tokens = max(min(round(prompt), config.max_num_batched_tokens), 1)
        chunk = Chunk(_SEQUENCE, tokens, max(round((prompt - tokens) / 2), 0), True)
        seconds += prompt / tokens * _seconds(pool, step_time, MixedBatch([chunk]))
    if role != "prefill":
        context = prompt + answer / 2
        blocks = config.num_gpu_blocks * config.block_size
        decodes = max(min(config.max_num_seqs, int(blocks / max(context, 1.0))), 1)
        stages = pool.scheduler.stages
        if stages is not None:  # each of the batches in flight has its part of them
            decodes = max(decodes // len(stages.layers), 1)
        batch = DecodeBatch((), [_SEQUENCE] * decodes, round(decodes * context), round(context))
        seconds += max(answer - 1.0, 0.0) / decodes * _seconds(pool, step_time, batch)
    return pool.spec.engine.data_parallel_size * (prompt + answer) / seconds if seconds else 1.0


def _seconds(pool: PlannedPool, step_time: StepTime, batch: Batch) -> float:
    """Seconds from one such batch to the next: those of the slowest stage, if there are stages."""
    stages = pool.scheduler.stages
    return step_time.seconds(batch) if stages is None else max(step_time.stage_seconds(batch, stages.shares))
