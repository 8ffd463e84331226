"""The TTFT that a closed-loop benchmark reports, from what its client does.

A client keeps C requests in flight and sends R·C in all. The first C come at once, and their prompts are computed one
after another: in the mean, that wave waits for (N + 1)/2 prompts, its own included, of N requests that the engine
holds. Each later request comes when an answer has ended. That is at the end of a step, and the next one has begun: it
waits for that step, for its own prompt, and for prompts of others that bunch with it, `steady` in all. So, with D and P
of `closed_loop`,

    TTFT = 2·D + (1/R · (N + 1)/2 + (1 − 1/R) · steady)·P      and, while C − N requests wait,      + (C − N)/N · life.

Some clients or engines let one request less run than are in flight (`idle_slots`): the mean wait of a request is then
an answer over N. Files of measured rows seldom say R, and none says how its requests bunch: where they do not, other
rows of the same source tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latency_models.sources.aiconfigurator.closed_loop import ClosedLoop
from latency_models.sources.aiconfigurator.silicon import SiliconRow


@dataclass(frozen=True, slots=True)
class Protocol:
    """The behaviour of a benchmark's client.

    Attributes:
        rounds: R, requests over those in flight. steady: prompts in the TTFT of a request after the first wave, its own
            included. idle_slots: requests in flight that the engine does not let run.
    """

    rounds: float
    steady: float
    idle_slots: int = 0

    def ttft(self, loop: ClosedLoop, concurrency: float, osl: float) -> float:
        """Mean TTFT, seconds, of all requests."""
        running = max(min(loop.residents, concurrency - self.idle_slots), 1.0)
        prompts = (running + 1) / 2 / self.rounds + (1 - 1 / self.rounds) * min(self.steady, running)
        own = 2 * loop.decode_step + prompts * loop.prompt
        return own + (concurrency - running) / running * (own + (osl - 1) * loop.tpot)


POSSIBLE = tuple(itertools.starmap(Protocol, itertools.product((5.0, 7.0, 10.0), (1.0, 1.5, 2.0, 2.5), (0, 1))))
"""The protocols that a source without a description may have."""

INFERENCEX = tuple(each for each in POSSIBLE if each.rounds == 10 and not each.idle_slots)
"""Those of InferenceX, whose settings say that ten times as many prompts are sent as are in flight."""


@dataclass(frozen=True, slots=True)
class KnownProtocol:
    """The protocol of a source, and the half width of 90 % of its rows' errors, of logarithms."""

    protocol: Protocol
    half: float


def choose_protocol(rows: Sequence[SiliconRow], loops: Sequence[ClosedLoop]) -> KnownProtocol:
    """The possible protocol of one source with the smallest median error."""
    possible = INFERENCEX if rows[0].drawn_lengths else POSSIBLE
    errors = {each: np.abs(_errors(each, rows, loops)) for each in possible}
    best = min(possible, key=lambda each: float(np.median(errors[each])))
    return KnownProtocol(best, float(np.quantile(errors[best], 0.9)))


def _errors(protocol: Protocol, rows: Sequence[SiliconRow], loops: Sequence[ClosedLoop]) -> np.ndarray:
    predicted = [protocol.ttft(loop, row.concurrency, row.osl) for row, loop in zip(rows, loops, strict=True)]
    found: np.ndarray = np.log(np.array(predicted) / np.array([row.ttft for row in rows]))
    return found
