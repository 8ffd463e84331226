"""An oracle for `EngineCore`: vLLM V1's scheduler with physical block ids, slow and obvious.

Each request has a block table; free blocks stand in a double-ended queue, least recently used first; a map goes from
the content of a block to its id. Every step walks every request. It knows the order first come, first served and no
execution classes, and it shares no code with `schedulers`.

What a block holds is named by `("prompt", ids of the path, which block of the last id)` or, for tokens that have no id,
by `("own", request, which block of it)`, which nobody but that request can ask for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

Content = tuple[object, ...]


@dataclass(frozen=True)
class Settings:
    """Blocks, limits and what is shared when. `id_blocks` blocks of `block_tokens` tokens make one prefix id."""

    blocks: int
    block_tokens: int
    id_blocks: int = 1
    max_tokens: int = 64
    max_seqs: int = 8
    caching: bool = True
    share_when_scheduled: bool = True


@dataclass(eq=False)
class NaiveRequest:
    """`table`: its blocks, of which the first `shared` are findable by others. `computed`: tokens in them.

    `ids` beyond the prompt are those of the answer, whose blocks are findable as soon as they are full of known tokens,
    or once it has left where blocks are shared when they are computed.
    `known`: tokens that it had at its latest admission, which was number `place`.
    """

    id: int
    prompt: int
    limit: int
    ids: tuple[int, ...]
    table: list[int] = field(default_factory=list)
    shared: int = 0
    computed: int = 0
    generated: int = 0
    known: int = 0
    place: int = 0
    given_at: list[int] = field(default_factory=list)
    decoding: bool = False
    ending: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


@dataclass
class NaiveBatch:
    """One step: (request, tokens, context) of the chunks, (request, cached tokens) of the decodes, who ends with it."""

    number: int
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    decodes: list[tuple[int, int]] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)


class Blocks:
    """Physical blocks: `users` of each, the queue of those without any, and which content is where."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.free = deque(range(settings.blocks))
        self.users = [0] * settings.blocks
        self.where: dict[Content, list[int]] = {}  # equal blocks in the order of their naming; the first is found
        self.what: dict[int, Content] = {}
        self.parts: dict[int, list[int]] = {}  # the blocks of the same id

    def pop(self) -> int:
        """The first free block, its content forgotten."""
        block = self.free.popleft()
        for part in self.parts.get(block, [block]):  # an id is findable as a whole or not at all
            self.forget(part)
        self.users[block] = 1
        return block

    def touch(self, block: int) -> None:
        """One user more; a free block leaves the middle of the queue."""
        if not self.users[block]:
            self.free.remove(block)
        self.users[block] += 1

    def give_back(self, block: int) -> None:
        """One user less; a free block that nobody can find is taken next."""
        self.users[block] -= 1
        if not self.users[block]:
            if block in self.what:
                self.free.append(block)
            else:
                self.free.appendleft(block)

    def name(self, blocks: list[int], contents: list[Content]) -> None:
        """Make blocks findable by their content, together."""
        for block, content in zip(blocks, contents, strict=True):
            self.forget(block)
            self.where.setdefault(content, []).append(block)
            self.what[block] = content
            self.parts[block] = blocks

    def forget(self, block: int) -> None:
        content = self.what.pop(block, None)
        if content is not None:
            del self.parts[block]
            self.where[content].remove(block)
            if not self.where[content]:
                del self.where[content]


