"""The load that a deployment bears, and the effects of changes of the workload or of the system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from scenarios.goals import Goal
from twin.planning.confirming import Confirmer
from twin.planning.judging import Judge, Verdict
from twin.planning.prospects import Prospect
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, candidate, document, without_prefix_cache

PRECISION = 0.02
"""The precision of the highest rate, relative to it."""

DOUBLINGS = 10
"""Steps up or down that look for a rate on the other side of the goals."""

CORRECTIONS = 5
"""Rates that new windows are asked about, each lower than the one before by twice as much."""

NewJudge = Callable[[Question], Judge]


@dataclass(frozen=True)
class Load:
    """The highest rate at which a deployment meets its goals.

    Attributes:
        rate: requests per second. binds: the goal that is missed first above it, or None where a queue grows.
        reason: what happens a little above it. verdict: at that rate.
    """

    rate: float
    binds: Goal | None
    reason: str
    verdict: Verdict


def highest_rate(judge_of: NewJudge, question: Question, deployment: Candidate, start: float) -> Load | None:
    """Bisect the rate of arrivals, between one that meets the goals and one that does not.

    Args:
        start: the first rate to try, requests per second.

    Returns:
        None if no rate meets the goals.
    """
    low: tuple[float, Verdict] | None = None
    high: tuple[float, Verdict] | None = None
    rate = start
    for _ in range(DOUBLINGS):
        verdict = _at(judge_of, question, deployment, rate)
        if verdict.meets:
            low = (rate, verdict)
        else:
            high = (rate, verdict)
        if low is not None and high is not None:
            break
        rate *= 1.25 if verdict.meets else 0.8
    if low is None or high is None:
        return None if low is None else Load(low[0], None, "no higher rate was tried", low[1])
    while high[0] - low[0] > PRECISION * low[0]:
        rate = rounded((low[0] + high[0]) / 2)
        verdict = _at(judge_of, question, deployment, rate)
        low, high = ((rate, verdict), high) if verdict.meets else (low, (rate, verdict))
    return Load(low[0], binding(high[1], question), high[1].reason, low[1])


def binding(verdict: Verdict, question: Question) -> Goal | None:
    """The goal that a verdict is worst for; None where a queue grows."""
    return None if verdict.saturated or not verdict.windows else verdict.worst(question.goals)[1]


def confirmed(confirmer_of: Callable[[Question, int], Confirmer], question: Question, load: Load) -> Load | None:
    """A load on windows that had no part in finding it: the rate found, or the first lower one that they confirm.

    Args:
        confirmer_of: makes a confirmer of a question, after so many attempts.
    """
    rate = load.rate
    for tried in range(CORRECTIONS):
        verdict = confirmer_of(question.at_rate(rate), tried).confirm(load.verdict)
        if verdict.meets:
            return replace(load, rate=rate, verdict=verdict)
        rate = rounded(rate * (1 - PRECISION * 2**tried))
    return None


def rounded(rate: float) -> float:
    return float(f"{rate:.5g}")


def _at(judge_of: NewJudge, question: Question, deployment: Candidate, rate: float) -> Verdict:
    judge = judge_of(question.at_rate(rounded(rate)))
    (screened,) = judge.screen([deployment])
    if screened.decided:
        return screened
    (verdict,) = judge.settle([deployment])
    return verdict


def changes(judge_of: NewJudge, question: Question, deployment: Candidate) -> list[Document]:
    """Verdicts on the recommended deployment where something is other than assumed.

    Args:
        judge_of: by the windows and draws that confirmed it, so that a change is never surer by luck.
    """
    found = []
    if question.rate is not None:
        for factor in (0.8, 1.2):
            asked = question.at_rate(rounded(factor * question.rate))
            found.append(_change(judge_of(asked), deployment, f"rate {100 * (factor - 1):+.0f} %"))
    for factor in (0.8, 1.2):
        asked = question.with_lengths(factor)
        found.append(_change(judge_of(asked), deployment, f"lengths {100 * (factor - 1):+.0f} %"))
    found += _prefix_changes(judge_of, question, deployment)
    roles = ("engine",) if len(deployment.sizes) == 1 else ("prefill engine", "decode engine")
    for pool, role in enumerate(roles):
        sizes = tuple(size - (index == pool) for index, size in enumerate(deployment.sizes))
        what = f"one {role} lost"
        if sizes[pool] == 0:
            found.append(
                {
                    "change": what,
                    "meets": False,
                    "probability": 0.0,
                    "sure": None,
                    "reason": "none is left",
                    "values": None,
                }
            )
            continue
        smaller = candidate(question.spec, deployment.family, sizes)
        found.append(_change(judge_of(question), smaller, what))
    return found


def _prefix_changes(judge_of: NewJudge, question: Question, deployment: Candidate) -> list[Document]:
    """Verdicts with other hit rates of the prefix cache, where prompts share prefixes and an engine keeps them."""
    plan = question.plan(document(question, deployment.family, deployment.sizes))
    if not question.shares_prefixes or not any(pool.scheduler.config.enable_prefix_caching for pool in plan.pools):
        return []
    found = []
    for factor in (0.8, 1.2):
        if (asked := question.with_prefixes(factor)) is not None:
            found.append(_change(judge_of(asked), deployment, f"shared prefixes {100 * (factor - 1):+.0f} %"))
    off = without_prefix_cache(question, deployment)
    return [*found, _change(judge_of(question), off, "no hits in the prefix cache")]


def _change(judge: Judge, deployment: Candidate, what: str) -> Document:
    (verdict,) = judge.settle([deployment])
    if verdict.meets:
        verdict = judge.with_draws(verdict, every=True)
    return {
        "change": what,
        "meets": verdict.meets,
        "probability": verdict.probability,
        "sure": verdict.sure,
        "reason": verdict.reason,
        "values": {goal.name: verdict.value(i) for i, goal in enumerate(judge.goals)} if verdict.windows else None,
    }


@dataclass
class MostThroughput:
    """The search for the highest rate on the devices within the limits, as objective `throughput`.

    Attributes:
        best: the deployment, and its load.
    """

    question: Question
    judge_of: NewJudge
    best: tuple[Candidate, Load] | None = None

    def run(self, prospects: list[Prospect]) -> list[Verdict]:
        """Try every family at its largest sizes; a family that fails above the best rate so far is out."""
        tried = []
        for prospect, deployment in sorted(_largest(prospects), key=lambda each: -estimated_rate(*each)):
            start = estimated_rate(prospect, deployment)
            if self.best is not None:
                start = rounded(self.best[1].rate * (1 + PRECISION))
                verdict = _at(self.judge_of, self.question, deployment, start)
                if not verdict.meets:
                    tried.append(verdict)
                    continue
            load = highest_rate(self.judge_of, self.question, deployment, start)
            if load is not None:
                tried.append(load.verdict)
                self.best = (deployment, load)
        return tried


def _largest(prospects: list[Prospect]) -> list[tuple[Prospect, Candidate]]:
    """Candidates that no other of their family contains."""
    return [
        (prospect, each)
        for prospect in prospects
        for each in prospect.candidates
        if not any(other is not each and each.within(other) for other in prospect.candidates)
    ]


def estimated_rate(prospect: Prospect, deployment: Candidate) -> float:
    """The rate at which the busier pool is near its capacity, requests per second."""
    engines = deployment.family.engines(deployment.sizes)
    return rounded(0.7 * min(engines[0] * prospect.prefill.capacity, engines[-1] * prospect.decode.capacity))
