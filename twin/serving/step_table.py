"""The steps of an engine as columns of one length, those that were fast-forwarded among them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.serving.records import EngineLog

KINDS = np.array(["decode", "mixed", "one-shot"])
"""Names of `DECODE_STEP`, `MIXED_STEP` and `ONE_SHOT_STEP`."""


def step_table(log: EngineLog) -> dict[str, NDArray[Any]]:
    """One row for each step of an engine, in order. Needs a log with detail.

    A fast-forwarded step is a decode step without prompt tokens that starts at the end of the step before: nothing
    else is fast-forwarded.

    Returns:
        `start` and `end` (seconds), `kind` (of `KINDS`), `num_decodes` (sequences with a token in this step and in the
        step before it), `prefill_tokens` (prompt tokens computed), `fast_forwarded`.
    """
    ends = np.array(log.ends, dtype=np.float64)
    logged = np.array(log.index, dtype=np.int64)
    start = np.concatenate([[np.nan], ends[:-1]])[: len(ends)]
    start[logged] = log.starts
    prefill_tokens, kind = (np.zeros(len(ends), dtype=np.int64) for _ in range(2))
    prefill_tokens[logged] = log.prefill_tokens
    kind[logged] = log.kinds
    fast_forwarded = np.ones(len(ends), dtype=np.bool_)
    fast_forwarded[logged] = False
    decodes, repeats = np.array(log.decodes, dtype=np.int64), np.array(log.repeats, dtype=np.int64)
    return {
        "start": start,
        "end": ends,
        "kind": KINDS[kind],
        "num_decodes": np.repeat(decodes, repeats),
        "prefill_tokens": prefill_tokens,
        "fast_forwarded": fast_forwarded,
    }
