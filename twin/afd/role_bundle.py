"""A bundle as its roles run it: the coordinator, the attention workers and the FFN worker, message by message.

`twin.afd.bundle` simulates the paper's bundle: a microbatch step is attention, FFN and transfers. A bundle of real
workers does more. Its coordinator collects every worker's result and answers with a command, an attention worker embeds
and samples at the edges of a step, and packing a message takes time. Here each role has a clock of its own, which
advances by the stretches of its work, and waits for messages of named sources, as `live/topologies/bundle` does.

Every role takes its messages in an order that is known beforehand: attention workers serve their microbatches in turn,
and the FFN and the coordinator follow that order. So no queue of events is needed. A turn of a microbatch is computed
for all roles, then the next turn.

Slots are always full (the closed loop of AFD 5.1), requests come with the KV cache of their prompts, and there is one
FFN instance.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Protocol

from latency_models.stages import MessageLink
from reports.metrics import Transfers
from schedulers.bundle_slots import BundleSlots, Microbatch, Refill, refill_fcfs
from twin.afd.bundle import Supply

COORDINATOR = 0
TOKEN_BYTES = 24
"""Bytes of an output token in a result: request, token and finish reason."""


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """Bytes: of a row to the FFN or back; of a command for each entering request, prompt token and prefix id."""

    row: int
    prefix_id_tokens: int = 16
    request: int = 128
    prompt_token: int = 8
    prefix_block: int = 16

    def entering(self, prompts: list[int]) -> int:
        """Bytes of a command by which requests with these prompts enter."""
        blocks = sum(tokens // self.prefix_id_tokens for tokens in prompts)
        return self.request * len(prompts) + self.prompt_token * sum(prompts) + self.prefix_block * blocks


FEATURES: dict[str, tuple[str, ...]] = {
    "attention.begin": ("requests", "padded_tokens", "entering"),
    "attention.stage": ("requests", "padded_tokens"),
    "attention.end": ("requests", "finished"),
    "attention.wait": (),
    "ffn.receive": ("rows",),
    "ffn.stage": ("rows",),
    "ffn.send": ("rows",),
    "ffn.wait": (),
    "coordinator.receive": ("requests",),
    "coordinator.collect": ("requests",),
    "coordinator.decide": ("requests", "finished", "entering"),
    "coordinator.send": ("entering",),
    "coordinator.wait": ("requests",),
}
"""The kinds of stretches, and what their durations depend on.

attention.begin      the first stage of a step: command, schedule, embedding, attention
attention.stage      the attention stage of a later layer
attention.end        the LM head, sampling, and the result
ffn.receive          the rows of an instance that is not the last
ffn.stage            the rows of the last instance, the FFN, and the first output
ffn.send             a further output
coordinator.receive  the result of an instance that is not the last
coordinator.collect  the result of the last, until the tokens are timed
coordinator.decide   until the first command is sent
coordinator.send     a further command
*.wait               from the last message to the wait

`requests` are those of the instance (of `coordinator.decide` and `.wait`: of the microbatch). `padded_tokens` is their
token load with each request as long as the longest, in whole blocks: attention on a CPU gathers and computes just that
(`kernels/decode_attention/reference.py`). The token load itself costs nothing more; in profiles it goes up and down
with the padded one, so that a coefficient of its own took a share of the latter's.
"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Work that ends when a message is sent, the role waits, or tokens are timed, with numbers for its `FEATURES`.

    `readings`: how often the live role reads its clock meanwhile.
    """

    kind: str
    features: tuple[float, ...] = ()
    readings: int = 0


class RoleWork(Protocol):
    """Durations of the roles' stretches."""

    def seconds(self, rank: int, stretch: Stretch) -> float:
        """Seconds of a role's next stretch."""


@dataclass(frozen=True, slots=True)
class RoleBundleConfig:
    """The shape of a bundle with one FFN instance. `block_size`: tokens of a KV block."""

    attention_instances: int
    batch_size: int
    layers: int
    sizes: MessageSizes
    block_size: int = 16
    microbatches: int = 2
    link: MessageLink = field(default_factory=MessageLink)
    refill: Refill = refill_fcfs


