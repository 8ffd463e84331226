"""Admission control: which arriving requests an engine sheds, and when their clients may try again.

A shed request is refused before it waits. Three things are limited: the requests and prompt tokens that wait for their
first step, of all, of a class and of a tenant; and the predicted time to first token, relative to the request's goal.

The prediction is the place in the queue times the mean time between admissions while requests waited. It leaves out the
computation of the prompt itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from schedulers.batches import Chunk
from schedulers.sequence import Sequence

MEMORY: Final = 64
"""Admissions after which older ones count half."""

FIRST_RETRY_AFTER: Final = 1.0
"""Seconds to wait where no admission has been measured."""


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """The most requests, and prompt tokens, that may wait for their first step; 0 for any number.

    A request is shed when a limit is reached without it.
    """

    max_waiting: int = 0
    max_waiting_tokens: int = 0

    def __post_init__(self) -> None:
        for name, value in (("max_waiting", self.max_waiting), ("max_waiting_tokens", self.max_waiting_tokens)):
            if value < 0:
                raise ValueError(f"admission_control.{name}: expected 0 (no limit) or more, found {value}")


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Settings of admission control: limits on everything that waits, and on classes by name, if they are named.

    `max_waiting_per_tenant`: 0 for any number. `ttft_factor`: predicted times to first token up to this many times the
    goal are accepted.
    """

    of_all: WaitingLimits = WaitingLimits()
    of_class: tuple[tuple[str, WaitingLimits], ...] = ()
    max_waiting_per_tenant: int = 0
    ttft_factor: float = inf


class RequestShed(Exception):
    """A request was refused. `retry_after`: seconds after which what waits now will have been admitted.

    `reason`: `waiting`, `waiting_tokens`, `class_waiting`, `class_waiting_tokens`, `tenant_waiting` or `ttft`.
    """

    def __init__(self, reason: str, retry_after: float) -> None:
        super().__init__(f"shed ({reason}), expected a retry after {retry_after:.3g} s")
        self.reason = reason
        self.retry_after = retry_after


class Waiting:
    """Counts of what waits: requests and their prompt tokens."""

    def __init__(self) -> None:
        self.requests = self.tokens = 0

    def add(self, requests: int, tokens: int) -> None:
        """Count more, or fewer."""
        self.requests += requests
        self.tokens += tokens


class AdmissionControl:
    """Decides for one engine, from what waits there for its first step. Preempted sequences do not count as waiting.

    Attributes:
        limits: the settings. waiting: sequences that have not been scheduled. shed: requests shed so far.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.waiting: dict[Sequence, None] = {}
        self.shed = 0
        self._of_class = dict(limits.of_class)
        self._all = Waiting()
        self._classes: dict[str, Waiting] = {}
        self._tenants: dict[str, int] = {}
        self._seconds = 0.0  # in which requests waited from one step to another with admissions
        self._admissions = 0.0
        self._since = -1.0  # when the last of these began; negative while nothing waits

    def check(self, sequence: Sequence, ahead_of: Callable[[Sequence], int] | None, now: float) -> None:
        """Raise `RequestShed` if an arriving sequence is shed.

        `ahead_of`: the number of waiting sequences that a queue would serve before it; None: all that wait.
        """
        request, limits = sequence.request, self.limits
        reason, ahead = self._over("", self._all, limits.of_all), self._all.requests
        if not reason and request.service_class in self._of_class:
            waiting = self._classes.get(request.service_class)
            if waiting is not None:
                reason = self._over("class_", waiting, self._of_class[request.service_class])
                ahead = waiting.requests
        if not reason and limits.max_waiting_per_tenant:
            ahead = self._tenants.get(request.tenant, 0)
            if ahead >= limits.max_waiting_per_tenant:
                reason = "tenant_waiting"
        limit = 0.0
        if not reason and limits.ttft_factor * request.ttft_goal < inf and self._all.requests:
            ahead = self._all.requests if ahead_of is None else ahead_of(sequence)
            limit = limits.ttft_factor * request.ttft_goal
            if ahead * self.seconds_per_admission() > limit:
                reason = "ttft"
        if reason:
            self.shed += 1
            interval = self.seconds_per_admission()
            wait = max(ahead * interval - limit, interval) if interval else FIRST_RETRY_AFTER
            raise RequestShed(reason, wait)

    def _over(self, prefix: str, waiting: Waiting, limits: WaitingLimits) -> str:
        """The limit that is reached, or an empty text."""
        if 0 < limits.max_waiting <= waiting.requests:
            return f"{prefix}waiting"
        if 0 < limits.max_waiting_tokens <= waiting.tokens:
            return f"{prefix}waiting_tokens"
        return ""

    def submitted(self, sequence: Sequence) -> None:
        """Count a sequence that was accepted."""
        self.waiting[sequence] = None
        self._count(sequence, 1)

    def left(self, sequence: Sequence) -> None:
        """Count a sequence out that waits no longer: it was scheduled for the first time, or aborted."""
        if sequence in self.waiting:
            del self.waiting[sequence]
            self._count(sequence, -1)

    def _count(self, sequence: Sequence, by: int) -> None:
        request = sequence.request
        tokens = by * request.prompt_tokens
        self._all.add(by, tokens)
        of_class = self._classes.get(request.service_class)
        if of_class is None:
            of_class = self._classes[request.service_class] = Waiting()
        of_class.add(by, tokens)
        count = self._tenants.get(request.tenant, 0) + by
        if count:
            self._tenants[request.tenant] = count
        else:
            self._tenants.pop(request.tenant, None)

    def scheduled(self, chunks: list[Chunk], now: float) -> None:
        """Note the prompt chunks of a step that begins."""
        admitted = 0
        for chunk in chunks:
            if chunk.sequence in self.waiting:
                self.left(chunk.sequence)
                admitted += 1
        if admitted and self._since >= 0.0:
            if self._admissions >= MEMORY:
                self._seconds = self._seconds / 2
                self._admissions = self._admissions / 2
            self._seconds += now - self._since
            self._admissions += admitted
        if not self.waiting:
            self._since = -1.0
        elif admitted or self._since < 0.0:
            self._since = now

    def seconds_per_admission(self) -> float:
        """Mean seconds between admissions while requests waited, the latest ones counting most; 0 before the first."""
        return self._seconds / self._admissions if self._admissions else 0.0

    def check_integrity(self) -> None:
        """Check that counts are those of the waiting sequences."""
        tokens = sum(sequence.request.prompt_tokens for sequence in self.waiting)
        sums = sum(state.requests for state in self._classes.values()), sum(self._tenants.values())
        if (self._all.requests, self._all.tokens, *sums) != (len(self.waiting), tokens, *2 * [len(self.waiting)]):
            raise AssertionError(f"{len(self.waiting)} sequences of {tokens} tokens wait, counted {self._all.requests}")
