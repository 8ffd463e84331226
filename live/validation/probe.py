"""Timed steps of every kind that an engine may meet, for a step-time model to learn from.

The engine is driven through rounds. In each, so many requests with prompts and answers of such lengths are sent, the
first at once and the others as answers end, so that a round shows prompts alone, prompts beside decodes, and decodes
alone. What is drawn has nothing to do with any workload that is to be predicted: sizes are log-uniform up to what the
scenario's engine allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from latency_models.engine_steps import Reading, Step, describe
from live.engine import Engine
from live.generation import ask
from live.validation.pace import PacedClock
from live.validation.play import collector_at_rest
from live.validation.prompts import GREEDY
from schedulers.batches import Batch


@dataclass(frozen=True)
class Reach:
    """How far probing goes.

    Attributes:
        prompt, answer: tokens at most. sequences: that run at once at most.
        rounds: how many. steps: of a round at most.
    """

    prompt: int
    answer: int
    sequences: int
    rounds: int = 120
    steps: int = 120


@dataclass(frozen=True)
class Probed:
    """What probing gave.

    Attributes:
        rounds: of each, its steps in order, with the time at which they began, seconds.
        readings: of the machine's pace meanwhile.
    """

    rounds: list[list[tuple[float, Step]]]
    readings: list[Reading]


def probe(
    make_engine: Callable[[], Engine],
    reach: Reach,
    vocabulary: int,
    seed: int,
    advance: Callable[[str], None],
    make_clock: Callable[[], PacedClock] = PacedClock,
) -> Probed:
    """Steps of each round, in order, timed from the beginning of one to the beginning of the next.

    Args:
        make_engine: an engine with nothing in it; its settings are the scenario's.
        advance: called after each round, with what it was.
    """
    rng = np.random.default_rng([seed, 23])
    engine = make_engine()
    numbers = iter(range(1 << 60))
    rounds: list[list[tuple[float, Step]]] = []
    engine.clock = clock = make_clock()
    _round(engine, clock, Reach(reach.prompt, reach.answer, 4, 1, 40), vocabulary, rng, numbers)  # warms up
    for i in range(reach.rounds):
        rounds.append(_round(engine, clock, reach, vocabulary, rng, numbers))
        advance(f"round {i + 1}: {len(rounds[-1])} steps")
    return Probed(rounds, clock.readings)


def _round(
    engine: Engine,
    clock: PacedClock,
    reach: Reach,
    vocabulary: int,
    rng: np.random.Generator,
    numbers: Iterator[int],
) -> list[tuple[float, Step]]:
    together = _log_uniform(rng, reach.sequences)
    longest = _log_uniform(rng, reach.prompt)
    answer = _log_uniform(rng, reach.answer)
    block = engine.core.config.block_tokens
    seen: list[tuple[Batch, float, float]] = []

    def send() -> None:
        size = int(rng.integers(1, longest + 1))
        prompt = rng.integers(vocabulary, size=size)
        engine.submit(ask(next(numbers), prompt, int(rng.integers(1, answer + 1)), wish=GREEDY, block_tokens=block))

    engine.watch = lambda batch, begin, end: seen.append((batch, begin, end))
    with collector_at_rest():
        for _ in range(together):
            send()
        for _ in range(reach.steps):
            result = engine.step()
            if result is None:
                break
            clock.rest()
            for _ in result.finished:
                if rng.random() < 0.8:
                    send()
    engine.watch = None
    for number in list(engine.core.sequences):
        engine.abort(number)
    while engine.step() is not None:  # what was begun ahead
        pass
    ends = [*(begin for _, begin, _ in seen[1:]), *(end for _, _, end in seen[-1:])]
    return [(begin, describe(batch, block, after - begin)) for (batch, begin, _), after in zip(seen, ends, strict=True)]


def _log_uniform(rng: np.random.Generator, most: int) -> int:
    return min(most, int(math.exp(rng.uniform(0, math.log(most + 1)))))
