"""Preemption policies: which running sequence loses its KV blocks when decodes find none free."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schedulers.registry import Registry
from schedulers.sequence import Sequence
from schedulers.waiting_queue import priority

PreemptionPolicy = Callable[[Iterable[Sequence]], list[Sequence]]
"""Orders running sequences, given in the order of their admission. The last of the result is preempted first."""


def newest(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the newest admission first."""
    return list(running)


def lowest_priority(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the largest `priority` value first, and the latest arrival among equals."""
    return sorted(running, key=priority)


PREEMPTION_POLICIES: Registry[PreemptionPolicy] = Registry(newest=newest, lowest_priority=lowest_priority)
