"""Timed steps of every kind that an engine may meet, for a step-time model to learn from.

The engine is driven through rounds. In each, so many requests with prompts and answers of such lengths are sent, the
first at once and another whenever an answer ends, so that a round shows prompts alone, prompts beside decodes, and
decodes alone; from its middle on one after the other leaves. What is drawn has nothing to do with any workload that is
to be predicted: how many there are together, and how long prompts and answers are at most, is spread over the rounds up
to what the scenario's engine allows.
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
    make_clock: Callable[[], PacedClock] = PacedClock,
) -> Probed:
    """Steps of each round, in order, timed from the beginning of one to the beginning of the next.

    Args:
        make_engine: an engine with nothing in it; its settings are the scenario's.
    """
    rng = np.random.default_rng([seed, 23])
    engine = make_engine()
    numbers = iter(range(1 << 60))
    together = spread(rng, reach.rounds, reach.sequences)
    lengths = [spread(rng, reach.rounds, most, power=2) for most in (reach.prompt, reach.answer)]
    rounds: list[list[tuple[float, Step]]] = []
    engine.clock = clock = make_clock()
    warming = Round(min(reach.sequences, 4), reach.prompt, reach.answer)
    _play(engine, clock, warming, WARM, vocabulary, rng, numbers)
    for each in zip(together, *lengths, strict=True):
        rounds.append(_play(engine, clock, Round(*each), reach.steps, vocabulary, rng, numbers))
    return Probed(rounds, clock.readings)


def spread(rng: np.random.Generator, rounds: int, most: int, power: int = 1) -> list[int]:
    """A number from 1 to `most` for each round, in any order, so that their roots are spread evenly.

    Of their square roots (`power` 2): half of them lie below a quarter of `most`, since small ones differ by more, and
    large ones take longer to try.
    """
    shares = (rng.permutation(rounds) + rng.random(rounds)) / rounds
    found: list[int] = np.maximum(np.ceil(most * shares**power), 1).astype(int).tolist()
    return found


def staying(together: int, step: int, steps: int) -> int:
    """How many sequences of a round go on after so many of its steps: all for half of them, then ever fewer, to one.

    So every number of decodes is met in many rounds. A machine that is a few per cent slower for the seconds of one
    round would otherwise be learnt as a number of decodes that is.
    """
    return min(max(-(-2 * together * (steps - step) // steps), 1), together)


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

    here = engine.core.sequences
    engine.watch = lambda batch, begin, end: seen.append((batch, begin, end))
    with collector_at_rest():
        for _ in range(this.together):
            send()
        for i in range(1, steps + 1):
            result = engine.step()
            if result is None:
                break
            clock.rest(seen[-1][0].tokens)
            stay = staying(this.together, i, steps)
            for _ in result.finished:
                if len(here) < stay:
                    send()
            while len(here) > stay:
                engine.abort(next(reversed(here)))
    engine.watch = None
    for number in list(engine.core.sequences):
        engine.abort(number)
    while engine.step() is not None:  # what was begun ahead
        pass
    ends = [*(begin for _, begin, _ in seen[1:]), *(end for _, _, end in seen[-1:])]
    return [(begin, describe(batch, block, after - begin)) for (batch, begin, _), after in zip(seen, ends, strict=True)]
