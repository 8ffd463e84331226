"""Records of requests: one of each under way, and columns of those that have finished."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from twin.serving.records.engine_log import numbers

if TYPE_CHECKING:
    from workloads.request import Request


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
        rows = {name: numbers(getattr(self, name)) for name in self._kept + DETAILS}
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

        def column(values: array[Any]) -> Any:
            rows_of_column = np.frombuffer(values, dtype=values.typecode)[len(values) - rows :]
            return rows_of_column.astype(np.float64 if values.typecode == "d" else np.int64)

        plain = (
            "id", "arrival", "queued", "scheduled", "first_token", "last_token", "prompt_tokens", "output_tokens",
            "cached_tokens", "preemptions", "attempts",
        )  # fmt: skip
        models, replicas = np.array([model for model, _ in self.kinds]), np.array(list(self.replicas))
        columns = {name: column(getattr(self, name)) for name in plain} | {
            "one_shot": column(self.one_shot).astype(bool),
            "model": models[column(self.kind)],
            "replica": replicas[column(self.replica)],
        }
        return columns | self.client_table(rows)

    def client_table(self, rows: int | None = None) -> dict[str, Any]:
        """Service class and tenant of the last `rows` requests, or of all; empty if they have neither."""
        if not self.clients:
            return {}
        classes, tenants = (np.array(names) for names in zip(*self.clients, strict=True))
        client = np.frombuffer(self.client, dtype=self.client.typecode)
        client = client if rows is None else client[len(client) - rows :]
        return {"service_class": classes[client], "tenant": tenants[client]}
