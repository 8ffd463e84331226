"""Slots of an attention/FFN-disaggregated bundle: x attention instances × m microbatches × B slots (AFD 3.1, 5.1).

A slot holds one request for as long as it decodes. The slots of one microbatch step together, so whoever finishes
leaves at the end of a step, and the vacated slots are refilled from one global queue before the next step of that
microbatch begins (continuous batching). The scheduler is never told how long an answer will be: the plant says who
finished.

No step does work proportional to B. Each instance keeps one running token load per microbatch: it grows by the number
of its resident requests each step, and changes by one request's tokens at each admission and completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

Waiting = tuple[int, int]
"""One queued request: (request id, prompt tokens)."""


class Microbatch:
    """What one microbatch holds, as the attention instances see it in the step at hand.

    The plant reads it between `BundleSlots.begin_step` and `BundleSlots.end_step` and writes nothing.

    Attributes:
        index: which of the bundle's m microbatches this is.
        step: decode steps ended so far.
        loads: token load of each attention instance, T of eq. 1: prompt plus generated tokens of its residents,
        length x. active: resident requests of each attention instance, length x. requests: resident requests over all
        instances. admitted: ids that entered their slots at the start of this step. vacant: the instance that owns
        each free slot, in the order in which the slots became free.
    """

    __slots__ = ("active", "admitted", "index", "loads", "requests", "resident", "step", "vacant")

    def __init__(self, index: int, instances: int, slots: int) -> None:
        self.index = index
        self.step = 0
        self.loads = [0] * instances
        self.active = [0] * instances
        self.requests = 0
        self.admitted: list[int] = []
        # Slot by slot, instance after instance, so that the first requests spread evenly.
        self.vacant: deque[int] = deque(list(range(instances)) * slots)
        # id -> (instance, prompt tokens minus the step of admission), so that `offset + step` is the token load at
        # any step.
        self.resident: dict[int, tuple[int, int]] = {}

    def seat(self, requests: Sequence[Waiting], instances: Sequence[int]) -> None:
        """Seat each request on the instance beside it; the caller has taken the slots from `vacant`."""
        resident, loads, active, step = self.resident, self.loads, self.active, self.step
        for (request_id, prompt_tokens), instance in zip(requests, instances, strict=True):
            resident[request_id] = (instance, prompt_tokens - step)
            loads[instance] += prompt_tokens
            active[instance] += 1
        self.admitted += [request_id for request_id, _ in requests]
        self.requests = len(resident)


Refill = Callable[[Microbatch, deque[Waiting]], None]
"""A refill policy seats waiting requests on vacant slots until one of the two runs out."""


def refill_fcfs(microbatch: Microbatch, waiting: deque[Waiting]) -> None:
    """Global first come, first served: the oldest request takes the slot that has been free longest."""
    vacant = microbatch.vacant
    entering = range(min(len(vacant), len(waiting)))
    microbatch.seat([waiting.popleft() for _ in entering], [vacant.popleft() for _ in entering])


def refill_least_loaded(microbatch: Microbatch, waiting: deque[Waiting]) -> None:
    """Still the oldest requests first, but the longest prompt among them goes to the lightest instance with a free
    slot.

    Who enters is decided by age, so nobody starves; only where they sit is decided by load. Greedy: each seat counts
    before the next is given.
    """
    entering = [waiting.popleft() for _ in range(min(len(microbatch.vacant), len(waiting)))]
    for request in sorted(entering, key=lambda waiting_request: -waiting_request[1]):
        instance = min(microbatch.vacant, key=microbatch.loads.__getitem__)
        microbatch.vacant.remove(instance)
        microbatch.seat([request], [instance])


REFILL_POLICIES: dict[str, Refill] = {"fcfs": refill_fcfs, "least_loaded": refill_least_loaded}


class BundleSlots:
    """The slots of one bundle and the global queue in front of them.

    Drive it with `submit`, then for each microbatch in turn `begin_step` and `end_step`.

    Args:
        instances: attention instances, x.
        microbatches: microbatches in flight, m.
        batch_size: slots of one instance in one microbatch, B.
        refill: how vacated slots are filled.
    """

    def __init__(self, instances: int, microbatches: int, batch_size: int, refill: Refill = refill_fcfs) -> None:
        self.instances, self.batch_size = instances, batch_size
        self.waiting: deque[Waiting] = deque()
        self.microbatches = [Microbatch(index, instances, batch_size) for index in range(microbatches)]
        self._refill = refill

    def submit(self, requests: Iterable[Waiting]) -> None:
        """Queue requests, oldest first."""
        self.waiting.extend(requests)

    def begin_step(self, index: int) -> Microbatch | None:
        """Fill the microbatch's vacant slots; None when it holds nobody and has no step to run."""
        microbatch = self.microbatches[index]
        microbatch.admitted = []
        if microbatch.vacant and self.waiting:
            self._refill(microbatch, self.waiting)
        return microbatch if microbatch.requests else None

    def end_step(self, microbatch: Microbatch, finished: Iterable[int]) -> None:
        """Every resident request gained a token; `finished` ids leave their slots.

        Raises:
            KeyError: an id that is not resident in this microbatch.
        """
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
        """Recount everything from the residents.

        Raises:
            AssertionError: with the numbers, when a running sum has drifted from what it stands for.
        """
        for microbatch in self.microbatches:
            loads, active = [0] * self.instances, [0] * self.instances
            for instance, offset in microbatch.resident.values():
                loads[instance] += offset + microbatch.step
                active[instance] += 1
            free = [microbatch.vacant.count(instance) for instance in range(self.instances)]
            seen = (microbatch.loads, microbatch.active, microbatch.requests)
            counted = (loads, active, sum(active))
            if seen != counted:
                raise AssertionError(f"microbatch {microbatch.index}: running {seen}, counted {counted}")
            if any(held + empty != self.batch_size for held, empty in zip(active, free, strict=True)):
                raise AssertionError(
                    f"microbatch {microbatch.index}: active {active} and free {free} do not add to {self.batch_size}"
                )
