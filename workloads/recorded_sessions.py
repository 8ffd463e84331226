"""The sessions of a trace: by its own session ids, or recovered from the ids of its prompts' blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from workloads.arrivals import Arrivals, ClosedLoop, Pauses, Replay
from workloads.checks import IntArray, number, whole
from workloads.errors import BadInput
from workloads.mixes import ModelMix
from workloads.sessions import Prompt, Round, Session
from workloads.trace import Trace

Source: TypeAlias = Literal["session_ids", "prefix_ids"]


@dataclass(frozen=True)
class RecordedSessions:
    """The sessions of a trace, each with its requests in order.

    `source` says how rows are put into sessions: by the trace's session ids, where a row without one is a session of
    its own; or by `sessions_by_prefix`.

    Without `think`, a request is sent at its recorded time, at `speed`, or when the answer before it in its session is
    complete, if that is later. With `think`, it follows that answer by a pause, and sessions begin by `arrivals`.

    A prompt that is at least as long as the earlier prompt and its answer repeats them, as far as block ids do not say
    otherwise; a shorter one begins a new context. Without block ids in the trace, blocks of `block_tokens` get ids.

    Raises `BadInput` for a trace that lacks session ids, prefix ids or times where they are needed.
    """

    trace: Trace
    source: Source
    think: Pauses | None = None
    speed: float = 1.0
    arrivals: Arrivals = field(default_factory=ClosedLoop)
    models: ModelMix | None = None
    max_tokens: int | None = None
    block_tokens: int = 16

    def __post_init__(self) -> None:
        trace = self.trace
        if self.max_tokens is not None:
            whole(self.max_tokens, "max_tokens", low=1)
        if self.source == "session_ids" and trace.sessions is None:
            raise BadInput("expected a trace with session ids", field="sessions.source", value=self.source)
        if self.source == "prefix_ids" and trace.prefix_blocks is None:
            raise BadInput("expected a trace with prefix ids", field="sessions.source", value=self.source)
        if self.think is None:
            if trace.arrivals is None:
                raise BadInput("expected a trace with arrival times", field="trace", value=trace.name)
            times = trace.arrivals / number(self.speed, "speed", low=1e-9, high=1e9)
            object.__setattr__(self, "arrivals", Replay(times))

    @property
    def prefix_block_tokens(self) -> int:
        """Prompt tokens that one id of `Request.prefix_blocks` stands for."""
        return self.trace.prefix_block_tokens or self.block_tokens

    @property
    def recorded(self) -> int:
        """Number of requests of the trace."""
        return len(self.trace)

    @property
    def random(self) -> tuple[str, ...]:
        """Those of think times, arrivals and models that depend on the generator that `sessions` gets."""
        parts = {
            "think_times": self.think is not None and not self.think.is_constant,
            "arrivals": self.arrivals.is_random,
            "models": self.models is not None and len(self.models.models) > 1,
        }
        return tuple(name for name, is_random in parts.items() if is_random)

    def sessions(self, rng: np.random.Generator, count: int) -> Iterator[Session]:
        """The sessions of the first `count` rows, in the order of their first requests.

        Raises `BadInput` for a count above `recorded`.
        """
        whole(count, "count", low=0)
        if count > self.recorded:
            raise BadInput(f"expected at most the {self.recorded} recorded requests", field="count", value=count)
        for_think, for_arrivals, for_models = rng.spawn(3)
        pause = (self.think or Pauses(0.0)).stream(for_think)
        times = None if self.think is None else self.arrivals.stream(for_arrivals)
        first_id = 0
        for index, rows in enumerate(self._rows(count)):
            recorded = 0.0 if times is not None else self._time(rows[0])
            arrival = recorded if times is None else float(times(1)[0])
            model = "default"
            if self.models is not None:
                model = self.models.models[int(self.models.sample(for_models, 1)[0])]
            yield Session(index, arrival, model, self._rounds(rows, pause, first_id))
            first_id += sum(self._blocks(row) + 1 for row in rows)

    def _rows(self, count: int) -> list[list[int]]:
        numbers = self.trace.sessions if self.source == "session_ids" else sessions_by_prefix(self.trace)
        assert numbers is not None
        sessions: dict[int, list[int]] = {}
        for row, session in enumerate(numbers[:count].tolist()):
            sessions.setdefault(session if session >= 0 else -1 - row, []).append(row)
        return list(sessions.values())

    def _rounds(self, rows: list[int], pause: Callable[[], float], first_id: int) -> Iterator[Round]:
        prompts = self._named(rows) if self.trace.prefix_blocks is not None else self._grown(rows, first_id)
        for row, prompt in zip(rows, prompts, strict=True):
            not_before = 0.0 if self.think is not None else self._time(row)
            yield Round((prompt,), pause(), not_before)

    def _named(self, rows: list[int]) -> Iterator[Prompt]:
        """Prompts whose blocks the trace names. The ids behind a prompt name the blocks of its answer."""
        blocks, size = self.trace.prefix_blocks, self.prefix_block_tokens
        assert blocks is not None
        context, context_ids = 0, tuple[int, ...]()
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            tokens, answer, limit = self._lengths(row)
            ids = blocks[row][: tokens // size]
            shared = _common(context_ids, ids)
            resent = context if shared == len(context_ids) and tokens >= context else shared * size
            if following is not None and continues(self.trace, row, following):
                ids = blocks[following][: (tokens + limit) // size]
            yield Prompt(tokens, resent, answer, limit, ids)
            context, context_ids = tokens + answer, ids[: (tokens + answer) // size]

    def _grown(self, rows: list[int], fresh: int) -> Iterator[Prompt]:
        """Prompts of a trace without block ids: each repeats what was said, unless it is shorter."""
        size, context = self.block_tokens, 0
        ids: tuple[int, ...] = ()
        for row in rows:
            tokens, answer, limit = self._lengths(row)
            if tokens < context:
                context, ids = 0, ()
            count = max((tokens + limit) // size - len(ids), 0)
            ids += tuple(range(fresh, fresh + count))
            fresh += count
            yield Prompt(tokens, context, answer, limit, ids)
            context = tokens + answer
            ids = ids[: context // size]

    def _lengths(self, row: int) -> tuple[int, int, int]:
        tokens, answer = int(self.trace.prefill_tokens[row]), int(self.trace.decode_tokens[row])
        if self.max_tokens is None:
            return tokens, answer, answer
        return tokens, min(answer, self.max_tokens), self.max_tokens

    def _blocks(self, row: int) -> int:
        tokens, _, limit = self._lengths(row)
        return (tokens + limit) // self.block_tokens

    def _time(self, row: int) -> float:
        assert isinstance(self.arrivals, Replay)
        return float(self.arrivals.recorded[row])


def continues(trace: Trace, row: int, following: int) -> bool:
    """Tell whether a row's prompt may repeat an earlier row's prompt and answer, by its length and its block ids."""
    blocks, size = trace.prefix_blocks, trace.prefix_block_tokens
    assert blocks is not None
    assert size is not None
    tokens = int(trace.prefill_tokens[row])
    whole_blocks = tokens // size
    longer = int(trace.prefill_tokens[following]) >= tokens + int(trace.decode_tokens[row])
    return longer and blocks[following][:whole_blocks] == blocks[row][:whole_blocks]


def sessions_by_prefix(trace: Trace) -> IntArray:
    """The session of each row of a trace without session ids, recovered from the ids of its blocks, shape (n,).

    A row continues the latest earlier one whose whole blocks begin its own, if it is long enough to hold that row's
    prompt and answer. Only rows whose last whole block no row had before can be continued: others end within a text
    that several share, such as a system prompt. Rows with less than one block of their own stay alone.
    """
    blocks, size = trace.prefix_blocks, trace.prefix_block_tokens
    assert blocks is not None
    assert size is not None
    known_ids: set[int] = set()
    latest: dict[int, int] = {}  # row by its last whole block
    numbers = np.empty(len(trace), dtype=np.int64)
    sessions = 0
    for row, (ids, tokens) in enumerate(zip(blocks, trace.prefill_tokens.tolist(), strict=True)):
        whole_ids = ids[: tokens // size]
        candidates = (latest[key] for key in reversed(whole_ids) if key in latest)
        earlier = next((candidate for candidate in candidates if continues(trace, candidate, row)), None)
        if earlier is None:
            numbers[row] = sessions
            sessions += 1
        else:
            numbers[row] = numbers[earlier]
        if whole_ids and whole_ids[-1] not in known_ids:
            latest[whole_ids[-1]] = row
        known_ids.update(whole_ids)
    return numbers


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))
