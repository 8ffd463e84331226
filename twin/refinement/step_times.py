"""Logged engine steps beside predicted ones, for engines that write a log of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.vllm_step_log.step_log import StepLog
from latency_models.step_time import StepTime
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence as Running
from twin.refinement.posterior import Observations
from workloads.request import Request

Floats = NDArray[np.float64]

STEP = 0.25
"""Half the width of a central difference, in scores."""

COMMON = 0.1
"""Steps disturb their neighbours within this share of the log: its intervals."""


def batches(log: StepLog) -> list[Batch]:
    """The batch of each row. Decodes are taken to be equally long, prompts to be whole and equally long."""
    return [
        _batch(*row)
        for row in zip(
            log.decodes.tolist(), log.kv_tokens.tolist(), log.prompts.tolist(), log.prompt_tokens.tolist(), strict=True
        )
    ]


def _batch(decodes: int, kv: int, prompts: int, prompt_tokens: int) -> Batch:
    # Latency models count sequences and look at none.
    running = [Running(Request(0, 0.0, 1, 1), 0, one_shot=False)] * decodes
    tokens = max(kv - prompt_tokens, decodes) if decodes else 0
    longest = -(-tokens // decodes) if decodes else 0
    if not prompt_tokens:
        return DecodeBatch([], running, tokens, longest)
    prompts = max(prompts, 1)
    each = -(-prompt_tokens // prompts)
    sizes = [min(each, prompt_tokens - i * each) for i in range(prompts) if prompt_tokens > i * each]
    chunks = [Chunk(Running(Request(0, 0.0, size, 1), 0, False), size, 0, last=True) for size in sizes]
    return MixedBatch(chunks, running, tokens, longest)


def observe(log: StepLog) -> Observations:
    """The durations of logged steps."""
    count = len(log)
    places = np.arange(count, dtype=np.float64)
    reach = max(COMMON * count, 1.0)
    return Observations(
        np.log(log.seconds), np.zeros(count, dtype=np.int64), places, places + reach, np.full(count, 1e-4)
    )


def predicted(model: StepTime, steps: Sequence[Batch]) -> Floats:
    """Logarithms of the durations of steps, shape (n,)."""
    return np.log([model.seconds(batch) for batch in steps])


def derivatives(model: StepTime, steps: Sequence[Batch], names: Sequence[str], scores: Mapping[str, float]) -> Floats:
    """Derivatives of these by the scores, shape (n, number of names)."""
    columns = []
    for name in names:
        low, high = (model.vary({**scores, name: scores[name] + step}) for step in (-STEP, STEP))
        columns.append((predicted(high, steps) - predicted(low, steps)) / (2 * STEP))
    return np.array(columns).T
