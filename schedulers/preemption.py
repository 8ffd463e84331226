"""Preemption policies: which running sequence loses its KV blocks when decodes find none free."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from schedulers.sequence import DECODING, Sequence
from schedulers.waiting_queue import priority
from workloads.registry import Registry

PreemptionPolicy = Callable[[Iterable[Sequence]], list[Sequence]]
"""Orders running sequences, given in the order of their admission. The last of the result is preempted first."""


def newest(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the newest admission first."""
    return list(running)


def lowest_priority(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the largest `priority` value first, and the latest arrival among equals."""
    return sorted(running, key=priority)


def fewest_outputs(running: Iterable[Sequence]) -> list[Sequence]:
    """Preempt the decode with the fewest output tokens first, and the longest prompt among equals.

    As SGLang retracts decodes (0.5.9 `ScheduleBatch.retract_decode`). Prompts under way go last.
    """
    return sorted(running, key=_outputs_and_prompt)


def _outputs_and_prompt(sequence: Sequence) -> tuple[bool, int, int]:
    """Sorts decodes by what they have computed: all of them got a token in each step since they joined."""
    if sequence.state != DECODING:
        return False, 0, 0
    return True, sequence.joined_step - sequence.num_output_tokens, sequence.request.prompt_tokens


PREEMPTION_POLICIES: Registry[PreemptionPolicy] = Registry(
    newest=newest, lowest_priority=lowest_priority, fewest_outputs=fewest_outputs
)
