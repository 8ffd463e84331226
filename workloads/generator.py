"""Makes the requests of a workload, in order of arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from workloads.arrivals import Arrivals, ClosedLoop, Replay
from workloads.checks import IntArray, number, whole
from workloads.errors import BadInput
from workloads.mixes import ModelMix, TaskMix
from workloads.pairs import LengthPairs
from workloads.request import Request
from workloads.trace import Trace

if TYPE_CHECKING:
    from workloads.mixes import SharedPrefixes

_BLOCK = 4096


class _Columns(NamedTuple):
    """The next n requests without their times and models. An answer of 0 tokens: the task has none."""

    prompts: IntArray
    answers: IntArray
    tasks: Iterable[str]
    priorities: Iterable[int]
    prefixes: Iterable[tuple[int, ...]]
    contracts: tuple[Iterable[Any], ...] = ()
    """Sessions, tenants, classes and TTFT goals, where there are some."""


_Content: TypeAlias = Callable[[int], _Columns]


@dataclass(frozen=True)
class Workload:
    """The workload of a serving system.

    `content` defines the requests: pairs of lengths, a mix of tasks with lengths of their own, or a trace, whose rows
    come in order with their prefix blocks. Under `ClosedLoop` all have the arrival 0, and the client releases the next
    one when an earlier one ends. `models` spreads requests over models; without it all are for "default". `max_tokens`
    is the limit that clients set; None: each request's limit is the length of its own answer. Raises `BadInput` for
    prefixes beside those of a trace, and for a limit below 1.
    """

    content: LengthPairs | TaskMix | Trace
    arrivals: Arrivals = field(default_factory=ClosedLoop)
    models: ModelMix | None = None
    prefixes: SharedPrefixes | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            whole(self.max_tokens, "max_tokens", low=1)
        if self.prefixes is not None and isinstance(self.content, Trace) and self.content.prefix_blocks is not None:
            expected = f"expected none, for the trace {self.content.name} has its own"
            raise BadInput(expected, field="prefixes", value=self.prefixes)

    @classmethod
    def replay(
        cls,
        trace: Trace,
        *,
        speed: float = 1.0,
        models: ModelMix | None = None,
        prefixes: SharedPrefixes | None = None,
        max_tokens: int | None = None,
    ) -> Workload:
        """A recorded trace at its own times, `speed` times as fast.

        Raises `BadInput` for a trace without times, for prefixes beside its own, and unless 1e-9 <= speed <= 1e9.
        """
        if trace.arrivals is None:
            raise BadInput("expected a trace with arrival times", field="trace", value=trace.name)
        times = trace.arrivals / number(speed, "speed", low=1e-9, high=1e9)
        return cls(trace, Replay(times), models, prefixes, max_tokens)

    @property
    def prefix_block_tokens(self) -> int | None:
        """Prompt tokens that one id of `Request.prefix_blocks` stands for; None if there are no ids."""
        if self.prefixes is not None:
            return self.prefixes.block_tokens
        return self.content.prefix_block_tokens if isinstance(self.content, Trace) else None

    @property
    def clients(self) -> tuple[tuple[str, str], ...]:
        """Pairs of class and tenant that requests are of; none where no request has either."""
        shares = self.content.shares if isinstance(self.content, TaskMix) else ()
        pairs = tuple(dict.fromkeys((share.service_class, share.tenant) for share in shares))
        return pairs if any(map(any, pairs)) else ()

    @property
    def recorded(self) -> int | None:
        """Number of requests of a trace or of recorded arrivals; None if requests are drawn without end."""
        lengths = [len(self.content)] if isinstance(self.content, Trace) else []
        times = [len(self.arrivals.recorded)] if isinstance(self.arrivals, Replay) else []
        return min(lengths + times, default=None)

    @property
    def random(self) -> tuple[str, ...]:
        """Those of lengths, arrivals, models and prefixes that depend on the generator that `requests` gets."""
        parts = {
            "lengths": not isinstance(self.content, Trace) and not self.content.is_constant,
            "arrivals": self.arrivals.is_random,
            "models": self.models is not None and len(self.models.models) > 1,
            "prefixes": self.prefixes is not None and self.prefixes.groups > 1,
        }
        return tuple(name for name, is_random in parts.items() if is_random)

    def requests(self, rng: np.random.Generator, count: int, *, block: int = _BLOCK) -> Iterator[tuple[Request, int]]:
        """The first `count` requests in order of arrival, each with the true length of its answer in tokens.

        That length is for the backend: at least 1 for a generation, 0 for a task without output. They are made `block`
        at a time, which limits their memory and changes nothing else. Each quantity has a generator of its own, spawned
        from `rng`: lengths stay the same when only arrivals change, and a second call gives other requests. Raises
        `BadInput` for a count below 0 or above `recorded`.
        """
        whole(count, "count", low=0)
        whole(block, "block", low=1)
        if self.recorded is not None and count > self.recorded:
            raise BadInput(f"expected at most the {self.recorded} recorded requests", field="count", value=count)
        draw = self._stream(rng)
        return chain.from_iterable(draw(first, min(block, count - first)) for first in range(0, count, block))

    def _stream(self, rng: np.random.Generator) -> Callable[[int, int], Iterator[tuple[Request, int]]]:
        # All are spawned, used or not, so that adding a mix leaves the other quantities as they were.
        for_arrivals, for_content, for_models, for_prefixes = rng.spawn(4)
        times = self.arrivals.stream(for_arrivals)
        rows = self.content
        if isinstance(rows, Trace):
            content = _rows(rows)
        else:
            content = _tasks(rows, for_content) if isinstance(rows, TaskMix) else _generations(rows, for_content)
        prefixes = None if self.prefixes is None else self.prefixes.stream(for_prefixes)
        mix, apart = self.models, self._models_with_ids()

        def of_model(ids: tuple[int, ...], model: int) -> tuple[int, ...]:
            return tuple(block_id * apart + model for block_id in ids)

        def following(first: int, size: int) -> Iterator[tuple[Request, int]]:
            columns = content(size)
            answers, limits = self._limited(columns.answers)
            models = None if mix is None else mix.sample(for_models, size).tolist()
            ids = columns.prefixes if prefixes is None else prefixes(columns.prompts)
            if models is not None and apart > 1:  # caches of two models are never alike
                ids = map(of_model, ids, models)
            requests = map(
                Request,
                range(first, first + size),
                times(size).tolist(),
                columns.prompts.tolist(),
                limits.tolist(),
                repeat("default") if mix is None or models is None else map(mix.models.__getitem__, models),
                ids,
                columns.tasks,
                columns.priorities,
                *columns.contracts,
            )
            return zip(requests, answers.tolist(), strict=True)

        return following

    def _models_with_ids(self) -> int:
        """The number of models, if their prompts have prefix ids; else 1."""
        recorded = isinstance(self.content, Trace) and self.content.prefix_blocks is not None
        return 1 if self.models is None or not (recorded or self.prefixes is not None) else len(self.models.models)

    def _limited(self, answers: IntArray) -> tuple[IntArray, IntArray]:
        if self.max_tokens is None:
            return answers, answers
        limits = np.where(answers > 0, self.max_tokens, 0)
        return np.minimum(answers, limits), limits


def _generations(pairs: LengthPairs, rng: np.random.Generator) -> _Content:
    draw = pairs.stream(rng)

    def following(size: int) -> _Columns:
        return _Columns(*draw(size), repeat("generate"), repeat(0), repeat(()))

    return following


def _tasks(mix: TaskMix, rng: np.random.Generator) -> _Content:
    draw = mix.stream(rng)
    names = ("task", "priority", "tenant", "service_class", "ttft_goal")
    tables = [[getattr(share, name) for share in mix.shares] for name in names]
    plain = not any(tables[2]) and not any(tables[3])

    def following(size: int) -> _Columns:
        indices, prompts, answers = draw(size)
        shares = indices.tolist()
        tasks, priorities, *contracts = (map(table.__getitem__, shares) for table in tables)
        return _Columns(prompts, answers, tasks, priorities, repeat(()), () if plain else (repeat(-1), *contracts))

    return following


def _rows(trace: Trace) -> _Content:
    first_row = 0

    def following(size: int) -> _Columns:
        nonlocal first_row
        rows = slice(first_row, first_row + size)
        first_row += size
        prefixes = repeat(()) if trace.prefix_blocks is None else trace.prompt_blocks(rows)
        return _Columns(trace.prefill_tokens[rows], trace.decode_tokens[rows], repeat("generate"), repeat(0), prefixes)

    return following
