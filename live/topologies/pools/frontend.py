"""The front of a topology of pools: it routes requests to engines, and from prefill to decode engines.

`schedulers.routing`, which the twin uses too, chooses. A request whose prompt has been computed is given to the decode
engine that the router chooses then; its KV goes there directly, from engine to engine. With `with_chunks`, the decode
engine of a prompt of several chunks is chosen when the first one begins. If it can reserve the blocks, they are sent as
they are computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from live.backend import BackendState
from live.engine import Progress
from live.generation import Generation
from live.topologies.deployment import FrontRole, OnProgress
from live.topologies.pools.layout import (
    BEGUN,
    EVENTS,
    IDS_AT_ONCE,
    NORMAL,
    PREFILL,
    REPORT,
    REQUESTS_AT_ONCE,
    RESERVED,
    SENT,
    WORK,
    PoolsLayout,
)
from live.topologies.transport import (
    FINISH_REASONS,
    IDLE,
    STOP,
    Idle,
    Message,
    ReceiveAny,
    Role,
    Transport,
    TransportError,
    append_token,
    pack_requests,
    read_tokens,
)
from schedulers.engine_config import EngineConfig
from schedulers.router_views import CacheView
from schedulers.routing import ROUTERS, Router
from workloads.request import Request


class RoutedEngine:
    """An engine as the front knows it, for routers: see `schedulers.routing.EngineState`.

    `load`: prompt tokens and output limits of its unfinished requests. `requests`: these by id, each with its share.
    Counts are of its latest report. `outbox`, `aborts`, `sends`: of its next WORK.
    """

    def __init__(self, rank: int, config: EngineConfig, clock: Callable[[], float], delay: float) -> None:
        self.rank = rank
        self.free_blocks = config.num_gpu_blocks
        self.view = CacheView(config.prefix_id_tokens, delay)
        self.speed = 1.0
        self._clock = clock
        self.load = self.num_running = self.preemptions = self.prefill_tokens = self.cached_tokens = 0
        self.requests: dict[int, int] = {}
        self.outbox: list[tuple[Generation, int]] = []
        self.aborts: list[int] = []
        self.sends: list[tuple[int, int]] = []

    @property
    def index(self) -> int:
        return self.rank

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that were not running at its latest report."""
        return max(len(self.requests) - self.num_running, 0)

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in its prefix cache, as far as it has told."""
        return self.view.cached_prefix_tokens(request, self._clock())

    def add(self, generation: Generation, mode: int, tokens: int) -> None:
        """Give it a request, which counts as this many tokens."""
        self.outbox.append((generation, mode))
        self.expect(generation.request.id, tokens)

    def expect(self, request_id: int, tokens: int) -> None:
        """Count a request that it will get."""
        self.requests[request_id] = tokens
        self.load += tokens

    def remove(self, request_id: int) -> None:
        self.load -= self.requests.pop(request_id, 0)


class Frontend(FrontRole):
    """Routes requests and keeps what clients know of them. `seed`: of routers that draw."""

    def __init__(
        self, layout: PoolsLayout, max_model_len: int, transport: Transport, on_progress: OnProgress, seed: int = 0
    ) -> None:
        super().__init__("these engines give", max_model_len, transport, on_progress)
        self._layout = layout
        self.engines = {
            rank: RoutedEngine(rank, place.config, transport.clock, layout.kv_event_delay)
            for rank, place in zip(layout.ranks, layout.engines, strict=True)
        }
        draw = random.Random(seed).randrange
        self._routers: dict[tuple[int, ...], Router] = {}
        for ranks in (*layout.prefill.values(), *layout.decode.values()):
            self._routers.setdefault(ranks, ROUTERS.select(layout.routing)(draw, **dict(layout.parameters)))
        self._at: dict[int, RoutedEngine] = {}  # of each unfinished request
        self._asked: dict[int, RoutedEngine] = {}  # engines that shall reserve blocks for a prompt, by request
        self._moving: dict[int, tuple[RoutedEngine, RoutedEngine]] = {}  # prompts that are being sent: from, to
        models = len(layout.prefill)
        self._steps_by_models = [0] * models if models > 1 else []
        self._decode_ranks = {rank for ranks in layout.decode.values() for rank in ranks} or set(layout.ranks)

    # -- called from outside -----------------------------------------------------------------------------------------

    def check(self, generation: Generation) -> None:
        request = generation.request
        if request.model not in self._layout.prefill:
            raise ValueError(f"request {request.id}: expected one of the models, found {request.model}")
        super().check(generation)

    def state(self) -> BackendState:
        """The present state, for metrics. Engines keep their own queues: what they have counts as running."""
        engines = list(self.engines.values())
        blocks = sum(place.config.num_gpu_blocks for place in self._layout.engines)
        return BackendState(
            len(self._generations),
            len(self._arriving),
            1 - sum(engine.free_blocks for engine in engines) / blocks,
            sum(engine.prefill_tokens for engine in engines),
            sum(engine.cached_tokens for engine in engines),
            sum(engine.preemptions for engine in engines),
            tuple(self._steps_by_models),
        )

    # -- the role ----------------------------------------------------------------------------------------------------

    def run(self) -> Role:
        """Route requests as they come, and engines' reports as they come, until it is stopped."""
        ranks = tuple(self._layout.ranks)
        while True:
            self._take_calls()
            self._send_work()
            if self._stopping and not self._generations:
                break
            message = yield ReceiveAny(ranks, wait=True) if self._generations else Idle()
            if message is None:
                self._send_all(self._layout.ranks, IDLE)
            else:
                self._hear(message)
        self._send_all(self._layout.ranks, STOP)

    def _hear(self, message: Message) -> None:
        kind = message.kind
        if kind == REPORT:
            self._on_progress(self._read(message))
        elif kind == EVENTS:
            self._note_events(message)
        elif kind == SENT:
            self._continue(message.fields[1], bool(message.fields[2]))
        elif kind == BEGUN:
            self._ask(message.fields[1], self.engines[message.fields[0]])
        elif kind == RESERVED:
            self._send_early(message.fields[1], bool(message.fields[2]))
        else:
            raise TransportError(f"an engine sent a message of kind {kind}: expected a report")

    def _note_events(self, message: Message) -> None:
        view = self.engines[message.fields[0]].view
        view.now = self._transport.clock()
        for cached, block in message.tensors[0].tolist():
            view.publish(bool(cached), block)

    def _enter(self, generation: Generation) -> None:
        request = generation.request
        engine = self._at[request.id] = self._choose(self._layout.prefill, request)
        split = bool(self._layout.decode) and not request.one_shot
        tokens = request.prompt_tokens + (1 if split else max(request.max_tokens, 1))
        engine.add(generation, PREFILL if split else NORMAL, tokens)

    def _abort(self, generation: Generation) -> None:
        """End a request at its engines; where its blocks are on their way, when all are there, or no more come."""
        generation.finish_reason = "abort"
        request_id = generation.request.id
        moving, target = self._moving.get(request_id), self._asked.get(request_id)
        if target is not None:
            target.aborts.append(request_id)
        if moving is None or self._at[request_id] is moving[0]:
            self._at[request_id].aborts.append(request_id)
        if moving is None:
            self._forget(request_id)

    def _choose(self, pools: Mapping[str, tuple[int, ...]], request: Request) -> RoutedEngine:
        ranks = pools[request.model]
        engines = [self.engines[rank] for rank in ranks]
        return self._routers[ranks].choose(request, engines) if len(engines) > 1 else engines[0]

    def _read(self, report: Message) -> Progress:
        """Take an engine's report; prompts that are complete go to a decode engine."""
        engine = self.engines[report.fields[0]]
        _, running, free_blocks, preemptions, prefill_tokens, cached_tokens = report.fields
        engine.num_running = running
        engine.free_blocks = free_blocks
        engine.preemptions = preemptions
        engine.prefill_tokens = prefill_tokens
        engine.cached_tokens = cached_tokens
        now = self._transport.clock()
        advanced, finished = [], []
        for request_id, token, code in read_tokens(report, self._generations):
            generation = self._generations.get(request_id)
            if generation is None or generation.finish_reason or self._at.get(request_id) is not engine:  # aborted
                continue
            first = not generation.output and not generation.request.one_shot
            handed_over = first and bool(self._layout.decode) and FINISH_REASONS[code] == "length"
            advanced.append(generation)
            if append_token(generation, token, 0 if handed_over else code, now):
                finished.append(generation)
                if request_id in self._moving:  # it is forgotten when its blocks are there, or no more come
                    continue
                if request_id in self._asked:
                    self._asked[request_id].aborts.append(request_id)
                if handed_over or not code:  # a stop check has ended it: its engine does not know
                    engine.aborts.append(request_id)
                self._forget(request_id)
            elif handed_over:
                self._hand_over(generation, engine)
        if advanced and self._steps_by_models and engine.rank in self._decode_ranks:
            self._steps_by_models[len({generation.request.model for generation in advanced}) - 1] += 1
        return Progress(advanced, finished)

    def _hand_over(self, generation: Generation, source: RoutedEngine) -> None:
        """Let a complete prompt's KV be sent to a decode engine, unless that has begun."""
        request_id = generation.request.id
        if request_id not in self._moving:
            target = self._asked.pop(request_id, None) or self._expect(generation)
            self._move(request_id, source, target)
        source.remove(request_id)
        self._at[request_id] = self._moving[request_id][1]

    def _expect(self, generation: Generation) -> RoutedEngine:
        """Choose the decode engine of a request. It counts there from now on."""
        request = generation.request
        target = self._choose(self._layout.decode, request)
        target.expect(request.id, request.prompt_tokens + request.max_tokens)
        return target

    def _move(self, request_id: int, source: RoutedEngine, target: RoutedEngine) -> None:
        source.sends.append((request_id, target.rank))
        self._moving[request_id] = source, target

    def _ask(self, request_id: int, source: RoutedEngine) -> None:
        """The first of several chunks of a prompt begins: let a decode engine reserve blocks for it."""
        generation = self._generations.get(request_id)
        if generation is None or generation.finish_reason:
            return
        target = self._asked[request_id] = self._expect(generation)
        target.outbox.append((replace(generation, output=[]), source.rank))

    def _send_early(self, request_id: int, reserved: bool) -> None:
        """A decode engine has or has not reserved blocks for a prompt: let them be sent as they are computed."""
        target = self._asked.pop(request_id, None)
        if target is None:  # the prompt is complete, or was aborted
            return
        if reserved:
            self._move(request_id, self._at[request_id], target)
        else:
            target.remove(request_id)

    def _continue(self, request_id: int, complete: bool) -> None:
        """A prompt's KV is on its way to its decode engine, with its request; if not `complete`, both drop it."""
        source, target = self._moving.pop(request_id)
        generation = self._generations[request_id]
        if complete:  # an output that has ended is ended there: it only must not be empty, which is a reservation
            target.outbox.append((replace(generation, output=generation.output[:1] or [0]), source.rank))
            if generation.finish_reason:
                target.aborts.append(request_id)
        if generation.finish_reason or not complete:
            target.remove(request_id)
        if generation.finish_reason:
            self._forget(request_id)

    def _forget(self, request_id: int) -> None:
        target = self._asked.pop(request_id, None)
        if target is not None:
            target.remove(request_id)
        self._at.pop(request_id).remove(request_id)
        del self._generations[request_id]

    def _send_work(self) -> None:
        """Send each engine what it has to do. Aborts follow the requests that they may be about."""
        for engine in self.engines.values():
            while engine.outbox or engine.sends:
                requests = engine.outbox[:REQUESTS_AT_ONCE]
                engine.outbox = engine.outbox[REQUESTS_AT_ONCE:]
                sends = engine.sends[:IDS_AT_ONCE]
                engine.sends = engine.sends[IDS_AT_ONCE:]
                self._work(engine.rank, requests, (), sends)
            while engine.aborts:
                aborts = engine.aborts[:IDS_AT_ONCE]
                engine.aborts = engine.aborts[IDS_AT_ONCE:]
                self._work(engine.rank, (), aborts, ())

    def _work(
        self,
        rank: int,
        requests: Sequence[tuple[Generation, int]],
        aborts: Sequence[int],
        sends: Sequence[tuple[int, int]],
    ) -> None:
        ids = torch.tensor(aborts, dtype=torch.int64)
        pairs = torch.tensor(sends, dtype=torch.int64).reshape(-1, 2)
        self._transport.send(rank, Message(WORK, (), (*pack_requests(requests), ids, pairs)))
