"""A radix cache for oracles: which ids of prefixes are cached, who holds them, and when they were last given back."""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[int, ...]


@dataclass
class NaiveBatch:
    """One step: (request, tokens, context) of the chunks, (request, cached tokens) of the decodes, who ends with it."""

    number: int
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    decodes: list[tuple[int, int]] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)


@dataclass(eq=False)
class NaiveRequest:
    """`nodes`: ids that it shares; `private`: pages of its own; `computed`: tokens in both. `known`: when admitted."""

    id: int
    prompt: int
    limit: int
    ids: Path
    nodes: int = 0
    private: int = 0
    computed: int = 0
    generated: int = 0
    known: int = 0
    place: int = 0
    given_at: list[int] = field(default_factory=list)
    decoding: bool = False
    ending: bool = False
    gone: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


def give_tokens(batch: NaiveBatch, requests: dict[int, NaiveRequest]) -> None:
    """Give a token to each request of a batch whose tokens are all computed; those at their limit end with it."""
    for id in [id for id, _ in batch.decodes] + [id for id, _, _ in batch.chunks]:
        request = requests[id]
        if request.computed == request.tokens:
            request.generated += 1
            request.given_at.append(batch.number)
            request.decoding = True
            request.ending = request.generated >= request.limit
            if request.ending:
                batch.ending.append(id)


class NaiveRadix:
    """`pages` pages of `page` tokens; `node_pages` of them make one id. Free nodes go least recently used first."""

    def __init__(self, pages: int, page: int, node_pages: int) -> None:
        self.pages, self.page, self.node_pages = pages, page, node_pages
        self.users: dict[Path, int] = {}
        self.freed: dict[Path, int] = {}
        self.unshared: dict[int, int] = {}  # pages full of tokens that nobody else has, by when they were given back
        self.private = self.clock = 0

    @property
    def free(self) -> int:
        return self.pages - self.private - self.node_pages * sum(users > 0 for users in self.users.values())

    def pages_for(self, tokens: int) -> int:
        return (tokens + self.page - 1) // self.page

    def held(self, request: NaiveRequest) -> int:
        return request.nodes * self.node_pages + request.private

    def match(self, request: NaiveRequest, tokens: int) -> int:
        """Ids of a request that are cached, within its first `tokens` tokens."""
        most, found = min(tokens // (self.page * self.node_pages), len(request.ids)), 0
        while found < most and request.ids[: found + 1] in self.users:
            found += 1
        return found

    def idle(self, request: NaiveRequest, nodes: int) -> int:
        """Pages of a request's first ids that no request holds."""
        return self.node_pages * sum(not self.users[request.ids[: i + 1]] for i in range(nodes))

    def hold(self, request: NaiveRequest, nodes: int) -> None:
        for i in range(request.nodes, nodes):
            self.users[request.ids[: i + 1]] += 1
        request.nodes = nodes

    def take(self, request: NaiveRequest, tokens: int) -> None:
        """Give a request pages for its first `tokens` tokens. Where blank ones are short, the oldest content goes."""
        need = max(self.pages_for(tokens) - self.held(request), 0)
        assert need <= self.free
        while self._blank() < need:
            oldest = min((path for path, users in self.users.items() if not users), key=self.freed.get, default=())
            run = min(self.unshared, default=self.clock + 1)
            if run < (self.freed[oldest] if oldest else self.clock + 1):
                self.unshared[run] -= 1
                if not self.unshared[run]:
                    del self.unshared[run]
            else:
                del self.users[oldest]
        request.private += need
        self.private += need

    def evict_all(self) -> None:
        """Forget all pages that no request holds."""
        self.users = {path: users for path, users in self.users.items() if users}
        self.unshared.clear()

    def _blank(self) -> int:
        """Pages without any content."""
        return self.pages - self.private - self.node_pages * len(self.users) - sum(self.unshared.values())

    def insert(self, request: NaiveRequest, tokens: int) -> None:
        """Cache the ids of the first `tokens` tokens; of ids that are cached already, its own pages are given up."""
        for i in range(request.nodes, min(tokens // (self.page * self.node_pages), len(request.ids))):
            path = request.ids[: i + 1]
            self.users[path] = self.users.get(path, 0) + 1
            request.nodes += 1
            request.private -= self.node_pages
            self.private -= self.node_pages

    def release(self, request: NaiveRequest, tokens: int = 0) -> None:
        """Give back all pages, the last ids first. Pages that the first `tokens` tokens fill keep their content."""
        full = tokens // self.page - request.nodes * self.node_pages
        if full > 0:
            self.clock += 1
            self.unshared[self.clock] = full
        for i in reversed(range(request.nodes)):
            path = request.ids[: i + 1]
            self.users[path] -= 1
            self.clock += 1
            self.freed[path] = self.clock
        self.private -= request.private
        request.nodes = request.private = 0

    def check(self) -> None:
        assert all(path[:-1] in self.users for path in self.users if len(path) > 1)
        assert self._blank() >= 0


class NaiveEngine:
    """What the oracles have in common: a cache, requests by id, and counters."""

    def __init__(self, cache: NaiveRadix) -> None:
        self.cache = cache
        self.requests: dict[int, NaiveRequest] = {}
        self.steps = self.ended = self.preemptions = self.admissions = 0

    @property
    def free(self) -> int:
        return self.cache.free

    def check(self) -> None:
        self.cache.check()

    def begin_request(self, request: NaiveRequest, nodes: int) -> None:
        """Admit a request that finds these ids of its prefix cached."""
        self.cache.hold(request, nodes)
        request.computed = nodes * self.cache.page * self.cache.node_pages
        self.admissions += 1
        request.known, request.place = request.tokens, self.admissions

    def schedule(self, batch: NaiveBatch, request: NaiveRequest, tokens: int) -> None:
        context = request.computed
        request.computed += tokens
        self.cache.take(request, request.computed)
        if request.decoding:
            batch.decodes.append((request.id, request.computed))
        else:
            batch.chunks.append((request.id, tokens, context))

    def leaving(self, batch: NaiveBatch, stopped: list[int]) -> dict[int, int]:
        """Requests that end with a step, oldest admission first, and the tokens that they have."""
        ids = [id for id in batch.ending + stopped if id in self.requests]
        ids.sort(key=lambda id: self.requests[id].place)
        return {id: sum(step <= batch.number for step in self.requests[id].given_at) for id in ids}
