"""The columns of a run's step table, `BundleRecords.steps` as an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.afd.bundle import BundleRecords

Floats = NDArray[np.float64]

MICROBATCH, READY, END, ATTENTION_WAIT, FFN_WAIT, LOAD_MAX, LOAD_TOTAL, REQUESTS, AT_WORK = range(9)


def step_table(records: BundleRecords) -> Floats:
    """The table, with one row for each microbatch step in order of their ends, shape (steps, 9)."""
    return np.array(records.steps, dtype=np.float64)
