"""Records of requests under way, and columns of those that have finished; of shed requests, sessions and prompts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from workloads.trace import BlockStream

if TYPE_CHECKING:
    from workloads.request import Request
    from workloads.sessions import Prompt

UNSET: Final = -1.0
"""The value of a time that has not come yet."""

PART: Final = 1 << 14
"""Finished requests that are handed to a sink at a time."""

Sink = Callable[[dict[str, Any]], None]
"""Called with columns of one length by name."""


class RequestRecord:
    """One request from the client's side. Times are in seconds, `UNSET` while they have not come.

    Attributes:
        request: what the client sent. answer_tokens: the true length of the answer, which no scheduler sees.
        queued: when an engine's scheduler got it. scheduled: when its first step began. first_token, last_token: when
            the steps ended that computed these tokens.
        output_tokens: tokens of the answer. cached_tokens: prompt tokens supplied by the prefix cache.
        retries: how often its client sent it again after it was shed.
        preemptions: how often it was preempted. attempts: how many engines failed while they served it.
        replica: name of the engine that finished it. delivered: output tokens that earlier engines computed.
    """

    __slots__ = (
        "answer_tokens", "attempts", "cached_tokens", "delivered", "first_token", "last_token", "output_tokens",
        "preemptions", "queued", "replica", "request", "retries", "scheduled",
    )  # fmt: skip

    def __init__(self, request: Request, answer_tokens: int) -> None:
        self.request = request
        self.answer_tokens = answer_tokens
        self.queued = self.scheduled = self.first_token = self.last_token = UNSET
        self.output_tokens = self.cached_tokens = self.preemptions = self.attempts = self.delivered = 0
        self.retries = 0
        self.replica = ""


KEPT_COLUMNS: Final[tuple[str, ...]] = ("arrival", "queued", "first_token", "last_token", "output_tokens", "one_shot")
"""Columns that the summary needs."""

DETAILS: Final[tuple[str, ...]] = (
    "scheduled", "id", "prompt_tokens", "cached_tokens", "preemptions", "attempts", "kind", "replica",
)  # fmt: skip
"""The other columns, of a run with detail. Of these, `kind` and `replica` stay in memory, for latencies by class and
pool."""

TABLE: Final[tuple[str, ...]] = (
    "id", "arrival", "queued", "scheduled", "first_token", "last_token", "prompt_tokens", "output_tokens",
    "cached_tokens", "preemptions", "attempts", "one_shot", "kind", "replica",
)  # fmt: skip
"""The columns of a table of requests, in order; `kind` as `model`."""

CLIENT_COLUMNS: Final[tuple[str, ...]] = ("client", "started", "tokens")
"""Columns of a run whose requests have classes or tenants, kept in memory: whose each is, when its first step began,
and its prompt tokens."""


class Columns:
    """Columns of the finished requests: a few numbers each, so that a million requests fit into memory.

    Without `detail` only the columns that the summary needs are filled. With a `sink` the others leave memory in parts.
    `kind`, `replica` and `client` hold indices into `kinds`, pairs of model and task, `replicas`, and `clients`.

    Args:
        clients: pairs of service class and tenant that requests are of; empty if they have neither.
        sink: called with the `table` of every `PART` finished requests, and with the rest by `flush`.
        after_part: called after every `PART` finished requests.
    """

    def __init__(
        self,
        *,
        detail: bool,
        sink: Sink | None = None,
        after_part: Callable[[], None] = lambda: None,
        clients: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.detail = detail
        self.sink = sink
        self._after_part = after_part
        self._room = PART
        self.arrival = array("d")
        self.queued = array("d")
        self.scheduled = array("d")
        self.first_token = array("d")
        self.last_token = array("d")
        self.id = array("q")
        self.prompt_tokens = array("q")
        self.output_tokens = array("i")
        self.cached_tokens = array("q")
        self.preemptions = array("i")
        self.attempts = array("i")
        self.kind = array("i")
        self.replica = array("i")
        self.one_shot = array("b")
        self.kinds: dict[tuple[str, str], int] = {}
        self.replicas: dict[str, int] = {}
        self.clients = {client: i for i, client in enumerate(clients)}
        self.client = array("i")
        self.started = array("d")
        self.tokens = array("q")

    def add(self, record: RequestRecord) -> None:
        request = record.request
        self.arrival.append(request.arrival)
        self.queued.append(record.queued)
        self.first_token.append(record.first_token)
        self.last_token.append(record.last_token)
        self.output_tokens.append(record.output_tokens)
        self.one_shot.append(request.one_shot)
        if self.detail:
            self.scheduled.append(record.scheduled)
            self.id.append(request.id)
            self.prompt_tokens.append(request.prompt_tokens)
            self.cached_tokens.append(record.cached_tokens)
            self.preemptions.append(record.preemptions)
            self.attempts.append(record.attempts)
            self.kind.append(self.kinds.setdefault((request.model, request.task), len(self.kinds)))
            self.replica.append(self.replicas.setdefault(record.replica, len(self.replicas)))
        if self.clients:
            self.client.append(self.clients[request.service_class, request.tenant])
            self.started.append(record.scheduled)
            self.tokens.append(request.prompt_tokens)
        self._room -= 1
        if not self._room:
            self._end_part()

    @property
    def _kept(self) -> tuple[str, ...]:
        """Columns that stay in memory."""
        return KEPT_COLUMNS + CLIENT_COLUMNS if self.clients else KEPT_COLUMNS

    def _end_part(self) -> None:
        self._room = PART
        self.flush()
        self._after_part()

    def take(self) -> dict[str, NDArray[Any]]:
        """Move all rows out, as arrays by the names of the columns. Needs detail, and no sink."""
        rows = {
            name: np.array(getattr(self, name), dtype=getattr(self, name).typecode) for name in self._kept + DETAILS
        }
        for name in rows:
            del getattr(self, name)[:]
        return rows

    def extend(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Add rows that `take` has given; their models and replicas are those of these columns."""
        first, after = 0, len(rows["arrival"])
        while first < after:
            last = min(first + self._room, after)
            for name in self._kept + DETAILS if self.detail else self._kept:
                getattr(self, name).frombytes(rows[name][first:last].tobytes())
            self._room -= last - first
            first = last
            if not self._room:
                self._end_part()

    def flush(self) -> None:
        """Hand the requests that the sink does not have yet to it, and keep what the summary and the classes need."""
        sink = self.sink
        if sink is None or not self.id:
            return
        sink(self.table())
        for name in DETAILS:
            if name not in ("kind", "replica"):
                del getattr(self, name)[:]

    def table(self) -> dict[str, Any]:
        """All columns by name, in the order in which requests finished; models and replicas by name.

        Of requests that a sink has been given, there are no rows.
        """
        rows = len(self.id)

        columns: dict[str, Any] = {}
        for name in TABLE:
            values = np.frombuffer(getattr(self, name), dtype=getattr(self, name).typecode)
            columns[name] = values[len(values) - rows :].astype(np.float64 if values.dtype == "d" else np.int64)
        columns["one_shot"] = columns["one_shot"].astype(bool)
        columns["model"] = np.array([model for model, _ in self.kinds])[columns.pop("kind")]
        columns["replica"] = np.array(list(self.replicas))[columns.pop("replica")]
        return columns | self.client_table(rows) if self.clients else columns

    def client_table(self, rows: int | None = None) -> dict[str, Any]:
        """Service class and tenant of the last `rows` requests, or of all; empty if they have neither."""
        if not self.clients:
            return {}
        classes, tenants = (np.array(names) for names in zip(*self.clients, strict=True))
        client = np.frombuffer(self.client, dtype=self.client.typecode)
        client = client if rows is None else client[len(client) - rows :]
        return {"service_class": classes[client], "tenant": tenants[client]}


