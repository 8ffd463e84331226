"""An oracle for the rules of TensorRT-LLM: its capacity and micro-batch schedulers, slow and obvious, written from
`capacityScheduler.cpp` and `microBatchScheduler.cpp` of 1.3, and `py_executor.py`.

It shares no code with `schedulers`. As `EngineCore` does, it reserves for what has begun before it looks at what waits,
gives a request that fits its pages at once, after the decodes, and caches prompts chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.schedulers.naive_radix import NaiveBatch, NaiveEngine, NaiveRadix, NaiveRequest, give_tokens


@dataclass(frozen=True)
class TensorRT:
    """Settings of the LLM API. `chunking`: fcfs or equal, "" for whole prompts."""

    pages: int
    tokens_per_block: int = 32
    id_pages: int = 1
    max_num_tokens: int = 8192
    max_batch_size: int = 8
    capacity: str = "guaranteed_no_evict"
    chunking: str = ""
    reuse: bool = True
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0


class NaiveTensorRT(NaiveEngine):
    def __init__(self, settings: TensorRT) -> None:
        super().__init__(NaiveRadix(settings.pages, settings.tokens_per_block, settings.id_pages, merges=False))
        self.settings = settings
        self.waited = 0
        self.in_flight: set[int] = set()  # first ids that steps in flight compute

    @property
    def running(self) -> list[NaiveRequest]:
        return [request for request in self.requests.values() if request.place]

    def submit(self, id: int, prompt: int, limit: int, ids: tuple[int, ...]) -> None:
        self.requests[id] = NaiveRequest(id, prompt, limit, ids)

    def begin(self) -> NaiveBatch | None:
        batch = NaiveBatch(self.steps + 1)
        generating = [r for r in self.running if r.decoding]
        decodes = [r for r in generating if not r.ending]
        contexts = sorted((r for r in self.running if not r.decoding), key=lambda r: r.place)
        if self.settings.capacity == "max_utilization":
            paused = self._pause(decodes, generating + contexts)
            decodes = [r for r in decodes if r.place]
            contexts = [r for r in contexts if r.place]
        else:
            paused = False
        static = self.settings.capacity == "static_batch" and bool(decodes)
        for request in sorted(decodes, key=lambda r: r.place):
            self.schedule(batch, request, 1)
        if not paused and not static:
            contexts = self._fitting(generating, contexts)
        chunks = self._chunks([r.tokens - r.computed for r in contexts], self.settings.max_num_tokens - len(decodes))
        waits = not static and self._waits(len(batch.decodes), sum(chunks))
        for request, tokens in zip(contexts, chunks, strict=True):
            if tokens and not static and not waits:
                self.schedule(batch, request, tokens)
        if not batch.chunks and not batch.decodes:
            return None
        self.steps += 1
        give_tokens(batch, self.requests)
        return batch

    # -- capacity ----------------------------------------------------------------------------------------------------

    def _pause(self, decodes: list[NaiveRequest], started: list[NaiveRequest]) -> bool:
        """Pause the last request that has begun, until each decode has its next page. Whether one was paused."""
        paused = False
        started = sorted(started, key=lambda r: r.place)
        while sum(self.cache.pages_for(r.computed + 1) > self.cache.held(r) for r in decodes) > self.cache.free:
            victim = started.pop()
            decodes = [r for r in decodes if r is not victim]
            self.cache.release(victim)
            victim.computed, victim.place, victim.decoding = 0, 0, False
            self.preemptions += 1
            paused = True
        return paused

    def _fitting(self, generating: list[NaiveRequest], contexts: list[NaiveRequest]) -> list[NaiveRequest]:
        """Requests in the context phase that fit: those that have begun, then waiting ones until one does not."""
        cache, size = self.cache, self.cache.page * self.cache.node_pages
        guaranteed = self.settings.capacity != "max_utilization"
        begun = [r for r in [*generating, *contexts] if not r.ending]
        reserved = sum(max(self._to_completion(r) - cache.held(r), 0) for r in begun) if guaranteed else 0
        contributed = {self._first_new(r, r.computed // size) for r in contexts} | self.in_flight
        fitting, count = list(contexts), len(generating) + len(contexts)
        budget = self.settings.max_num_tokens - sum(not r.ending for r in generating)
        budget -= sum(r.tokens - r.computed for r in contexts)
        for request in [r for r in self.requests.values() if not r.place and not r.ending]:
            if count >= self.settings.max_batch_size:
                break
            nodes = cache.match(request, request.tokens - 1) if self.settings.reuse else 0
            if self.settings.reuse and self._first_new(request, nodes) in contributed:
                continue
            cached = nodes * size
            total = self._to_completion(request) if guaranteed else cache.pages_for(request.tokens)
            needed = total - nodes * cache.node_pages
            if needed > cache.free - cache.idle(request, nodes) - reserved:
                break
            if not self.settings.chunking and request.tokens - cached > budget:
                break
            self.begin_request(request, nodes)
            cache.take(request, request.tokens)
            reserved += max(total - cache.held(request), 0) if guaranteed else 0
            contributed.add(self._first_new(request, nodes))
            fitting.append(request)
            budget -= request.tokens - cached
            count += 1
        return fitting

    def _to_completion(self, request: NaiveRequest) -> int:
        return min(self.cache.pages_for(request.prompt + request.limit), self.cache.pages)

    def _first_new(self, request: NaiveRequest, nodes: int) -> int:
        """The first id that a request computes, or a number of its own."""
        return request.ids[nodes] if nodes < len(request.ids) else -1 - request.id

    # -- micro-batch -------------------------------------------------------------------------------------------------

    def _chunks(self, remaining: list[int], capacity: int) -> list[int]:
        unit = self.settings.tokens_per_block
        if sum(remaining) <= capacity or not self.settings.chunking:
            return remaining
        chunks = [0] * len(remaining)
        if self.settings.chunking == "fcfs":
            for i, tokens in enumerate(remaining):
                chunks[i] = min(tokens, capacity)
                if chunks[i] < tokens:
                    chunks[i] -= chunks[i] % unit
                capacity -= chunks[i]
            return chunks
        while True:
            before = sum(chunks)
            for i, tokens in enumerate(remaining):
                grown = min(chunks[i] + unit, tokens)
                if sum(chunks) + grown - chunks[i] <= capacity:
                    chunks[i] = grown
            if sum(chunks) == before:
                return chunks

    def _waits(self, decodes: int, tokens: int) -> bool:
        """True if context requests of a step with generation requests wait for more (`_waiting_requests`)."""
        settings = self.settings
        if not decodes or not tokens:
            return False
        enough = decodes + tokens >= settings.batch_wait_max_tokens_ratio * settings.max_num_tokens
        if enough or self.waited >= settings.batch_wait_timeout_iters:
            self.waited = 0
            return False
        self.waited += 1
        return True

    def schedule(self, batch: NaiveBatch, request: NaiveRequest, tokens: int) -> None:
        if not request.decoding:
            self.in_flight.add(self._first_new(request, request.computed // (self.cache.page * self.cache.node_pages)))
        super().schedule(batch, request, tokens)

    # -- what a step leaves ------------------------------------------------------------------------------------------

    def end(self, batch: NaiveBatch, stopped: list[int]) -> list[tuple[int, int]]:
        self.ended = batch.number
        size = self.cache.page * self.cache.node_pages
        for id, new, context in batch.chunks:
            request = self.requests[id]
            self.in_flight.discard(self._first_new(request, context // size))
            if request.place and self.settings.reuse:
                self.cache.insert(request, context + new)
        leaving = self.leaving(batch, stopped)
        for id, tokens in leaving.items():
            request = self.requests.pop(id)
            known = min(request.computed, request.prompt + tokens - 1)
            self.cache.release(request, known if self.settings.reuse else 0)
        return list(leaving.items())
