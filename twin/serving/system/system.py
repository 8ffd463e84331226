"""A serving system: pools of engines, a router before each pool, and links from prefill to decode engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace

import simpy
from simpy.events import Event, Process

from schedulers.router_views import LoadTree
from schedulers.routing import Router, own_method
from schedulers.sequence import Sequence
from twin.environment import Environment, Priority
from twin.serving.engine.engine import Engine
from twin.serving.engine.engine_state import RequestsElsewhere, TimeAfter, foresight_of
from twin.serving.engine.links import Link
from twin.serving.records.engine_log import StepIntegral
from twin.serving.records.requests import RequestRecord
from twin.serving.system.early_transfers import EarlyTransfer, EarlyTransfers
from workloads.request import Request


class Pool:
    """Engines that serve the same models, and the router that chooses among them.

    Engines that have failed, or are not in service, get no requests.
    """

    def __init__(self, engines: list[Engine], router: Router) -> None:
        self.engines = engines
        self._router = router
        self._up = engines
        self._loads: LoadTree | None = None
        self._follow_loads()

    def choose(self, request: Request) -> Engine | None:
        """The engine for a request; None while all have failed."""
        return self._router.choose(request, self._up) if self._up else None

    def refresh(self) -> None:
        """Look again which engines are up, after one has failed or recovered, or came into or went out of service."""
        self._up = [engine for engine in self.engines if engine.in_service and not engine.failed]
        self._follow_loads()

    def foresee(self, time_after: TimeAfter) -> None:
        """Let engines visit step ends early, if the router can tell which are not about to be chosen."""
        elsewhere: RequestsElsewhere | None = own_method(self._router, "requests_elsewhere")
        size = len(self.engines)
        if elsewhere is not None and size > 1:
            for position, engine in enumerate(self.engines):
                engine.foresight = foresight_of(time_after, elsewhere, position, size)

    def _follow_loads(self) -> None:
        """Have the engines that are up keep their loads where the router looks, if it is one that `FollowsLoads`."""
        follow: Callable[[list[Engine]], LoadTree] | None = own_method(self._router, "follow")
        if follow is None or len(self.engines) == 1:
            return
        if self._loads is not None:
            for engine in self.engines:
                engine.unfollow_load(self._loads)
        self._loads = follow(self._up)
        for position, engine in enumerate(self._up):
            engine.follow_load(self._loads, position)


class System:
    """Routes requests to pools, and sends caches over links where prefill and decode engines are separate.

    Args:
        env: the simulation's environment.
        prefill_pools: the pool that each model's requests go to first, by model. Without decode pools its engines
            decode, too.
        decode_pools: the pool that decodes each model's requests, by model; empty in a colocated system.
        links: the link that leaves each prefill engine, by the engine's name.
        route, deliver, hand_over: seconds of work between steps, as in a scenario's `system.frontend`.
        with_chunks: caches leave while later chunks of their prompts are computed.

    Attributes:
        pools, engines: each once, those that prefill first. stranded: requests that wait because no engine is up.
        population: counts the requests that have arrived and are not finished; None: it is not counted.
        on_arrival, on_finish: each is called with the record of every request that arrives, or of every finished one.
        on_outage: called with each engine that fails or recovers. on_release: called with a prefill engine after each
            transfer, and with a decode engine whose reservation is given up.
    """

    def __init__(
        self,
        env: Environment,
        prefill_pools: dict[str, Pool],
        decode_pools: dict[str, Pool],
        links: dict[str, Link],
        route: float = 0.0,
        deliver: float = 0.0,
        hand_over: float = 0.0,
        *,
        with_chunks: bool = False,
    ) -> None:
        self.env = env
        self.prefill_pools = prefill_pools
        self.decode_pools = decode_pools
        self.links = links
        pools = (*prefill_pools.values(), *decode_pools.values())
        self.pools = list({id(pool): pool for pool in pools}.values())
        self.engines = list({engine.name: engine for pool in self.pools for engine in pool.engines}.values())
        self.stranded: list[RequestRecord] = []
        self.population: StepIntegral | None = None
        self.on_arrival: list[Callable[[RequestRecord], None]] = []
        self.on_finish: list[Callable[[RequestRecord], None]] = []
        self.on_outage: Callable[[Engine], None] = lambda engine: None
        self.on_release: Callable[[Engine], None] = lambda engine: None
        self._route_seconds = route
        self._deliver = deliver
        self._hand_over = hand_over
        self._sending: dict[str, dict[RequestRecord, Process]] = {name: {} for name in links}
        self._outages: Counter[str] = Counter()
        for engine in self.engines:
            engine.on_finish = self._answer
        if decode_pools:
            for pool in prefill_pools.values():
                for engine in pool.engines:
                    engine.on_finish = self._prefilled(engine)
        self._early: EarlyTransfers | None = None
        if with_chunks:
            # `on_release` is set after this system has been made
            self._early = EarlyTransfers(env, links, self._choose_decode, route, lambda engine: self.on_release(engine))
            for engine in self.engines:
                if engine.name in links:
                    self._early.watch(engine)

    def submit(self, record: RequestRecord, *, late: bool = False) -> None:
        """Route a new request. `late`: the step ends of this instant are over (see `Priority.LATE`)."""
        if self.population is not None:
            self.population.set(self.env.now, self.population.value + 1)
        for tell in self.on_arrival:
            tell(record)
        if self._route_seconds:
            self.env.process(self._routed(record))
        else:
            self._route(record, late=late)

    def submit_again(self, record: RequestRecord, wait: float) -> None:
        """Route a request that was shed, `wait` seconds from now; it has arrived before."""
        self.env.process(self._routed(record, wait))

    def _routed(self, record: RequestRecord, wait: float = 0.0) -> Generator[Event, object, None]:
        """Route a request after some time and the frontend's work."""
        yield self.env.at(self.env.now + wait + self._route_seconds, Priority.ARRIVAL)
        self._route(record)

    def _route(self, record: RequestRecord, *, late: bool = False) -> None:
        engine = self.prefill_pools[record.request.model].choose(record.request)
        if engine is None:
            self.stranded.append(record)
        elif self.decode_pools and not record.request.one_shot:
            engine.submit(record, max_tokens=1, hold_blocks=True, late=late)
        else:
            engine.submit(record, late=late)

    def _answer(self, record: RequestRecord, sequence: Sequence) -> None:
        """A request is finished; its client knows when the last token has been delivered."""
        if self._deliver:
            self.env.process(self._delivered(record))
        else:
            self._leave(record)

    def _delivered(self, record: RequestRecord) -> Generator[Event, object, None]:
        yield self.env.at(self.env.now + self._deliver, Priority.LATE)
        self._leave(record)

    def _leave(self, record: RequestRecord) -> None:
        if self.population is not None:
            self.population.set(self.env.now, self.population.value - 1)
        for tell in self.on_finish:
            tell(record)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _prefilled(self, engine: Engine) -> Callable[[RequestRecord, Sequence], None]:
        """The callback of a prefill engine: a request without further tokens is finished, another is transferred."""
        env, sending = self.env, self._sending[engine.name]

        def finished(record: RequestRecord, sequence: Sequence) -> None:
            early = self._early.complete(record) if self._early is not None else None
            if record.request.one_shot or record.answer_tokens <= 1:
                engine.release(sequence)
                if self._early is not None:
                    self._early.give_up(record)
                self._answer(record, sequence)
            else:
                record.delivered = 0
                is_announced = early is not None and early.leaves_from <= env.now
                leaves = engine.hold(self._hand_over) if self._hand_over and not is_announced else 0.0
                sending[record] = env.process(self._transfer(engine, record, sequence, leaves, early))

        return finished

    def _transfer(
        self, engine: Engine, record: RequestRecord, sequence: Sequence, leaves: float, early: EarlyTransfer | None
    ) -> Generator[Event, object, None]:
        """Send a request's cache from its prefill engine to a decode engine, and the request with it.

        `leaves`: when the cache begins to leave, if that is later than now. The decode engine is then told by the
        frontend, which is routed like a new request. `early`: what has left before.
        """
        env, link, core, request = self.env, self.links[engine.name], engine.core, record.request
        try:
            if leaves > env.now:
                yield env.at(leaves)
            announced = env.now + link.latency + self._route_seconds if self._route_seconds else 0.0
            yield from link.send(request.prompt_tokens - (early.sent if early is not None else 0))
            if early is not None and early.sent and early.target is None:  # lost with the engine that they went to
                yield from link.send(early.sent)
        except simpy.Interrupt:
            if self._early is not None:
                self._early.give_up(record)
            return  # the engine has failed, and `fail` resumes the request
        del self._sending[engine.name][record]
        yield link.arrival()
        if announced > env.now:
            yield env.at(announced, Priority.LATE)
        if engine.core is core:  # it has not failed since
            engine.release(sequence)
            self.on_release(engine)
        target = self._early.arrived(record) if self._early is not None else None
        target = target or self._choose_decode(request)
        if target is None:
            record.delivered = 1
            self.stranded.append(record)
        else:
            target.submit(record, remote_prefill=True, late=True)

    def _choose_decode(self, request: Request) -> Engine | None:
        return self.decode_pools[request.model].choose(request)

    # -- outages -----------------------------------------------------------------------------------------------------

    def outage(self, engine: Engine, start: float, duration: float) -> Generator[Event, object, None]:
        """Let an engine fail at `start` and recover `duration` seconds later. To be started as a process."""
        begin = self.env.at(start, Priority.OUTAGE)
        end = self.env.at(start + duration, Priority.OUTAGE)
        yield begin
        self.fail(engine)
        yield end
        self.recover(engine)

    def fail(self, engine: Engine) -> None:
        """Let an engine fail. Its requests continue elsewhere, with the tokens that their clients already have.

        Caches that it has not sent whole are lost, and their prompts are computed again. An engine may fail again
        while it is down: it recovers when every outage is over.
        """
        self._outages[engine.name] += 1
        records = engine.fail() + self._interrupt_transfers(engine)
        if self._early is not None:
            self._early.lose(engine)
        for pool in self.pools:
            pool.refresh()
        for record in records:
            record.attempts += 1
            self._resume(record)
        self.on_outage(engine)

    def recover(self, engine: Engine) -> None:
        """End an outage of an engine. After the last one the engine is up, with an empty cache."""
        self._outages[engine.name] -= 1
        if self._outages[engine.name]:
            return
        engine.recover()
        self.refresh()
        self.on_outage(engine)

    def refresh(self) -> None:
        """Look again which engines are up, and route the requests that waited for one."""
        for pool in self.pools:
            pool.refresh()
        stranded = self.stranded
        self.stranded = []
        for record in stranded:
            self._resume(record)

    def _interrupt_transfers(self, engine: Engine) -> list[RequestRecord]:
        """Interrupt the transfers from a failed engine whose last byte has not left; returns their requests."""
        sending = self._sending.get(engine.name, {})
        for process in sending.values():
            process.interrupt()
        records = list(sending)
        sending.clear()
        return records

    def _resume(self, record: RequestRecord) -> None:
        """Route a request again: its new engine computes the prompt and the tokens so far, then the rest."""
        request = record.request
        if not record.delivered:
            self._route(record)
            return
        pools = self.decode_pools or self.prefill_pools
        engine = pools[request.model].choose(request)
        if engine is None:
            self.stranded.append(record)
            return
        delivered = record.delivered
        continuation = replace(
            request, prompt_tokens=request.prompt_tokens + delivered, max_tokens=request.max_tokens - delivered
        )
        engine.submit(record, continuation)