class ShedLog:
    """The requests that were shed for good.

    Attributes:
        arrival, ended, client: of each: when it was sent first and shed last, seconds, and its class and tenant as an
            index into `clients`. retries: requests sent again. reasons: refusals by the limit that was reached.
    """

    def __init__(self, clients: Iterable[tuple[str, str]]) -> None:
        self.arrival = array("d")
        self.ended = array("d")
        self.client = array("i")
        self.clients = {client: i for i, client in enumerate(clients)}
        self.retries = 0
        self.reasons: Counter[str] = Counter()

    def add(self, record: RequestRecord, now: float) -> None:
        """Add a request whose client gives up."""
        request = record.request
        self.arrival.append(request.arrival)
        self.ended.append(now)
        self.client.append(self.clients.get((request.service_class, request.tenant), 0))


class SessionRecord:
    """A session under way, or finished.

    Attributes:
        id: its number. start, end: when its first request was sent and its last answer was complete, seconds.
        turn: rounds sent so far.
        unanswered: requests of this round without an answer. sent: when this round was sent.
        waited: seconds of finished rounds, from the sending of a round to its last answer.
        requests, prompt_tokens, resent_tokens, resent_cached_tokens: sums over its requests.
    """

    __slots__ = (
        "end", "id", "prompt_tokens", "requests", "resent_cached_tokens", "resent_tokens", "sent", "start", "turn",
        "unanswered", "waited",
    )  # fmt: skip

    def __init__(self, id: int, start: float) -> None:
        self.id = id
        self.start = start
        self.sent = start
        self.turn = self.unanswered = self.requests = 0
        self.prompt_tokens = self.resent_tokens = self.resent_cached_tokens = 0
        self.waited = self.end = 0.0

    def send(self, now: float, requests: int) -> None:
        """Count a round of `requests` requests that is sent now."""
        self.turn += 1
        self.sent = now
        self.unanswered = requests

    def answer(self, now: float, prompt: Prompt, cached_tokens: int) -> bool:
        """Count an answer to a prompt of which the cache supplied `cached_tokens`; whether it ends the round."""
        self.requests += 1
        self.prompt_tokens += prompt.tokens
        self.resent_tokens += prompt.resent_tokens
        self.resent_cached_tokens += min(cached_tokens, prompt.resent_tokens)
        self.unanswered -= 1
        if not self.unanswered:
            self.waited += now - self.sent
        return not self.unanswered

    def add_sub_agent(self, record: SessionRecord) -> None:
        """Count the requests of a sub-agent that has ended. Its turns and waits are not those of the session."""
        self.requests += record.requests
        self.prompt_tokens += record.prompt_tokens
        self.resent_tokens += record.resent_tokens
        self.resent_cached_tokens += record.resent_cached_tokens


