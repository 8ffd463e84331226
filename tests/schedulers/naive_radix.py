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
class Node:
    """Pages of one id: how many requests hold them, and when they were last given back."""

    users: int = 0
    freed: int = 0


@dataclass(eq=False)
class NaiveRequest:
    """`nodes` have pages that it shares, `private` are its own, `computed` tokens in both; `known`: when admitted."""

    id: int
    prompt: int
    limit: int
    ids: Path
    nodes: list[Node] = field(default_factory=list)
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

    def __init__(self, pages: int, page: int, node_pages: int, *, merges: bool = True) -> None:
        self.pages, self.page, self.node_pages, self.merges = pages, page, node_pages, merges
        self.cached: dict[Path, list[Node]] = {}
        self.unshared: dict[int, int] = {}  # pages full of tokens that nobody else has, by when they were given back
        self.private = self.clock = 0

    @property
    def free(self) -> int:
        return self.pages - self.private - self.node_pages * sum(node.users > 0 for _, node in self._nodes())

    def _nodes(self) -> list[tuple[Path, Node]]:
        return [(path, node) for path, nodes in self.cached.items() for node in nodes]

    def pages_for(self, tokens: int) -> int:
        return (tokens + self.page - 1) // self.page

    def held(self, request: NaiveRequest) -> int:
        return len(request.nodes) * self.node_pages + request.private

    def match(self, request: NaiveRequest, tokens: int) -> int:
        """Ids of a request that are cached, within its first `tokens` tokens."""
        most, found = min(tokens // (self.page * self.node_pages), len(request.ids)), 0
        while found < most and request.ids[: found + 1] in self.cached:
            found += 1
        return found

    def idle(self, request: NaiveRequest, nodes: int) -> int:
        """Pages of a request's first ids that no request holds."""
        return self.node_pages * sum(not self.cached[request.ids[: i + 1]][0].users for i in range(nodes))

    def hold(self, request: NaiveRequest, nodes: int) -> None:
        for i in range(len(request.nodes), nodes):
            self._give(request, self.cached[request.ids[: i + 1]][0])

    def _give(self, request: NaiveRequest, node: Node) -> None:
        node.users += 1
        request.nodes.append(node)

    def take(self, request: NaiveRequest, tokens: int) -> None:
        """Give a request pages for its first `tokens` tokens. Where blank ones are short, the oldest content goes."""
        need = max(self.pages_for(tokens) - self.held(request), 0)
        assert need <= self.free
        while self._blank() < need:
            idle = [(node.freed, path, node) for path, node in self._nodes() if not node.users]
            run = min(self.unshared, default=self.clock + 1)
            if not idle or run < min(idle)[0]:
                self.unshared[run] -= 1
                if not self.unshared[run]:
                    del self.unshared[run]
            else:
                self._evict(*min(idle)[1:])
        request.private += need
        self.private += need

    def _evict(self, path: Path, node: Node) -> None:
        self.cached[path].remove(node)
        if not self.cached[path]:
            del self.cached[path]

    def evict_all(self) -> None:
        """Forget all pages that no request holds."""
        for path, node in self._nodes():
            if not node.users:
                self._evict(path, node)
        self.unshared.clear()

    def _blank(self) -> int:
        """Pages without any content."""
        return self.pages - self.private - self.node_pages * len(self._nodes()) - sum(self.unshared.values())

    def insert(self, request: NaiveRequest, tokens: int) -> None:
        """Cache the ids of the first `tokens` tokens. Of ids that are cached already, its own pages are given up, or
        become a copy, which is found when the pages before it are evicted.
        """
        for i in range(len(request.nodes), min(tokens // (self.page * self.node_pages), len(request.ids))):
            nodes = self.cached.setdefault(request.ids[: i + 1], [])
            if not (nodes and self.merges):
                nodes.append(Node())
            self._give(request, nodes[-1])
            request.private -= self.node_pages
            self.private -= self.node_pages

    def release(self, request: NaiveRequest, tokens: int = 0) -> None:
        """Give back all pages, the last ids first. Pages that the first `tokens` tokens fill keep their content."""
        full = tokens // self.page - len(request.nodes) * self.node_pages
        if full > 0:
            self.clock += 1
            self.unshared[self.clock] = full
        while request.nodes:
            node = request.nodes.pop()
            node.users -= 1
            self.clock += 1
            node.freed = self.clock
        self.private -= request.private
        request.private = 0

    def check(self) -> None:
        assert all(path[:-1] in self.cached for path in self.cached if len(path) > 1)
        assert self._blank() >= 0


class NaiveEngine:
    """The common part of oracles: a cache, requests by id, and counters."""

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
