"""Timed steps of every kind that an engine may meet, for a step-time model to learn from.

The engine is driven through rounds. In each, so many requests with prompts and answers of such lengths are sent, the
first at once and another whenever an answer ends, so that a round shows prompts alone, prompts beside decodes, and
decodes alone. What is drawn has nothing to do with any workload that is to be predicted: how many there are together,
and how long prompts and answers are at most, is spread over the rounds up to what the scenario's engine allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from latency_models.engine_steps import Step, describe
from latency_models.yardsticks import Reading
from live.engine import Engine
from live.generation import ask
from live.validation.pace import PacedClock
from live.validation.play import collector_at_rest
from live.validation.prompts import GREEDY
from schedulers.batches import Batch

WARM = 40
"""Steps before the first round, which teach nothing."""


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
    drawn = [spread(rng, reach.rounds, most) for most in (reach.sequences, reach.prompt, reach.answer)]
    rounds: list[list[tuple[float, Step]]] = []
    engine.clock = clock = make_clock()
    warming = Round(min(reach.sequences, 4), reach.prompt, reach.answer)
    _play(engine, clock, warming, WARM, vocabulary, rng, numbers)
    for i, each in enumerate(zip(*drawn, strict=True)):
        rounds.append(_play(engine, clock, Round(*each), reach.steps, vocabulary, rng, numbers))
        advance(f"round {i + 1}: {len(rounds[-1])} steps")
    return Probed(rounds, clock.readings)


def spread(rng: np.random.Generator, rounds: int, most: int) -> list[int]:
    """A number from 1 to `most` for each round, in any order, so that their square roots are spread evenly.

    Half of them lie below a quarter of `most`: small ones differ by more, and large ones take longer to try.
    """
    shares = (rng.permutation(rounds) + rng.random(rounds)) / rounds
    found: list[int] = np.maximum(np.ceil(most * shares**2), 1).astype(int).tolist()
    return found


class Round(NamedTuple):
    """Requests that are there together, and the tokens that the prompt and the answer of each have at most."""

    together: int
    prompt: int
    answer: int


def _play(
    engine: Engine,
    clock: PacedClock,
    this: Round,
    steps: int,
    vocabulary: int,
    rng: np.random.Generator,
    numbers: Iterator[int],
) -> list[tuple[float, Step]]:
    """At most so many steps of a round."""
    block = engine.core.config.block_tokens
    seen: list[tuple[Batch, float, float]] = []

    def send() -> None:
        prompt = rng.integers(vocabulary, size=int(rng.integers(1, this.prompt + 1)))
        answer = int(rng.integers(1, this.answer + 1))
        engine.submit(ask(next(numbers), prompt, answer, wish=GREEDY, block_tokens=block))

    engine.watch = lambda batch, begin, end: seen.append((batch, begin, end))
    with collector_at_rest():
        for _ in range(this.together):
            send()
        for _ in range(steps):
            result = engine.step()
            if result is None:
                break
            clock.rest(seen[-1][0].tokens)
            for _ in result.finished:
                send()
    engine.watch = None
    for number in list(engine.core.sequences):
        engine.abort(number)
    while engine.step() is not None:  # what was begun ahead
        pass
    ends = [*(begin for _, begin, _ in seen[1:]), *(end for _, _, end in seen[-1:])]
    return [(begin, describe(batch, block, after - begin)) for (batch, begin, _), after in zip(seen, ends, strict=True)]