class SessionLog:
    """The finished sessions, in the order in which they ended, and the session and round of each request.

    Attributes:
        finished: the sessions. session_of, turn_of: of each request by its id, its session, and the number of its round
            from 0; with detail alone.
    """

    def __init__(self, *, detail: bool) -> None:
        self.detail = detail
        self.finished: list[SessionRecord] = []
        self.session_of = array("q")
        self.turn_of = array("q")

    def sent(self, record: SessionRecord) -> None:
        """Note a request that is sent; ids count up from 0."""
        if self.detail:
            self.session_of.append(record.id)
            self.turn_of.append(record.turn - 1)

    def add(self, record: SessionRecord, end: float) -> None:
        """Add a session that has ended."""
        record.end = end
        self.finished.append(record)

    def columns_of(self, ids: Any) -> dict[str, Any]:
        """The columns `session` and `turn` of requests by their ids, shape (n,). Needs detail."""
        session, turn = np.array(self.session_of, dtype=np.int64), np.array(self.turn_of, dtype=np.int64)
        return {"session": session[ids], "turn": turn[ids]}


CachedPrompt = tuple[float, float, tuple[int, ...], int, int]
"""A finished request: begin of its first step and end of its last, seconds; prefix ids; prompt and output tokens."""


class PrefixReuse:
    """The prompts of a run, from which bounds of its prefix caches are computed.

    Attributes:
        node_tokens: prompt tokens of one prefix id.
        capacities: ids that the caches hold on `device`, and in `all` tiers together.
        cached_tokens: prompt tokens that caches supplied to requests when they began.
    """

    def __init__(self, node_tokens: int, capacities: dict[str, int]) -> None:
        self.node_tokens = node_tokens
        self.capacities = capacities
        self.cached_tokens = 0
        self._prompts: list[CachedPrompt] = []

    def add(self, record: RequestRecord) -> None:
        request = record.request
        self.cached_tokens += record.cached_tokens
        tokens = request.prompt_tokens, record.output_tokens
        self._prompts.append((record.scheduled, record.last_token, request.prefix_blocks, *tokens))

    def stream(self) -> BlockStream:
        """The blocks in the order of time: looked up when a request begins, left behind when it ends."""
        turns: list[tuple[float, int, int]] = []
        for number, (begin, end, *_) in enumerate(self._prompts):
            turns += [(begin, 1, number), (end, 0, number)]
        stream, size = BlockStream(), self.node_tokens
        for _, begins, number in sorted(turns):
            _, _, ids, prompt_tokens, output_tokens = self._prompts[number]
            if begins:
                blocks, lookups = prompt_tokens // size, (prompt_tokens - 1) // size
            else:  # the last token of an answer has no KV cache
                blocks, lookups = (prompt_tokens + max(output_tokens - 1, 0)) // size, 0
            ids = ids[:blocks]
            stream.add(ids, min(lookups, len(ids)))
        return stream

    def summary(self) -> dict[str, Any]:
        """Shares of all prompt tokens: those that caches supplied, and bounds for one cache of the same size.

        `lru` evicts the least recently used block, `belady` knows what is needed next, `infinite` evicts nothing.
        """
        stream, prompts = self.stream(), sum(prompt[3] for prompt in self._prompts)
        if not prompts:
            return {"hit_rate": None}

        def share(blocks: int) -> float:
            return blocks * self.node_tokens / prompts

        bounds = {
            name: {"lru": share(int(stream.lru_hits([size])[0])), "belady": share(stream.belady_hits(size))}
            for name, size in self.capacities.items()
        }
        return {"hit_rate": self.cached_tokens / prompts, **bounds, "infinite": share(stream.infinite_hits())}
