"""Metrics of an attention/FFN bundle whose roles have clocks of their own, live or simulated (AFD 5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from reports import metrics

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(slots=True)
class Transfers:
    """Messages from some roles to others: how many, the bytes of their tensors, and seconds on the link together."""

    messages: int = 0
    size: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count a message."""
        self.messages += 1
        self.size += size
        self.seconds += seconds


@dataclass(frozen=True)
class BundleTimes:
    """The times of one run, seconds since its start: by completed request in their order, and by step of a microbatch.

    `attention`, `ffn`: busy and elapsed seconds of each instance, (instances, 2), and messages between them.
    """

    ids: Integers
    tokens: Integers
    first_token: Floats
    finish: Floats
    step_ends: Floats
    step_tokens: Integers
    attention: Floats
    ffn: Floats
    attention_to_ffn: Transfers = field(default_factory=Transfers)
    ffn_to_attention: Transfers = field(default_factory=Transfers)


@dataclass(frozen=True, slots=True)
class BundleMetrics:
    """The metrics of one run. Times in seconds, throughput in tokens per second and instance.

    `throughput`: eq. 21; `_generated`: with the tokens of requests in flight; `_full`: of all steps, for slots full to
    the end. `tpot`: eq. 22; `tpot_gaps`: per gap; None without one. `idle_*`: eq. 23, over each instance's own time.
    """

    throughput: float
    throughput_generated: float
    throughput_full: float
    tpot: float
    tpot_gaps: float | None
    idle_attention: float
    idle_ffn: float
    total_time: float
    requests: int
    steps: int
    attention_to_ffn: Transfers
    ffn_to_attention: Transfers


def bundle_metrics(times: BundleTimes) -> BundleMetrics:
    instances = len(times.attention) + len(times.ffn)
    stable = metrics.stable_throughput(times.tokens, times.finish)
    generated = int(times.step_tokens[times.step_ends <= stable.time].sum())
    return BundleMetrics(
        throughput=stable.per_instance(instances),
        throughput_generated=generated / stable.time / instances,
        throughput_full=float(times.step_tokens.sum() / times.step_ends[-1]) / instances,
        tpot=metrics.tpot_paper(times.first_token, times.finish, times.tokens),
        tpot_gaps=metrics.tpot(times.first_token, times.finish, times.tokens),
        idle_attention=_idle(times.attention),
        idle_ffn=_idle(times.ffn),
        total_time=float(times.finish[-1]),
        requests=len(times.tokens),
        steps=len(times.step_ends),
        attention_to_ffn=times.attention_to_ffn,
        ffn_to_attention=times.ffn_to_attention,
    )


def _idle(busy_and_elapsed: Floats) -> float:
    busy, elapsed = busy_and_elapsed.sum(axis=0).tolist()
    return metrics.idle_ratio(busy, 1, elapsed)
