"""Steps of the engines of a topology, as the twin counts them, and the work between them.

A step of a worker is more than its engine's: the worker also takes messages and blocks before it, and reports after it.
So a step begins when the worker can turn to it: when it has reported the step before and sent that step's caches, or
when a message has ended its wait. It ends with its report. The steps of a busy worker follow each other without a gap.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from latency_models.stages import MessageLink
from live.engine import Engine
from live.generation import Generation
from live.topologies.direct_time import DirectTime
from live.topologies.pools.layout import FRONT
from schedulers.batches import Batch

Span = tuple[Batch, float, float]
"""A step's batch, begin and end, seconds."""


class Turn(NamedTuple):
    """A role's work from one wait to the next, seconds of its clock. `waited`: it did wait before."""

    begin: float
    end: float
    waited: bool


class Post(NamedTuple):
    """A message: ranks, when it leaves and arrives, seconds, and bytes."""

    source: int
    destination: int
    departure: float
    arrival: float
    size: int


class RecordedTime(DirectTime):
    """Direct execution that notes the turns of each role and its messages, by rank."""

    def __init__(self, link: MessageLink | None = None) -> None:
        super().__init__(link, one_at_a_time=True)
        self.turns: dict[int, list[Turn]] = {}
        self.posts: dict[int, list[Post]] = {}
        self._turn_begin = 0.0

    def restart(self) -> None:
        super().restart()
        self.turns.clear()
        self.posts.clear()

    def resume(self, rank: int) -> None:
        self._turn_begin = self.now(rank)
        super().resume(rank)

    def pause(self, rank: int) -> None:
        super().pause(rank)
        turns = self.turns.setdefault(rank, [])
        has_waited = not turns or self._turn_begin > turns[-1].end
        turns.append(Turn(self._turn_begin, self.now(rank), has_waited))

    def arrival(self, source: int, destination: int, size: int) -> float:
        arrival = super().arrival(source, destination, size)
        self.posts.setdefault(source, []).append(Post(source, destination, self.now(source), arrival, size))
        return arrival

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block as work of the running role."""
        begin = self._cpu()
        try:
            yield
        finally:
            self._since += self._cpu() - begin


@dataclass(frozen=True)
class RoleSteps:
    """The spans of one engine, and of steps whose caches left before the next: how many, and seconds to the last."""

    spans: list[Span]
    hand_overs: list[tuple[int, float]]


def role_steps(time: RecordedTime, rank: int, steps: Sequence[Span]) -> RoleSteps:
    """The steps of a worker, of those of its engine (`Engine.watch`)."""
    turns = time.turns.get(rank, [])
    ends = [turn.end for turn in turns]
    released = [post.departure for post in time.posts.get(rank, []) if _announces(time, rank, post)]
    spans: list[Span] = []
    hand_overs: list[tuple[int, float]] = []
    last_turn, last_end = -1, 0.0
    for batch, begin, end in steps:
        place = bisect.bisect_left(ends, end)
        releases = released[bisect.bisect_left(released, last_end) : bisect.bisect_left(released, begin)]
        if releases and spans:
            hand_overs.append((len(releases), releases[-1] - last_end))
        waits = [turn.begin for turn in turns[last_turn + 1 : place + 1] if turn.waited]
        spans.append((batch, max([last_end, *releases[-1:], *waits[-1:]]), ends[place]))
        last_turn, last_end = place, ends[place]
    return RoleSteps(spans, hand_overs)


def _announces(time: RecordedTime, rank: int, post: Post) -> bool:
    """Tell whether a message is SENT: it goes to the front right after blocks have gone to a decode engine."""
    posts = time.posts[rank]
    place = bisect.bisect_left(posts, post.departure, key=lambda post: post.departure)
    return post.destination == FRONT and place > 0 and posts[place - 1].destination != FRONT


def route_seconds(time: RecordedTime, arrivals: Sequence[float]) -> list[float]:
    """Seconds of each request from its arrival at the front to that of the next message that brings an engine work."""
    posts = [post for post in time.posts.get(FRONT, []) if post.size]
    places = [bisect.bisect_left(posts, arrival, key=lambda post: post.departure) for arrival in arrivals]
    return [posts[i].arrival - arrival for i, arrival in zip(places, arrivals, strict=True) if i < len(posts)]


def deliver_seconds(spans: Sequence[Span], generations: Mapping[int, Generation]) -> list[float]:
    """Seconds of each prompt from the end of its last step to the first token at the front."""
    ends = [(chunk.sequence.request.id, end) for batch, _, end in spans for chunk in batch.chunks if chunk.last]
    tokens = [(generations[i].first_token, end) for i, end in ends if i in generations]
    return [first_token - end for first_token, end in tokens if first_token >= end]


def frontend_times(
    routes: Sequence[float], deliveries: Sequence[float], hand_overs: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Fields of `system.frontend`: medians."""
    per_cache = [seconds / count for count, seconds in hand_overs]
    samples: dict[str, Sequence[float]] = {"route": routes, "deliver": deliveries, "hand_over": per_cache}
    return {name: float(np.median(values)) if len(values) else 0.0 for name, values in samples.items()}


def watch_steps(engine: Engine) -> list[Span]:
    """A list that takes in the engine's steps as they end."""
    steps: list[Span] = []
    engine.watch = lambda batch, begin, end: steps.append((batch, begin, end))
    return steps
