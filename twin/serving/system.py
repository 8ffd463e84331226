"""A serving system: engines in pools, a router before each pool, links from prefill to decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from schedulers.routing import Router
from schedulers.sequence import Sequence
from twin.clock import Clock
from twin.serving.engine import Engine
from twin.serving.link import Link, Transfer
from twin.serving.records import RequestRecord
from workloads.request import Request


class Pool:
    """Engines that serve the same models, and who gets the next request. An engine that has failed gets none."""

    def __init__(self, engines: list[Engine], router: Router) -> None:
        self.engines = engines
        self._router = router
        self._up = list(range(len(engines)))

    def choose(self) -> Engine | None:
        """The engine for the next request; None while all have failed."""
        up = self._up
        if len(up) > 1:
            return self.engines[self._router.choose(up, self._load)]
        return self.engines[up[0]] if up else None

    def refresh(self) -> None:
        """An engine has failed or recovered."""
        self._up = [i for i, engine in enumerate(self.engines) if not engine.failed]

    def _load(self, index: int) -> int:
        return self.engines[index].load


class System:
    """Routes requests to pools and, where prefill and decode are apart, caches over links.

    Args:
        clock: the simulation's.
        front: the pool that a model's requests go to first. With `back` that is its prefill pool.
        back: the pool that a model's answers are decoded in; empty when one engine does both.
        links: the link that leaves each prefill engine, by the engine's name.

    Attributes:
        on_arrival: called for every request that comes. on_done: called with the record of every request that is done.
    """

    def __init__(
        self,
        clock: Clock,
        front: dict[str, Pool],
        back: dict[str, Pool],
        links: dict[str, Link],
    ) -> None:
        self.clock, self.front, self.back, self.links = clock, front, back, links
        self.on_arrival: Callable[[], None] = lambda: None
        self.on_done: Callable[[RequestRecord], None] = lambda record: None
        self._stranded: list[RequestRecord] = []
        self._moving: dict[str, dict[Transfer, RequestRecord]] = {name: {} for name in links}
        self._outages: Counter[str] = Counter()
        for pool in self.pools():
            for engine in pool.engines:
                engine.on_finish = self._finished
        for pool in front.values():
            for engine in pool.engines:
                if back:
                    engine.on_finish = self._sender(engine)

    def pools(self) -> list[Pool]:
        """Every pool once."""
        return list({id(pool): pool for pool in (*self.front.values(), *self.back.values())}.values())

    def engines(self) -> list[Engine]:
        """Every engine once, prefill engines first."""
        return [engine for pool in self.pools() for engine in pool.engines]

    def submit(self, record: RequestRecord, *, late: bool = False) -> None:
        """A client sends a request; `late` after all step boundaries of this instant."""
        self.on_arrival()
        self._route(record, late=late)

    def _route(self, record: RequestRecord, *, late: bool = False) -> None:
        engine = self.front[record.request.model].choose()
        if engine is None:
            self._stranded.append(record)
        elif self.back and not record.request.one_shot:
            engine.submit(record, limit=1, hold=True, late=late)
        else:
            engine.submit(record, late=late)

    def fail(self, engine: Engine) -> None:
        """An engine fails; what it had goes on elsewhere, with the tokens that it had already sent to its client.

        Caches that it has not sent whole are lost with it, and their prompts are computed anew. It may fail again while
        it is down: it is back when every outage is over.
        """
        self._outages[engine.name] += 1
        lost = engine.fail() + self._lost_on_the_way(engine)
        for pool in self.pools():
            pool.refresh()
        for record in lost:
            record.attempts += 1
            self._resume(record)

    def recover(self, engine: Engine) -> None:
        """An outage of an engine is over; after the last one it is back, empty."""
        self._outages[engine.name] -= 1
        if self._outages[engine.name]:
            return
        engine.recover()
        for pool in self.pools():
            pool.refresh()
        stranded, self._stranded = self._stranded, []
        for record in stranded:
            self._resume(record)

    def _lost_on_the_way(self, engine: Engine) -> list[RequestRecord]:
        """Requests whose caches were on their way from an engine that fails, as far as not all bytes have gone."""
        if engine.name not in self.links:
            return []
        moving = self._moving[engine.name]
        broken = self.links[engine.name].break_off(moving)
        return [moving.pop(transfer) for transfer in list(moving) if transfer in broken]

    def _resume(self, record: RequestRecord) -> None:
        """Send a request, or what is missing of its answer, to an engine that is up: it computes all of it anew."""
        request = record.request
        if not record.delivered:
            self._route(record)
            return
        pools = self.back or self.front
        engine = pools[request.model].choose()
        if engine is None:
            self._stranded.append(record)
            return
        rest = Request(
            request.id,
            request.arrival,
            request.prompt_tokens + record.delivered,
            request.max_tokens - record.delivered,
            request.model,
            request.prefix_blocks,
            request.task,
            request.priority,
        )
        engine.submit(record, rest)

    def _finished(self, record: RequestRecord, sequence: Sequence) -> None:
        self.on_done(record)

    def _sender(self, engine: Engine) -> Callable[[RequestRecord, Sequence], None]:
        """What happens when a prompt is computed on a prefill engine: its cache moves to a decode engine."""
        link, moving = self.links[engine.name], self._moving[engine.name]

        def finished(record: RequestRecord, sequence: Sequence) -> None:
            request = record.request
            if request.one_shot or record.answer_tokens <= 1:
                engine.release(sequence)
                self.on_done(record)
                return
            record.delivered, core = 0, engine.core

            def arrived() -> None:
                del moving[transfer]
                if engine.core is core:  # it has not failed meanwhile
                    engine.release(sequence)
                target = self.back[request.model].choose()
                if target is None:
                    record.delivered = 1
                    self._stranded.append(record)
                else:
                    target.submit(record, computed=True, late=True)

            transfer = link.send(request.prompt_tokens, arrived)
            moving[transfer] = record

        return finished
