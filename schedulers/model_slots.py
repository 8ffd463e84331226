"""Slots for models, where an engine serves more of them than it has room for.

An engine's *slots* hold LoRA adapters beside a base model, or the whole weights of models that are swapped. A request
whose model is in no slot has it loaded when it is admitted, in place of the model that was used least recently: the
step that first computes with it waits for the load. A model with running sequences is never replaced.

Adapters share a step: up to `slots` of them are computed together (vLLM's `max_loras`). Swapped weights do not: with
`exclusive`, sequences of one model run at a time, and those of the next are admitted when they have ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from schedulers.sequence import Sequence

ADMITS: Final = 0
"""A sequence's model is in a slot, or there is a slot for it."""

OTHERS_MAY: Final = 1
"""A sequence waits for a slot; sequences of other models behind it need not."""

NONE_MAY: Final = 2
"""A sequence waits for a slot, and all behind it wait for their turn."""


@dataclass(frozen=True, slots=True)
class SlotsConfig:
    """Settings of `ModelSlots`.

    Attributes:
        slots, host: models that the device and host memory hold at once. Others come from disk; host None: none does.
        base: the model that every slot's adapter belongs to, which needs no slot; "" without.
        exclusive: sequences of one model run at a time. turn: while other models wait, those of the running model are
            admitted for this many seconds longer.
        keep_alive: seconds after its last request for which a model stays in its slot; None: until another needs it.
    """

    slots: int
    host: int | None = None
    base: str = ""
    exclusive: bool = False
    turn: float = 0.0
    keep_alive: float | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"expected at least 1 slot, found {self.slots}")
        if self.host is not None and self.host < self.slots:
            raise ValueError(f"expected host memory for at least as many as slots ({self.slots}), found {self.host}")


class ModelLoad:
    """A model that a step loads into a slot before it computes.

    Attributes:
        cold: it comes from disk, not from host memory. replaces: the model whose slot it takes; "" for a free one.
    """

    def __init__(self, model: str, cold: bool, replaces: str = "") -> None:
        self.model = model
        self.cold = cold
        self.replaces = replaces

    def __repr__(self) -> str:
        return f"ModelLoad({self.model}{', cold' if self.cold else ''})"


class ModelSlots:
    """The slots of one engine.

    Attributes:
        running: admitted and unfinished sequences of each model that has any; the base model is not among them.
        resident, in_host: models in slots, and in host memory if it is limited, the one used least recently first.
        loads, cold_loads, evictions: counters of loads, of those from disk, and of models that left their slots.
    """

    def __init__(self, config: SlotsConfig) -> None:
        self.config = config
        self.running: dict[str, int] = {}
        self.resident: dict[str, float] = {}
        self.in_host: dict[str, None] = {}
        self.loads = self.cold_loads = self.evictions = 0
        self._now = 0.0
        self._waits_since: float | None = None  # of the first sequence that an exclusive model kept waiting
        self._left: list[str] = []  # models that the latest step left without sequences
        self._pending: list[ModelLoad] = []

    def begin_step(self, now: float) -> None:
        """Note the time, before sequences are admitted to a step."""
        self._now = now
        for model in self._left:
            if model in self.resident and model not in self.running:
                self.resident[model] = now
        self._left.clear()
        if not self.running:
            self._waits_since = None
        keep_alive = self.config.keep_alive
        if keep_alive is not None:
            for model in [name for name, since in self.resident.items() if name not in self.running]:
                if now - self.resident[model] > keep_alive:
                    self._evict(model)

    def admission(self, sequence: Sequence) -> int:
        """Tell whether a waiting sequence may be admitted now: ADMITS, OTHERS_MAY or NONE_MAY."""
        model, running, config = sequence.request.model, self.running, self.config
        if model == config.base:
            return ADMITS
        if model in running:
            if self._waits_since is None or self._now < self._waits_since + config.turn:
                return ADMITS
            return NONE_MAY
        if not config.exclusive:
            return ADMITS if len(running) < config.slots else OTHERS_MAY
        if not running:
            return ADMITS
        if self._waits_since is None:
            self._waits_since = self._now
        return OTHERS_MAY if self._now < self._waits_since + config.turn else NONE_MAY

    def enter(self, sequence: Sequence) -> None:
        """Note that a sequence has been admitted; its model is loaded by the next step unless it is in a slot."""
        model = sequence.request.model
        if model == self.config.base:
            return
        self.running[model] = self.running.get(model, 0) + 1
        if model in self.resident:
            del self.resident[model]
        else:
            replaces = ""
            if len(self.resident) == self.config.slots:
                replaces = next(name for name in self.resident if name not in self.running)
                self._evict(replaces)
            self._load(model, replaces)
        self.resident[model] = self._now
        if self.config.host is not None:
            self._keep_in_host(model, self.config.host)

    def leave(self, sequence: Sequence) -> None:
        """Note that an admitted sequence has ended or was preempted. Its model stays in its slot."""
        model = sequence.request.model
        if model == self.config.base:
            return
        count = self.running[model] - 1
        if count:
            self.running[model] = count
        else:
            del self.running[model]
            self._left.append(model)

    def take_loads(self) -> list[ModelLoad]:
        """The loads of the step that has been scheduled, in the order in which sequences needed them."""
        loads = self._pending
        if loads:
            self._pending = []
        return loads

    def check_integrity(self, running: dict[Sequence, None]) -> None:
        """Check that every running sequence is counted, and that its model is in a slot."""
        counts: dict[str, int] = {}
        for sequence in running:
            model = sequence.request.model
            if model != self.config.base:
                counts[model] = counts.get(model, 0) + 1
        if counts != self.running:
            raise AssertionError(f"sequences of models run: {counts}, counted are {self.running}")
        if missing := [model for model in counts if model not in self.resident]:
            raise AssertionError(f"sequences of {missing} run, resident are {list(self.resident)}")
        if len(self.resident) > self.config.slots:
            raise AssertionError(f"{len(self.resident)} models are in {self.config.slots} slots")
        if self.config.exclusive and len(counts) > 1:
            raise AssertionError(f"sequences of {len(counts)} models run at a time: {counts}")
        if self.loads != self.evictions + len(self.resident):
            raise AssertionError(f"{self.loads} loads, {self.evictions} evictions, {len(self.resident)} resident")

    def _load(self, model: str, replaces: str) -> None:
        cold = self.config.host is not None and model not in self.in_host
        self._pending.append(ModelLoad(model, cold, replaces))
        self.loads += 1
        self.cold_loads += cold

    def _evict(self, model: str) -> None:
        del self.resident[model]
        self.evictions += 1

    def _keep_in_host(self, model: str, room: int) -> None:
        """Note that host memory has a model, in place of the one used least recently that is in no slot."""
        self.in_host.pop(model, None)
        self.in_host[model] = None
        if len(self.in_host) > room:
            del self.in_host[next(name for name in self.in_host if name not in self.resident)]
