"""Fair sharing among tenants: virtual token counters (VTC).

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, with weights (their section 4.3).
A tenant's counter is the service it has had: w_p tokens of prompts at admission, and w_q for each output token, divided
by the tenant's weight. Of the tenants that wait, the one with the smallest counter is served next. A tenant that comes
back is lifted to the smallest counter of those that wait, so that it cannot save up service.

Prompt tokens that the prefix cache supplies are not charged, nor what is computed again after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from schedulers.scheduling_policies import SCHEDULING_POLICIES, KeyQueue, priority
from schedulers.sequence import Sequence

MAX_ACCOUNTS: Final = 10_000
"""Tenants from which on those that wait with nothing are forgotten."""


class Account:
    """The service of one tenant: its weight, what it is charged, its sequences in all queues.

    `lifted`: service that it is taken to have had besides.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.prompt_tokens = self.output_tokens = self.waiting = 0
        self.lifted = 0.0


class FairSharing:
    """The tenant with the least service goes first; within a tenant the smallest `priority`, then the oldest.

    Counts are whole tokens and counters are computed from them, so that they do not depend on how many steps are
    counted at a time.

    Args:
        prompt_weight, output_weight: service of a prompt token and of an output token (w_p and w_q).
        weights: of tenants by name; 1 for those that are not named.

    Raises:
        ValueError: weights that are not above 0 and finite.
    """

    follows_service = True

    def __init__(
        self, prompt_weight: float = 1.0, output_weight: float = 2.0, weights: Mapping[str, float] | None = None
    ) -> None:
        self.prompt_weight = prompt_weight
        self.output_weight = output_weight
        self.weights = dict(weights or {})
        for name, value in {"prompt_weight": prompt_weight, "output_weight": output_weight, **self.weights}.items():
            if not 0 < value < inf:
                raise ValueError(f"{name}: expected a weight above 0, found {value!r}")
        self._accounts: dict[str, Account] = {}
        self.last = ""  # the tenant whose sequence left the queues last

    def make_queue(self) -> FairQueue:
        return FairQueue(self)

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """See `SchedulingPolicy.on_scheduled`: a prompt is charged whole when its first chunk is scheduled."""
        if sequence.charged_output_tokens < 0:
            sequence.charged_output_tokens = 0
            charged = sequence.num_tokens_to_compute - sequence.num_cached_tokens
            self.account(sequence.request.tenant).prompt_tokens += charged

    def on_output(self, sequence: Sequence, num_output_tokens: int) -> None:
        new = num_output_tokens - max(sequence.charged_output_tokens, 0)
        if new > 0:
            sequence.charged_output_tokens = num_output_tokens
            self.account(sequence.request.tenant).output_tokens += new

    def account(self, tenant: str) -> Account:
        """The account of a tenant, which is new if the tenant is."""
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[tenant] = Account(self.weights.get(tenant, 1.0))
        return account

    def _forget_idle(self) -> None:
        """Drop the accounts of tenants that wait with nothing and have no more service than the others.

        A tenant that comes back is lifted at least as high. If all others owe service, they are forgiven it.
        """
        minimum = min((self.counter(name) for name, account in self._accounts.items() if account.waiting), default=inf)
        accounts = {
            name: account for name, account in self._accounts.items() if account.waiting or self.counter(name) > minimum
        }
        self._accounts = (
            accounts
            if len(accounts) < MAX_ACCOUNTS
            else {n: account for n, account in accounts.items() if account.waiting}
        )

    def counter(self, tenant: str) -> float:
        """The virtual token counter of a tenant."""
        account = self.account(tenant)
        served = self.prompt_weight * account.prompt_tokens + self.output_weight * account.output_tokens
        return account.lifted + served / account.weight

    def on_push(self, tenant: str) -> None:
        """Lift the counter of a tenant that waited with no sequence, and now does with one."""
        if self.account(tenant).waiting:
            return
        waiting = [name for name, account in self._accounts.items() if account.waiting]
        if waiting:
            minimum = min(self.counter(name) for name in waiting)
        elif self.last in self._accounts:
            minimum = self.counter(self.last)
        else:
            return
        lack = minimum - self.counter(tenant)
        if lack > 0:
            self.account(tenant).lifted += lack


class FairQueue:
    """A line for each tenant, and the counters of a `FairSharing` between them.

    Attributes:
        count: waiting sequences.
    """

    def __init__(self, policy: FairSharing) -> None:
        self.policy = policy
        self.count = 0
        self._lines: dict[str, KeyQueue] = {}
        self._head: Sequence | None = None  # what `peek` has returned last

    def push(self, sequence: Sequence) -> None:
        self.policy.on_push(sequence.request.tenant)
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """See `WaitingQueue.requeue`: a tenant whose sequence was preempted has not been away."""
        tenant = sequence.request.tenant
        self.count += 1
        self.policy.account(tenant).waiting += 1
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = KeyQueue(priority)
        line.push(sequence)

    def peek(self) -> Sequence | None:
        best: Sequence | None = None
        minimum = (inf, 0)
        for tenant, line in self._lines.items():
            head = line.peek()
            if head is not None:
                key = (self.policy.counter(tenant), head.seq_id)
                if key < minimum or best is None:
                    best, minimum = head, key
        self._head = best
        return best

    def peek_key(self) -> tuple[float, ...]:
        head = self._head
        assert head is not None, "the queue has a sequence, which was peeked at"
        return self.policy.counter(head.request.tenant), head.seq_id

    def pop(self) -> Sequence:
        head = self._head
        assert head is not None, "the queue has a sequence, which was peeked at"
        self._lines[head.request.tenant].pop()
        self._leave(head.request.tenant)
        return head

    def ahead_of(self, sequence: Sequence) -> int:
        """See `KeyQueue.ahead_of`, as tenants will be served if those that wait go on to: by their weights."""
        tenant, policy = sequence.request.tenant, self.policy
        line = self._lines.get(tenant)
        if line is None:
            return 0
        weights = sum(policy.account(name).weight for name in self._lines)
        return min(int(line.ahead_of(sequence) * weights / policy.account(tenant).weight), self.count)

    def remove(self, sequence: Sequence) -> None:
        self._lines[sequence.request.tenant].remove(sequence)
        self._leave(sequence.request.tenant)

    def _leave(self, tenant: str) -> None:
        self.count -= 1
        self.policy.account(tenant).waiting -= 1
        self.policy.last = tenant
        if not self._lines[tenant].count:
            del self._lines[tenant]

    def sequences(self) -> Iterable[Sequence]:
        """All waiting sequences, in no particular order."""
        return [sequence for line in self._lines.values() for sequence in line.sequences()]


SCHEDULING_POLICIES.register("fair")(FairSharing)
