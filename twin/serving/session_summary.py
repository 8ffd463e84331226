"""The summary of a run's sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread
from scenarios.serving import MeasureSpec
from twin.serving.session_log import SessionLog


def summarise_sessions(log: SessionLog, measure: MeasureSpec) -> dict[str, Any]:
    """Metrics of the sessions whose last answer is in the measured window; times in seconds.

    `time` is from a session's first request to its last answer, and `waited` the part of it without the pauses.
    `resent_tokens` are prompt tokens that the session had sent before or been answered with, `resent_share` their share
    of its prompt tokens, and `resent_cached` the share of them that the prefix cache supplied.
    """
    start, end, waited = (_array(column, np.float64) for column in (log.start, log.end, log.waited))
    counted = end >= measure.after
    if measure.before is not None:
        counted &= end < measure.before
    sums = {
        name: int(_array(getattr(log, name), np.int64)[counted].sum())
        for name in ("turns", "requests", "prompt_tokens", "resent_tokens", "resent_cached_tokens")
    }
    count, resent = int(counted.sum()), sums["resent_tokens"]
    return {
        "count": count,
        "turns": sums["turns"] / count if count else None,
        "requests": sums["requests"] / count if count else None,
        "time": spread((end - start)[counted]),
        "waited": spread(waited[counted]),
        "resent_tokens": resent,
        "resent_share": resent / sums["prompt_tokens"] if sums["prompt_tokens"] else None,
        "resent_cached": sums["resent_cached_tokens"] / resent if resent else None,
    }


def _array(column: Any, kind: Any) -> NDArray[Any]:
    return np.frombuffer(column, dtype=kind) if len(column) else np.empty(0, dtype=kind)
