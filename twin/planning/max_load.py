"""The rate of requests that a given deployment bears under its goals, with an interval."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from twin.executors.executor import Executor
from twin.planning.answer import NOTE, arrivals, certainty, describe_question, goals_in_words, row
from twin.planning.judging import Judge, Verdict
from twin.planning.load import Load, binding, estimated_rate, rounded
from twin.planning.prospects import horizon, prospects
from twin.planning.question import Document, Question
from twin.planning.space import Candidate
from workloads.errors import BadInput

SCHEMA = "twin.max-load/1"

TAIL = 0.025
"""Probability beyond each end of the interval."""

PRECISION = 0.01
"""The precision of a rate, relative to it."""

GROWTH, MOST_STEPS = 1.1, 30
"""Steps from the estimated rate to the first ones on either side of the one that is looked for."""


@dataclass
class MaxLoad:
    """Answers one question about one deployment.

    Args:
        done: windows by key that have been made; `keep` saves each new one.
        executor: runs windows. advance: called for each window, with its name.
    """

    question: Question
    deployment: Candidate
    done: dict[str, Document]
    keep: Callable[[str, Document], None]
    executor: Executor
    advance: Callable[[str], object] = lambda text: None
    judges: list[Judge] = field(default_factory=list, init=False)

    def run(self) -> Document:
        """The document `twin.max-load/1`.

        Raises:
            BadInput: arrivals without a rate, or a deployment that cannot run.
        """
        question, path = self.question, self.question.path
        if question.rate is None:
            expected = "expected arrivals with a rate, which --max-load changes"
            raise BadInput(expected, field="workload.arrivals.process", file=path)
        found, refused = prospects(question, [self.deployment])
        for each in refused:
            if each.status != "infeasible":
                raise BadInput(f"expected a deployment that can run: {each.reason}", file=path)
            return self._document(None, None, each.reason)
        start = estimated_rate(found[0], self.deployment)
        self.horizon = horizon(question.at_rate(start), found)
        load, interval = self._load(start)
        return self._document(load, interval, "" if load else "goals are missed at every rate that was tried")

    def judge(self, question: Question) -> Judge:
        """A judge of a question that shares the windows that have been made."""
        made = Judge(question, self.horizon, self.done, self.keep, self.executor, self.advance)
        self.judges.append(made)
        return made

    def _load(self, start: float) -> tuple[Load | None, list[float] | None]:
        """The highest rate at which a span meets the goals, and those between which the long run just meets them.

        Each is a test of every rate, inverted. All rates have the same windows, so what is likely at one is likelier at
        a lower one, and the first rate that a test refuses ends the search.
        """
        known: dict[float, tuple[Verdict, float]] = {}

        def at(rate: float) -> tuple[Verdict, float]:
            if rate not in known:
                known[rate] = self.judge(self.question.at_rate(rate)).whole(self.deployment)
            return known[rate]

        span = _crossing(lambda rate: at(rate)[0].meets, start)
        low = _crossing(lambda rate: at(rate)[1] >= 1 - TAIL, start if span is None else span[0])
        if span is None or low is None:
            return None, None
        high = _crossing(lambda rate: at(rate)[1] >= TAIL, low[0])
        assert high is not None  # it is met where the lower end is
        best, beyond = at(span[0])[0], at(span[1])[0]
        return Load(span[0], binding(beyond, self.question), beyond.reason, best), [low[0], high[1]]

    def _document(self, load: Load | None, interval: list[float] | None, reason: str) -> Document:
        question = self.question
        rate = None if load is None else load.rate
        at = question if rate is None else question.at_rate(rate)
        fields: dict[str, Any] = {
            "schema": SCHEMA,
            "name": str(question.document.get("name", "max-load")),
            "simulated": True,
            "note": NOTE,
            "question": describe_question(at, self.horizon) if hasattr(self, "horizon") else None,
            "answer": self._sentence(load, interval, reason),
            "feasible": load is not None,
            "rate": rate,
            "interval": interval,
            "factor": None if rate is None or question.rate is None else rate / question.rate,
            "binds": None if load is None or load.binds is None else load.binds.name,
            "beyond": reason if load is None else load.reason,
            "deployment": None if load is None else row(at, load.verdict),
            "simulated_requests": sum(judge.simulated for judge in self.judges),
        }
        return fields

    def _sentence(self, load: Load | None, interval: list[float] | None, reason: str) -> str:
        what = self.deployment.devices
        if load is None or interval is None:
            return f"{what} meets {goals_in_words(self.question)} at no rate: {reason}."
        low, high = interval
        sure = certainty(self.question, row(self.question, load.verdict))
        return (
            f"{what} bears {load.rate:.4g} requests/s, {arrivals(self.question)}: {sure}. "
            f"It just meets them in the long run at {low:.4g} to {high:.4g} requests/s."
        )


def _crossing(met: Callable[[float], bool], start: float) -> tuple[float, float] | None:
    """Two rates close together, of which the lower one meets a condition; None if no rate that was tried does."""
    low = high = start
    for _ in range(MOST_STEPS):
        if met(low):
            break
        low = rounded(low / GROWTH)
    else:
        return None
    for _ in range(MOST_STEPS):
        if not met(high):
            break
        high = rounded(high * GROWTH)
    while high - low > PRECISION * low:
        middle = rounded((low + high) / 2)
        low, high = (middle, high) if met(middle) else (low, middle)
    return low, high
