"""Who is admitted next. An order is a function from a sequence to a sort key; the smallest goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from schedulers.sequence import WAITING, Sequence

Order = Callable[[Sequence], tuple[int, int]]


def fcfs(sequence: Sequence) -> tuple[int, int]:
    """First come, first served. Whoever is preempted came before all who still wait, and so goes before them again."""
    return 0, sequence.number


def priority(sequence: Sequence) -> tuple[int, int]:
    """The smallest `priority` first, and among equals first come, first served."""
    return sequence.request.priority, sequence.number


def shortest_prompt(sequence: Sequence) -> tuple[int, int]:
    """The shortest prompt first, and among equals first come, first served."""
    return sequence.request.prompt_tokens, sequence.number


ORDERS: dict[str, Order] = {"fcfs": fcfs, "priority": priority, "shortest_prompt": shortest_prompt}


class WaitingQueue:
    """Waiting sequences in the order of a policy. Whoever stopped waiting elsewhere (an abort) is passed over.

    Attributes: `count` of them, and the `tokens` that they would prefill.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.tokens = 0
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self.count += 1
        self.tokens += sequence.goal
        order = self.order  # Python 3.11 is slow to call what is an instance's attribute
        heappush(self._heap, (order(sequence), sequence))

    def first(self) -> Sequence | None:
        """Who is next, without taking it."""
        heap = self._heap
        while heap and heap[0][1].state != WAITING:
            heappop(heap)
        return heap[0][1] if heap else None

    def key(self) -> tuple[int, int]:
        """The sort key of whoever `first` has just named."""
        return self._heap[0][0]

    def pop(self) -> Sequence:
        """Take whom `first` has just named."""
        sequence = heappop(self._heap)[1]
        self.count -= 1
        self.tokens -= sequence.goal
        return sequence

    def drop(self, sequence: Sequence) -> None:
        """Count a waiting sequence no longer; the caller changes its state, by which it is passed over."""
        self.count -= 1
        self.tokens -= sequence.goal
        if len(self._heap) > 2 * self.count + 64:  # aborted ones must not pile up
            self._heap = [entry for entry in self._heap if entry[1].state == WAITING and entry[1] is not sequence]
            heapify(self._heap)

    def sequences(self) -> Iterable[Sequence]:
        """Everybody who waits, in no order."""
        return [sequence for _, sequence in self._heap if sequence.state == WAITING]
