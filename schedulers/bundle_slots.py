"""Slots of an attention/FFN-disaggregated bundle: x attention instances × m microbatches × B slots (AFD 3.1, 5.1).

A slot holds one request while it decodes. The slots of a microbatch step together. Finished requests leave at the end
of a step, and their slots are refilled from one global queue before the next step of that microbatch (continuous
batching). The scheduler does not know how long an answer will be: the backend says which requests have finished.

No step does work proportional to B. Each instance keeps one token load per microbatch. It grows by the number of the
instance's requests each step, and changes by one request's tokens at each admission and completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from workloads.registry import Registry

Advance: TypeAlias = Literal["lockstep", "independent"]
"""The way attention instances go on to the next microbatch: all when the slowest is done, or each on its own."""

FfnOrder: TypeAlias = Literal["in_order", "first_ready"]
"""The microbatch that the FFN takes next where instances advance on their own: the first that set out, or whichever is
complete."""

Waiting = tuple[int, int]
"""A queued request: (request id, prompt tokens)."""


class Microbatch:
    """The requests of one microbatch during a step. A backend reads it between `begin_step` and `end_step`.

    Attributes:
        index: position among the bundle's m microbatches.
        step: decode steps ended so far.
        loads: token load of each attention instance (T of eq. 1), length x: prompt and generated tokens of its
            requests. active: resident requests of each attention instance, length x. requests: their sum.
        admitted: ids of the requests that entered slots at the start of this step.
        resident: (instance, prompt tokens minus the step of admission) by request id, so that the second number plus
            `step` is the request's token load at any step.
        vacant: the instance of each free slot, in the order in which the slots became free.
    """

    __slots__ = ("active", "admitted", "index", "loads", "requests", "resident", "step", "vacant")

    def __init__(self, index: int, instances: int, slots: int) -> None:
        self.index = index
        self.step = 0
        self.loads = [0] * instances
        self.active = [0] * instances
        self.requests = 0
        self.admitted: list[int] = []
        # The free slots alternate between instances, so that the first requests spread evenly.
        self.vacant: deque[int] = deque(list(range(instances)) * slots)
        self.resident: dict[int, tuple[int, int]] = {}

    def admit(self, requests: Sequence[Waiting], instances: Sequence[int]) -> None:
        """Give each request a slot of its instance; the caller has taken the slots from `vacant`."""
        resident, loads, active, step = self.resident, self.loads, self.active, self.step
        for (request_id, prompt_tokens), instance in zip(requests, instances, strict=True):
            resident[request_id] = (instance, prompt_tokens - step)
            loads[instance] += prompt_tokens
            active[instance] += 1
        self.admitted += [request_id for request_id, _ in requests]
        self.requests = len(resident)


Refill = Callable[[Microbatch, deque[Waiting]], None]
"""A refill policy: it moves waiting requests to free slots until one of the two runs out."""


def refill_fcfs(microbatch: Microbatch, waiting: deque[Waiting]) -> None:
    """First come, first served over all instances: the oldest request takes the slot that has been free longest."""
    vacant = microbatch.vacant
    entering = range(min(len(vacant), len(waiting)))
    microbatch.admit([waiting.popleft() for _ in entering], [vacant.popleft() for _ in entering])


def refill_least_loaded(microbatch: Microbatch, waiting: deque[Waiting]) -> None:
    """Admit the oldest requests; the longest prompt of them goes to the least loaded instance with a free slot.

    Age alone decides which requests enter, so none starves. Load decides where they run. The assignment is greedy: each
    request counts before the next is placed.
    """
    entering = [waiting.popleft() for _ in range(min(len(microbatch.vacant), len(waiting)))]
    for request in sorted(entering, key=lambda request: -request[1]):
        instance = min(microbatch.vacant, key=microbatch.loads.__getitem__)
        microbatch.vacant.remove(instance)
        microbatch.admit([request], [instance])


REFILL_POLICIES: Registry[Refill] = Registry(fcfs=refill_fcfs, least_loaded=refill_least_loaded)


class BundleSlots:
    """The slots of one bundle, and the global queue of requests that wait for them.

    Call `submit`, then `begin_step` and `end_step` for each of the m microbatches in turn. `instances`: attention
    instances, x. `batch_size`: slots of one instance in one microbatch, B.
    """

    def __init__(self, instances: int, microbatches: int, batch_size: int, refill: Refill = refill_fcfs) -> None:
        self.instances = instances
        self.batch_size = batch_size
        self.waiting: deque[Waiting] = deque()
        self.microbatches = [Microbatch(index, instances, batch_size) for index in range(microbatches)]
        self._refill = refill

    def submit(self, requests: Iterable[Waiting]) -> None:
        """Queue requests, oldest first."""
        self.waiting.extend(requests)

    def withdraw(self, request_id: int) -> bool:
        """Take a request off the queue; returns whether it waited there."""
        for waiting in self.waiting:
            if waiting[0] == request_id:
                self.waiting.remove(waiting)
                return True
        return False

    def begin_step(self, index: int) -> Microbatch | None:
        """Fill the microbatch's free slots. None when it is empty and has no step to run."""
        microbatch = self.microbatches[index]
        microbatch.admitted = []
        if microbatch.vacant and self.waiting:
            self._refill(microbatch, self.waiting)
        return microbatch if microbatch.requests else None

    def end_step(self, microbatch: Microbatch, finished: Iterable[int]) -> None:
        """Count a token for every resident request, then free the slots of the `finished` ids; KeyError for others."""
        loads = microbatch.loads = [
            load + active for load, active in zip(microbatch.loads, microbatch.active, strict=True)
        ]
        step = microbatch.step = microbatch.step + 1
        resident, active, vacant = microbatch.resident, microbatch.active, microbatch.vacant
        for request_id in finished:
            instance, offset = resident.pop(request_id)
            loads[instance] -= offset + step
            active[instance] -= 1
            vacant.append(instance)
        microbatch.requests = len(resident)

    def check_integrity(self) -> None:
        """Compare the running sums with a recount over the resident requests."""
        for microbatch in self.microbatches:
            loads, active = [0] * self.instances, [0] * self.instances
            for instance, offset in microbatch.resident.values():
                loads[instance] += offset + microbatch.step
                active[instance] += 1
            free = [microbatch.vacant.count(instance) for instance in range(self.instances)]
            sums = (microbatch.loads, microbatch.active, microbatch.requests)
            expected = (loads, active, sum(active))
            if sums != expected:
                raise AssertionError(f"microbatch {microbatch.index}: running {sums}, counted {expected}")
            if any(occupied + empty != self.batch_size for occupied, empty in zip(active, free, strict=True)):
                raise AssertionError(
                    f"microbatch {microbatch.index}: active {active} and free {free} do not add to {self.batch_size}"
                )
