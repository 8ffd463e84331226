"""The sessions of a trace: by its own session ids, or recovered from the ids of its prompts' blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
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

    `source`: by the trace's session ids, where a row without one is a session of its own; or by `sessions_by_prefix`.
    Without `think`, a request is sent at its recorded time, at `speed`, or after the answer before it, if that is
    later. With `think`, it follows that answer by a pause, drawn or the trace's own, of at most `max_pause` seconds,
    and sessions begin by `arrivals`. Sub-agents run side by side, and their session goes on when all have ended.

    A prompt at least as long as the earlier prompt and its answer repeats them, as far as block ids do not say
    otherwise; a shorter one begins a new context. Without block ids in the trace, blocks of `block_tokens` get ids. An
    agent ends before a request that would exceed `max_model_len`. A session begins after a share of its main agent's
    requests, drawn from `advance`. Raises `BadInput` for a trace that lacks what is needed.
    """

    trace: Trace
    source: Source
    think: Pauses | Literal["recorded"] | None = None
    speed: float = 1.0
    arrivals: Arrivals = field(default_factory=ClosedLoop)
    models: ModelMix | None = None
    max_tokens: int | None = None
    block_tokens: int = 16
    max_pause: float = inf
    shuffle: bool = False
    max_model_len: int | None = None
    advance: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        trace = self.trace
        if self.max_tokens is not None:
            whole(self.max_tokens, "max_tokens", low=1)
        if self.source == "session_ids" and trace.sessions is None:
            raise BadInput("expected a trace with session ids", field="sessions.source", value=self.source)
        if self.source == "prefix_ids" and trace.prefix_blocks is None:
            raise BadInput("expected a trace with prefix ids", field="sessions.source", value=self.source)
        if self.think == "recorded" and trace.pauses is None:
            raise BadInput("expected a trace with pauses", field="sessions.think", value=self.think)
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
            "think_times": isinstance(self.think, Pauses) and not self.think.is_constant,
            "order": self.shuffle,
            "starts": self.advance[0] < self.advance[1],
            "arrivals": self.arrivals.is_random,
            "models": self.models is not None and len(self.models.models) > 1,
        }
        return tuple(name for name, is_random in parts.items() if is_random)

    def sessions(self, rng: np.random.Generator, count: int) -> Iterator[Session]:
        """The sessions of the first `count` rows, in the order of their first requests or shuffled; else `BadInput`."""
        whole(count, "count", low=0)
        if count > self.recorded:
            raise BadInput(f"expected at most the {self.recorded} recorded requests", field="count", value=count)
        for_think, for_arrivals, for_models, for_order, for_starts = rng.spawn(5)
        pause = self.think.stream(for_think) if isinstance(self.think, Pauses) else None
        times = None if self.think is None else self.arrivals.stream(for_arrivals)
        first_id = 0
        sessions = self._rows(count)
        order = for_order.permutation(len(sessions)).tolist() if self.shuffle else range(len(sessions))
        starts = for_starts.uniform(*self.advance, len(sessions)).tolist()
        for index, rows in enumerate(self._advanced(sessions[i], starts[i]) for i in order):
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
        if self.max_model_len is None:
            return list(sessions.values())
        fitting = (self._fitting(rows, self.max_model_len) for rows in sessions.values())
        return [rows for rows in fitting if rows]

    def _advanced(self, rows: list[int], share: float) -> list[int]:
        """The rows of a session from a request of its main agent on, which `share` of the others precede."""
        main, _ = self._by_agent(rows)
        return rows[rows.index(main[int(share * (len(main) - 1))]) :]

    def _fitting(self, rows: list[int], max_model_len: int) -> list[int]:
        """The rows of a session up to the first that exceeds the model's length; of a sub-agent, its own first."""
        ended: set[int] = set()
        fitting: list[int] = []
        for row in rows:
            agent = 0 if self.trace.agents is None else int(self.trace.agents[row])
            tokens, _, limit = self._lengths(row)
            if tokens + limit > max_model_len:
                ended.add(agent)
            if 0 in ended:
                break
            if agent not in ended:
                fitting.append(row)
        return fitting

    def _rounds(self, rows: list[int], pause: Callable[[], float] | None, first_id: int) -> Iterator[Round]:
        main, sub_agents = self._by_agent(rows)
        fresh = first_id + sum(self._blocks(row) for row in main)
        for row, round in zip(main, self._chain(main, pause, first_id), strict=True):
            chains = sub_agents.get(row, [])
            starts = list(accumulate((sum(map(self._blocks, chain)) for chain in chains), initial=fresh))
            fresh = starts[-1]
            agents = tuple(self._chain(chain, pause, start) for chain, start in zip(chains, starts, strict=False))
            yield round._replace(agents=agents)

    def _by_agent(self, rows: list[int]) -> tuple[list[int], dict[int, list[list[int]]]]:
        """The rows of the main agent, and by those that start sub-agents, the rows of each of them."""
        if self.trace.agents is None:
            return rows, {}
        main: list[int] = []
        chains: dict[int, dict[int, list[int]]] = {}
        for row in rows:
            agent = int(self.trace.agents[row])
            if agent == 0:
                main.append(row)
            else:
                chains.setdefault(main[-1], {}).setdefault(agent, []).append(row)
        return main, {row: list(agents.values()) for row, agents in chains.items()}

    def _chain(self, rows: list[int], pause: Callable[[], float] | None, first_id: int) -> Iterator[Round]:
        prompts = self._named(rows) if self.trace.prefix_blocks is not None else self._grown(rows, first_id)
        for row, prompt in zip(rows, prompts, strict=True):
            not_before = 0.0 if self.think is not None else self._time(row)
            yield Round((prompt,), self._recorded_pause(row) if pause is None else pause(), not_before)

    def _recorded_pause(self, row: int) -> float:
        return 0.0 if self.think is None else min(float(self.trace.pauses[row]), self.max_pause)  # type: ignore[index]

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
    prompt and answer. Only rows whose last whole block is new can be continued: others end within a shared text.
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
