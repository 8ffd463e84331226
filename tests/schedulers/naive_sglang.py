"""An oracle for the rules of SGLang: its scheduler's loop, slow and obvious, written from `managers/scheduler.py`,
`schedule_policy.py` and `schedule_batch.py` of 0.5.9.

It shares no code with `schedulers`. As `EngineCore` does, it knows when a request reaches its limit, counts tokens in
flight, caches prompts when they are computed, gives the chunked request its pages before it looks at what waits, and
lets a request that would be alone begin.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.schedulers.naive_radix import NaiveBatch, NaiveEngine, NaiveRadix, NaiveRequest, give_tokens


@dataclass(frozen=True)
class SGLang:
    """Server arguments: tokens of the pool, `page_size`, limits, and the order of waiting requests."""

    pages: int
    page_size: int = 1
    id_pages: int = 1
    chunked_prefill_size: int = 8192
    max_prefill_tokens: int = 16384
    prefill_max_requests: int = 10**6
    max_running_requests: int = 8
    conservativeness: float = 1.0
    lpm: bool = False
    recv_interval: int = 1


class NaiveSGLang(NaiveEngine):
    def __init__(self, args: SGLang) -> None:
        super().__init__(NaiveRadix(args.pages, args.page_size, args.id_pages))
        self.args = args
        self.socket: list[NaiveRequest] = []
        self.waiting: list[NaiveRequest] = []
        self.counter = 0
        self.running_batch: list[NaiveRequest] = []
        self.chunked: NaiveRequest | None = None
        self.last_prompts: list[NaiveRequest] = []
        self.last_chunked: NaiveRequest | None = None
        self.full = False
        self.initial_ratio = min(0.7 * args.conservativeness, 1.0)
        self.minimum_ratio = min(self.initial_ratio * 0.14, 1.0)
        self.decay = (self.initial_ratio - self.minimum_ratio) / 600
        self.ratio = self.initial_ratio
        self.offset, self.chunk_left, self.input_left = 0.0, 0, 0  # of the step that is being scheduled

    @property
    def running(self) -> list[NaiveRequest]:
        return [request for request in self.requests.values() if request not in self.waiting + self.socket]

    def submit(self, id: int, prompt: int, limit: int, ids: tuple[int, ...]) -> None:
        self.requests[id] = request = NaiveRequest(id, prompt, limit, ids)
        self.socket.append(request)

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self) -> NaiveBatch | None:
        self._receive()
        merged = [r for r in self.last_prompts if r is not self.last_chunked and not r.gone]
        if len(merged) < len(self.last_prompts):
            self.full = False
        if merged and not self.running_batch:
            self.full = False
        self.running_batch += merged
        self.last_prompts, self.last_chunked = [], None
        batch = NaiveBatch(self.steps + 1)
        prompts = self._new_prompts(batch)
        was_full = self.full  # if not, what waits now was looked at, or is retracted by this very round
        if not prompts and not self._decode(batch) and was_full:
            prompts = self._new_prompts(batch)
        if not prompts and not batch.decodes:
            if self.ended == self.steps:
                self.ratio = self.initial_ratio
            return None
        self.last_prompts, self.last_chunked = prompts, self.chunked
        self.steps += 1
        give_tokens(batch, self.requests)
        return batch

    def _receive(self) -> None:
        """`SchedulerRecvSkipper`: a batch of prompts counts as 1,000 of decodes, and an idle loop turns in no time."""
        self.counter += 1000 if self.last_prompts else 1
        if self.counter >= self.args.recv_interval or all(request.ending for request in self.running):
            self.waiting += self.socket
            self.socket, self.counter = [], 0

    def _new_prompts(self, batch: NaiveBatch) -> list[NaiveRequest]:
        """The prefill adder: the chunked request, then waiting ones until one does not fit."""
        args = self.args
        if (self.full or not self.waiting) and self.chunked is None:
            return []
        if len(self.running_batch) >= args.max_running_requests and self.chunked is None:
            self.full = True
            return []
        self.offset = sum(min(r.limit - r.generated, 4096) * self.ratio for r in self.running_batch if not r.gone)
        self.chunk_left, self.input_left = args.chunked_prefill_size, args.max_prefill_tokens
        prompts: list[NaiveRequest] = []
        if self.chunked is not None:
            prompts.append(self.chunked)
            self._add_chunked(batch, self.chunked)
        if args.lpm:
            self._sort()
        for request in list(self.waiting):
            if len(prompts) >= args.max_running_requests - len(self.running_batch):
                self.full = True
            if self.full or len(prompts) >= args.prefill_max_requests or not self._add_one(batch, request, prompts):
                break
            prompts.append(request)
            if self.cache.free * self.cache.page - self.offset <= 0:
                self.full = True
            if self.full or self.input_left <= 0 or self.chunk_left <= 0:
                break
        return prompts

    def _add_chunked(self, batch: NaiveBatch, request: NaiveRequest) -> None:
        """Go on with the chunked request."""
        self._add(batch, request, min(request.tokens - request.computed, self.chunk_left))
        if request.computed == request.tokens:
            self.chunked = None

    def _add_one(self, batch: NaiveBatch, request: NaiveRequest, prompts: list[NaiveRequest]) -> bool:
        """Add a waiting request, if memory and tokens suffice."""
        cache = self.cache
        nodes = cache.match(request, request.tokens - 1)
        cached = nodes * cache.page * cache.node_pages
        extend, new = request.tokens - cached, min(max(request.limit - request.generated, 0), 4096)
        left = (cache.free - cache.idle(request, nodes)) * cache.page - self.offset
        alone = not prompts and all(r.gone for r in self.running_batch)
        if not alone and extend + new >= left:
            self.full = True
            return False
        if prompts and self._paged(extend) >= self.input_left:
            return False
        whole = self._paged(extend) <= self.chunk_left
        tokens = extend if whole else self.chunk_left // cache.page * cache.page
        if tokens <= 0:
            return False
        self.waiting.remove(request)
        self.begin_request(request, nodes)
        self._add(batch, request, tokens)
        if not whole:
            self.chunked = request
        return True

    def _add(self, batch: NaiveBatch, request: NaiveRequest, tokens: int) -> None:
        self.schedule(batch, request, tokens)
        self.chunk_left -= self._paged(tokens)
        self.input_left -= self._paged(tokens)
        if request.computed == request.tokens:
            self.offset += min(request.limit, 4096)

    def _sort(self) -> None:
        if len(self.waiting) > 128:
            return
        tokens_of_id = self.cache.page * self.cache.node_pages
        rank: dict[int, float] = {}
        begun: list[tuple[int, ...]] = []
        for request in self.waiting:
            found = self.cache.match(request, request.tokens) * tokens_of_id
            rank[request.id] = -found
            own = request.ids[: request.tokens // tokens_of_id]
            if found <= 32:
                alike = max((_common(own, path) for path in begun), default=0)
                if alike * tokens_of_id >= 32:
                    rank[request.id] = float("inf")
                else:
                    begun.append(own)
        self.waiting.sort(key=lambda request: rank[request.id])

    def _decode(self, batch: NaiveBatch) -> bool:
        """The running batch without what has left; it is retracted where pages are short. Whether any decodes."""
        before = len(self.running_batch)
        if not before:
            return False
        self.running_batch = [r for r in self.running_batch if not r.gone]
        decodes = [r for r in self.running_batch if not r.ending]
        if self._new_pages(decodes) > self.cache.free:
            order = sorted(decodes, key=lambda r: (r.generated, -r.prompt), reverse=True)
            self.cache.evict_all()
            while order and self._new_pages(order) > self.cache.free:  # one alone lacks none, but beside what has ended
                self._retract(order.pop())
            decodes = [r for r in decodes if r in order]
            generated = sum(r.generated for r in decodes)
            self.ratio = min((generated + 20 * len(decodes)) / (sum(r.limit for r in decodes) + 1), 1.0)
        elif decodes:
            self.ratio = max(self.ratio - self.decay, self.minimum_ratio)
        if len(self.running_batch) < before:
            self.full = False
        for request in decodes:
            self.schedule(batch, request, 1)
        return bool(decodes)

    def _new_pages(self, decodes: list[NaiveRequest]) -> int:
        return sum(self.cache.pages_for(r.computed + 1) > self.cache.held(r) for r in decodes)

    def _retract(self, request: NaiveRequest) -> None:
        """Nothing that it has computed is cached, and it waits behind all others."""
        self.preemptions += 1
        self.running_batch.remove(request)
        self.cache.release(request)
        request.computed, request.decoding = 0, False
        self.waiting.append(request)

    def _paged(self, tokens: int) -> int:
        return self.cache.pages_for(tokens) * self.cache.page

    # -- what a step leaves ------------------------------------------------------------------------------------------

    def end(self, batch: NaiveBatch, stopped: list[int]) -> list[tuple[int, int]]:
        self.ended = batch.number
        for id, new, context in batch.chunks:
            if id in self.requests and self.requests[id] not in self.waiting:
                self.cache.insert(self.requests[id], context + new)
        leaving = self.leaving(batch, stopped)
        for id, tokens in leaving.items():
            request = self.requests[id]
            known = min(request.computed, request.prompt + tokens - 1)
            if len(request.ids) * self.cache.page * self.cache.node_pages > request.prompt:
                self.cache.insert(request, known)
            self._leave(request, known)
        return list(leaving.items())

    def _leave(self, request: NaiveRequest, tokens: int) -> None:
        self.cache.release(request, tokens)
        request.gone = True
        del self.requests[request.id]
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.socket:
            self.socket.remove(request)


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The number of leading ids that two paths share."""
    n = 0
    while n < min(len(left), len(right)) and left[n] == right[n]:
        n += 1
    return n
