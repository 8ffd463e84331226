"""KV caches that leave a prefill engine while later chunks of their prompts are computed.

When the first of several chunks begins, the frontend chooses a decode engine and asks it to reserve the prompt's
blocks. From the first step end at which the prefill engine knows that it has, what is computed leaves; the rest when
the prompt is complete. If it cannot reserve them, the cache leaves when the prompt is complete, as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import simpy
from simpy.events import Event, Process

from schedulers.sequence import WAITING, Sequence
from twin.environment import Environment, Priority
from twin.serving.engine.engine import Engine
from twin.serving.engine.links import Link
from twin.serving.records.requests import RequestRecord
from workloads.request import Request


class EarlyTransfer:
    """One cache.

    Attributes:
        source: its prefill engine. complete: its prompt is.
        target: the decode engine; None if it is not chosen, has no blocks for it, or has failed.
        leaves_from: when the prefill engine may send, seconds. sent: tokens that have left or stand in line.
        parts: processes that send them.
    """

    def __init__(self, source: Engine) -> None:
        self.source = source
        self.complete = False
        self.target: Engine | None = None
        self.leaves_from = math.inf
        self.sent = 0
        self.parts: list[Process] = []


class EarlyTransfers:
    """The caches of a system that leave early.

    Args:
        links: by the name of the prefill engine that each leaves. choose: the decode engine for a request, None while
            all have failed. route: see `System`. on_release: called with a decode engine that reserves nothing after
            all.
    """

    def __init__(
        self,
        env: Environment,
        links: dict[str, Link],
        choose: Callable[[Request], Engine | None],
        route: float,
        on_release: Callable[[Engine], None],
    ) -> None:
        self._env = env
        self._links = links
        self._choose = choose
        self._route = route
        self._on_release = on_release
        self._under_way: dict[RequestRecord, EarlyTransfer] = {}

    def watch(self, engine: Engine) -> None:
        """Follow the chunks of a prefill engine."""

        def on_chunk(sequence: Sequence, computed: int) -> None:
            if not sequence.hold_blocks:
                return
            if computed < 0:
                self._begin(engine, sequence)
            else:
                self._computed(engine, sequence, computed)

        engine.step_records.on_chunk = on_chunk

    def _begin(self, engine: Engine, sequence: Sequence) -> None:
        """A step begins with a chunk of a prompt that is not its last."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        if record in self._under_way or sequence.request.max_tokens <= 1:
            return
        transfer = self._under_way[record] = EarlyTransfer(engine)
        self._env.process(self._ask(record, transfer))

    def _ask(self, record: RequestRecord, transfer: EarlyTransfer) -> Generator[Event, object, None]:
        """Ask a decode engine to reserve blocks, by way of the frontend."""
        env, latency = self._env, self._links[transfer.source.name].latency
        to_engine = self._route or latency
        yield env.at(env.now + latency, Priority.LATE)
        if transfer.complete or self._under_way.get(record) is not transfer:
            return
        target = transfer.target = self._choose(record.request)
        if target is None:
            return

        def answer(reserved: bool) -> None:
            transfer.leaves_from = env.now + latency + to_engine
            if not reserved and not transfer.complete:
                transfer.target = None
                self._on_release(target)

        yield env.at(env.now + to_engine, Priority.LATE)
        if transfer.target is target and self._under_way.get(record) is transfer:
            target.reserve(record, answer)

    def _computed(self, engine: Engine, sequence: Sequence, tokens: int) -> None:
        """A step has ended, and this many tokens of a prompt are computed, which is not complete."""
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        transfer = self._under_way.get(record)
        if transfer is None or transfer.target is None or self._env.now < transfer.leaves_from:
            return
        if sequence.state == WAITING:  # preempted meanwhile
            return
        tokens -= tokens % engine.cores[0].config.block_size
        if tokens > transfer.sent:
            part = self._send(self._links[engine.name], tokens - transfer.sent)
            transfer.parts.append(self._env.process(part))
            transfer.sent = tokens

    @staticmethod
    def _send(link: Link, tokens: int) -> Generator[Event, object, None]:
        try:
            yield from link.send(tokens)
        except simpy.Interrupt:
            return

    def complete(self, record: RequestRecord) -> EarlyTransfer | None:
        """A prompt is complete. Its transfer, if a decode engine was chosen: until `arrived` or `give_up`."""
        transfer = self._under_way.get(record)
        if transfer is None:
            return None
        transfer.complete = True
        if transfer.target is None:
            del self._under_way[record]
            return None
        return transfer

    def arrived(self, record: RequestRecord) -> Engine | None:
        """All of a cache has come. The engine that it was sent to; None if it has failed, or none was chosen."""
        transfer = self._under_way.pop(record, None)
        return None if transfer is None else transfer.target

    def give_up(self, record: RequestRecord) -> None:
        """Send no more of a cache, and free what is reserved for it."""
        transfer = self._under_way.pop(record, None)
        if transfer is None:
            return
        for part in transfer.parts:
            if part.is_alive:
                part.interrupt()
        if transfer.target is not None:
            transfer.target.cancel(record)
            self._on_release(transfer.target)

    def lose(self, engine: Engine) -> None:
        """An engine has failed: what it was sending is given up, and what was sent to it is lost."""
        for record, transfer in list(self._under_way.items()):
            if transfer.source is engine and not transfer.complete:
                self.give_up(record)
            elif transfer.target is engine:
                transfer.target = None
