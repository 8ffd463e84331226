"""Confirms what a search is about to recommend, on windows that had no part in choosing it.

A search looks at many candidates and takes the first that seems to meet its goals, so luck has a part in the windows
that it was chosen by. New windows have no such part. They are of the same question with another seed, and the draws of
the step times' error are new too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from scenarios.goals import Goal
from twin.planning.confidence import adjusted_luck, chance_of_luck
from twin.planning.judging import Judge, Verdict

OTHER_SEED = 1_000_000
"""Between the seed of the windows that choose and that of the windows that confirm."""

LOOKS = 4
"""Looks at one candidate: after `plan.replications` windows, and twice, four and eight times as many."""

REQUESTS = 200_000
"""Up to so many requests, further looks are taken at a candidate against which only luck speaks: few windows, or short
ones, cannot rule luck out."""

PROMISING = 0.75
"""A candidate less likely than this to meet its goals is not worth further windows."""


def most_looks(replications: int, requests: int) -> int:
    """Looks at one candidate at most, of which the first is at so many windows of so many requests."""
    return max(LOOKS, 1 + int(math.log2(max(REQUESTS / (replications * requests), 1.0))))


class Confirmer:
    """Tests candidates one after the other, until one is confirmed.

    Args:
        judge: of the question with another seed. tried: deployments that were tested before.
    """

    def __init__(self, judge: Judge, tried: int = 0) -> None:
        self.judge, self._tried = judge, tried

    def confirm(self, verdict: Verdict) -> Verdict:
        """The verdict of new windows on a candidate.

        It is confirmed if the probability of a span, times that of windows which are not this good by luck
        (`adjusted_luck`), reaches the plan's reliability, and if goals hold under enough new draws of the step times.
        Where nothing is random, the verdict stands.
        """
        candidate, spec = verdict.candidate, self.judge.question.spec
        if not self.judge.random([candidate]):
            return verdict
        self._tried += 1
        looks = most_looks(spec.replications, self.judge.horizon.long)
        for look in range(1, looks + 1):
            (verdict,) = self.judge.look([candidate], spec.replications * 2 ** (look - 1))
            claim = verdict.probability * (1 - self._luck(verdict, looks))
            if claim >= spec.reliability:
                verdict = self.judge.with_draws(replace(verdict, meets=True, reason=""))
                break
            if verdict.probability < (PROMISING if look < LOOKS else spec.reliability):
                break
        meets = claim >= spec.reliability and (verdict.sure is None or verdict.meets)
        reason = "" if meets else self._refuted(verdict)
        seed = self.judge.question.seed
        return replace(verdict, decided=True, meets=meets, reason=reason, seed=seed)

    def _luck(self, verdict: Verdict, looks: int) -> float:
        """`adjusted_luck` of a verdict's windows; all of it for a system whose queue grows."""
        if verdict.saturated or len(verdict.windows) < 2:
            return 1.0
        excess, variance = (np.array([window[name] for window in verdict.windows]) for name in ("excess", "variance"))
        kept = np.array([_share_within(goal) for goal in self.judge.goals])
        allowed = np.where(kept > 0, variance.sum(axis=0) / np.maximum(kept, 1e-9), 0.0)
        return adjusted_luck(chance_of_luck(excess, allowed), self._tried, looks)

    @staticmethod
    def _refuted(verdict: Verdict) -> str:
        if verdict.reason:
            return f"new windows: {verdict.reason}"
        return f"too close to its goals: not certain after {len(verdict.windows)} new windows"


def _share_within(goal: Goal) -> float:
    """The share of requests that must not exceed the limit; 0 for a goal that does not count requests."""
    if goal.metric == "goodput":
        return goal.limit
    return goal.quantile or 0.0