@dataclass(slots=True)
class SimulatedRole:
    """A role's clock, as `live.topologies.direct_time` keeps it, seconds; `paused`: its last work ended with a wait."""

    now: float = 0.0
    busy: float = 0.0
    waiting: float = 0.0
    paused: bool = True

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds


@dataclass(slots=True)
class RoleRecords:
    """The records of one run: times by request id (-1: none yet), ends and tokens of steps, roles by rank, messages."""

    first_token: list[float]
    finish: list[float]
    roles: list[SimulatedRole]
    finished: list[int] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    attention_to_ffn: Transfers = field(default_factory=Transfers)
    ffn_to_attention: Transfers = field(default_factory=Transfers)


@dataclass(slots=True)
class _Turns:
    """A microbatch on its way through a step: attention stages done, and by worker what its command brings.

    `arrivals`: of the messages with which each worker goes on. `calendar`: by step, requests that finish with it.
    """

    microbatch: Microbatch
    layer: int = 0
    arrivals: list[float] | None = None
    calendar: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    entering: list[list[int]] = field(default_factory=list)
    features: list[tuple[float, ...]] = field(default_factory=list)


class RoleBundle:
    """One bundle and its supply of requests, all there from the start. Call `run` once."""

    def __init__(self, config: RoleBundleConfig, supply: Supply, work: RoleWork) -> None:
        self.config = config
        self._work = work
        self._link = config.link
        self._prefill = supply.prefill.tolist()
        self._decode = supply.decode.tolist()
        count, x = len(self._decode), config.attention_instances
        self._completions = count if supply.completions is None else supply.completions
        self.slots = BundleSlots(x, config.microbatches, config.batch_size, config.refill)
        self.slots.submit(enumerate(self._prefill))
        self._attention = range(1, 1 + x)
        self._ffn = 1 + x
        self._roles = [SimulatedRole() for _ in range(2 + x)]
        self.records = RoleRecords([-1.0] * count, [-1.0] * count, self._roles)

    def run(self) -> RoleRecords:
        """Run until the wanted number of requests has finished."""
        ring = deque(_Turns(self.slots.microbatches[index]) for index in range(self.config.microbatches))
        for turns in ring:
            self._begin_step(turns)
        # One command starts all microbatches, and brings all requests.
        first, workers = ring[0], range(self.config.attention_instances)
        first.entering = [[tokens for turns in ring for tokens in turns.entering[i]] for i in workers]
        for turns in list(ring)[1:]:
            turns.entering = [[] for _ in workers]
        first.arrivals = self._command(first, finished=0)
        while True:
            turns = ring[0]
            if turns.layer == self.config.layers:
                self._end_step(turns)
                if len(self.records.finished) >= self._completions:
                    return self.records
            self._stage(turns)
            ring.rotate(-1)

    # A turn of a microbatch

    def _stage(self, turns: _Turns) -> None:
        """The attention stage of each worker, then the FFN stage of all rows."""
        active, row, arrivals = turns.microbatch.active, self.config.sizes.row, list[float]()
        for i, rank in enumerate(self._attention):
            if turns.arrivals is not None:
                self._receive(rank, turns.arrivals[i], Stretch("attention.wait"))
            stretch = Stretch("attention.stage", turns.features[i])
            if turns.layer == 0:
                entering = len(turns.entering[i])
                stretch = Stretch("attention.begin", (*turns.features[i], entering), entering + 1)
            arrivals.append(self._send(rank, stretch, row * active[i], self.records.attention_to_ffn))
        turns.arrivals = self._ffn_stage(active, arrivals)
        turns.layer += 1

    def _ffn_stage(self, active: list[int], row_arrivals: list[float]) -> list[float]:
        """The FFN waits for the rows of each worker in turn; returns when each gets its output."""
        last = len(active) - 1
        for i, (rows, arrival) in enumerate(zip(active, row_arrivals, strict=True)):
            self._receive(self._ffn, arrival, Stretch("ffn.wait"))
            if i < last:
                self._pause(self._ffn, Stretch("ffn.receive", (rows,)))
        arrivals = []
        for i, rows in enumerate(active):
            stretch = Stretch("ffn.send", (rows,)) if i else Stretch("ffn.stage", (sum(active),))
            arrivals.append(self._send(self._ffn, stretch, self.config.sizes.row * rows, self.records.ffn_to_attention))
        return arrivals

    # The edges of a step

    def _begin_step(self, turns: _Turns) -> None:
        """Refill the microbatch's slots, and note what the step's stages depend on."""
        microbatch = turns.microbatch
        if self.slots.begin_step(microbatch.index) is None or microbatch.vacant:
            raise ValueError(f"expected enough requests to keep all slots full, found {len(self._decode)}")
        longest = [0] * self.config.attention_instances
        for instance, offset in microbatch.resident.values():
            longest[instance] = max(longest[instance], offset + microbatch.step + 1)
        block = self.config.block_size
        turns.features = [
            (active, active * -(-tokens // block) * block)
            for active, tokens in zip(microbatch.active, longest, strict=True)
        ]
        turns.entering = [[] for _ in longest]
        for request_id in microbatch.admitted:
            turns.entering[microbatch.resident[request_id][0]].append(self._prefill[request_id])
            turns.calendar[microbatch.step + self._decode[request_id]].append(request_id)

    def _end_step(self, turns: _Turns) -> None:
        """Sample, collect the results, refill the slots, and command the next step."""
        microbatch, records = turns.microbatch, self.records
        finished = turns.calendar.pop(microbatch.step + 1, [])
        home = [microbatch.resident[request_id][0] for request_id in finished]
        assert turns.arrivals is not None
        results = []
        for i, rank in enumerate(self._attention):
            self._receive(rank, turns.arrivals[i], Stretch("attention.wait"))
            stretch = Stretch("attention.end", (microbatch.active[i], home.count(i)), readings=1)
            results.append(self._send(rank, stretch, TOKEN_BYTES * microbatch.active[i]))
        now = self._collect(microbatch, results)
        records.steps.append((now, microbatch.requests))
        for request_id in microbatch.admitted:
            records.first_token[request_id] = now
        for _, request_id in sorted(zip(home, finished, strict=True), key=lambda pair: pair[0]):
            records.finish[request_id] = now
            records.finished.append(request_id)
        self.slots.end_step(microbatch, finished)
        if len(records.finished) >= self._completions:
            return
        self._begin_step(turns)
        turns.arrivals = self._command(turns, len(finished))
        turns.layer = 0

    def _collect(self, microbatch: Microbatch, results: list[float]) -> float:
        """The coordinator waits for the result of each worker in turn; returns the time of the step's tokens."""
        last, requests = len(results) - 1, microbatch.requests
        for i, arrival in enumerate(results):
            self._receive(COORDINATOR, arrival, Stretch("coordinator.wait", (requests,)))
            if i < last:
                self._pause(COORDINATOR, Stretch("coordinator.receive", (microbatch.active[i],)))
        self._do(COORDINATOR, Stretch("coordinator.collect", (microbatch.active[last],)))
        return self._roles[COORDINATOR].now

    def _command(self, turns: _Turns, finished: int) -> list[float]:
        """The coordinator sends each worker its command; returns when they arrive."""
        entering = turns.entering
        arrivals = []
        for i, prompts in enumerate(entering):
            stretch = Stretch("coordinator.send", (len(prompts),))
            if i == 0:
                features = (turns.microbatch.requests, finished, sum(map(len, entering)))
                stretch = Stretch("coordinator.decide", features, readings=1)
            arrivals.append(self._send(COORDINATOR, stretch, self.config.sizes.entering(prompts)))
        return arrivals

    # What a role does

    def _do(self, rank: int, stretch: Stretch) -> None:
        role = self._roles[rank]
        role.work(self._work.seconds(rank, stretch))
        role.paused = False

    def _pause(self, rank: int, stretch: Stretch) -> None:
        self._do(rank, stretch)
        self._roles[rank].paused = True

    def _send(self, rank: int, stretch: Stretch, size: int, transfers: Transfers | None = None) -> float:
        """Do a stretch of work that ends with a message; returns when it arrives."""
        self._do(rank, stretch)
        role, seconds = self._roles[rank], self._link.seconds(size)
        role.work(self._link.overhead)
        if transfers is not None:
            transfers.add(size, seconds)
        return role.now + seconds

    def _receive(self, rank: int, arrival: float, before: Stretch) -> None:
        role = self._roles[rank]
        if not role.paused:
            self._pause(rank, before)
        if arrival > role.now:
            role.waiting += arrival - role.now
            role.now = arrival
        role.work(self._link.overhead)