class NaiveEngine:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.blocks = Blocks(settings)
        self.requests: dict[int, NaiveRequest] = {}
        self.waiting: deque[NaiveRequest] = deque()
        self.running: list[NaiveRequest] = []
        self.steps = self.ended = self.ahead = 0
        self.preemptions = self.admissions = 0

    @property
    def free(self) -> int:
        return len(self.blocks.free)

    def submit(self, id: int, prompt: int, limit: int, ids: tuple[int, ...]) -> None:
        request = NaiveRequest(id, prompt, limit, ids)
        self.requests[id] = request
        self.waiting.append(request)

    # -- one step ----------------------------------------------------------------------------------------------------

    def begin(self) -> NaiveBatch | None:
        batch = NaiveBatch(self.steps + 1)
        before = self.preemptions
        budget = self.settings.max_tokens
        for request in list(self.running):
            if request in self.running and not request.ending and budget > 0:
                budget -= self._go_on(batch, request, budget)
        while self.preemptions == before and self.waiting and budget > 0 and len(self.running) < self.settings.max_seqs:
            usage = self._admit(batch, self.waiting[0], budget)
            if not usage:
                break
            budget -= usage
        if not batch.chunks and not batch.decodes:
            return None
        self.ahead = self.steps - self.ended
        self.steps += 1
        self._give_tokens(batch)
        return batch

    def _go_on(self, batch: NaiveBatch, request: NaiveRequest, budget: int) -> int:
        """A running request's next tokens. Where blocks lack, the youngest goes, be it the request itself."""
        new = min(request.tokens - request.computed, budget)
        while len(request.table) + self.free < self._blocks_for(request.computed + new):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        self._schedule(batch, request, new)
        return new

    def _admit(self, batch: NaiveBatch, request: NaiveRequest, budget: int) -> int:
        result, shared = self._lookup(request)
        context = len(result) * self.settings.block_tokens
        new = min(request.tokens - context, budget)
        lacking = self._blocks_for(request.tokens) - len(result)  # all of it must fit
        idle = sum(not self.blocks.users[block] for block in result)
        if lacking + idle > self.free:
            return 0
        for block in result:
            self.blocks.touch(block)
        request.table = result
        request.shared = shared
        request.computed = context
        self._disown(request)
        self.admissions += 1
        request.known, request.place = request.tokens, self.admissions
        self.waiting.popleft()
        self.running.append(request)
        self._schedule(batch, request, new)
        return new

    def _schedule(self, batch: NaiveBatch, request: NaiveRequest, new: int) -> None:
        context = request.computed
        request.computed += new
        while len(request.table) < self._blocks_for(request.computed):
            request.table.append(self.blocks.pop())
        if request.decoding:
            batch.decodes.append((request.id, request.computed))
            if self.settings.share_when_scheduled:
                self._publish(request, request.computed - self._in_flight(request))
            return
        batch.chunks.append((request.id, new, context))
        if self.settings.share_when_scheduled:
            self._publish(request, request.computed)

    def _give_tokens(self, batch: NaiveBatch) -> None:
        for id in [id for id, _ in batch.decodes] + [id for id, _, _ in batch.chunks]:
            request = self.requests[id]
            if request.computed == request.tokens:
                request.generated += 1
                request.given_at.append(batch.number)
                request.decoding = True
                request.ending = request.generated >= request.limit
                if request.ending:
                    batch.ending.append(id)

    def end(self, batch: NaiveBatch, stopped: list[int]) -> list[tuple[int, int]]:
        """(request, tokens that it got) of those that leave."""
        self.ended = batch.number
        if not self.settings.share_when_scheduled:
            for id, new, context in batch.chunks:
                if id in self.requests and self.requests[id] in self.running:
                    self._publish(self.requests[id], context + new)
        leaving = {
            id: sum(step <= batch.number for step in self.requests[id].given_at)
            for id in batch.ending + stopped
            if id in self.requests
        }
        for request in sorted((self.requests[id] for id in leaving), key=lambda request: request.place):
            self._leave(request, min(request.computed, request.prompt + leaving[request.id] - 1))
        return list(leaving.items())

    def abort(self, id: int) -> None:
        self._leave(self.requests[id], self._hashed(self.requests[id]))

    def _in_flight(self, request: NaiveRequest) -> int:
        """Tokens of a request that steps in flight compute."""
        return sum(step > self.ended for step in request.given_at)

    def _hashed(self, request: NaiveRequest) -> int:
        """Computed tokens of a request that were known when its latest step began, or are now."""
        unknown = min(self._in_flight(request), self.ahead)
        return max(request.computed - unknown, min(request.computed, request.known))

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return (tokens + self.settings.block_tokens - 1) // self.settings.block_tokens

    def _path(self, request: NaiveRequest, i: int) -> Content:
        """The content of a request's i-th block, for all to find."""
        last, part = divmod(i, self.settings.id_blocks)
        return "prompt", request.ids[: last + 1], part

    def _lookup(self, request: NaiveRequest) -> tuple[list[int], int]:
        """Blocks that hold what the request starts with, and how many of them are shared; its last token is never
        found."""
        results: list[int] = []
        where, maximum = self.blocks.where, (request.tokens - 1) // self.settings.block_tokens
        most_shared = min(maximum // self.settings.id_blocks, len(request.ids)) * self.settings.id_blocks
        while len(results) < most_shared and self._path(request, len(results)) in where:
            results.append(where[self._path(request, len(results))][0])
        shared = len(results)
        while len(results) < maximum and ("own", request.id, len(results)) in where:
            results.append(where["own", request.id, len(results)][0])
        return results, shared

    def _publish(self, request: NaiveRequest, tokens: int) -> None:
        """Let others find whole ids of the first tokens."""
        size = self.settings.id_blocks
        total = min(tokens // (size * self.settings.block_tokens), len(request.ids))
        while self.settings.caching and request.shared < total * size:
            parts = range(request.shared, request.shared + size)
            self.blocks.name([request.table[i] for i in parts], [self._path(request, i) for i in parts])
            request.shared += size

    def _preempt(self, request: NaiveRequest) -> None:
        """Its blocks are free, but it may find its own full ones again when it comes back.

        One whose last token is being computed need not come back.
        """
        self.preemptions += 1
        self.running.remove(request)
        if not request.ending:
            self.waiting.appendleft(request)
        if self.settings.share_when_scheduled:
            self._publish(request, self._hashed(request))
        self._free_table(request, self._hashed(request))
        request.computed = request.shared = 0
        request.decoding = False

    def _free_table(self, request: NaiveRequest, tokens: int) -> None:
        """Free its blocks, the last first; those that its first `tokens` tokens fill have a content."""
        if self.settings.caching:
            for i in range(request.shared, min(tokens // self.settings.block_tokens, len(request.table))):
                self.blocks.name([request.table[i]], [("own", request.id, i)])
        for block in reversed(request.table):
            self.blocks.give_back(block)
        request.table = []

    def _disown(self, request: NaiveRequest) -> None:
        """Forget the names of blocks that no request can match any more."""
        for content in [content for content in self.blocks.where if content[:2] == ("own", request.id)]:
            for block in list(self.blocks.where[content]):
                self.blocks.forget(block)

    def _leave(self, request: NaiveRequest, tokens: int) -> None:
        """Take a request out; others can find its first `tokens` tokens, where it has ids for them."""
        size = len(request.ids) * self.settings.block_tokens * self.settings.id_blocks
        if request.decoding and size > request.prompt:
            self._publish(request, tokens)
        self._free_table(request, tokens)
        self._disown(request)
        del self.requests[request.id]
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def check(self) -> None:
        """Every block has as many users as tables that name it, and stands in the queue exactly when it has none."""
        users = [0] * self.settings.blocks
        for request in self.requests.values():
            assert len(set(request.table)) == len(request.table)
            for block in request.table:
                users[block] += 1
        assert users == self.blocks.users
        assert sorted(self.blocks.free) == [block for block, count in enumerate(users) if not count]
        assert {block: content for content, blocks in self.blocks.where.items() for block in blocks} == self.blocks.what
