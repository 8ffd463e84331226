"""Confirms the candidate that a search has selected, by windows that had no part in the selection.

A search evaluates many candidates and takes the first that seems to meet its goals, so it tends to select one whose
windows were favourable by chance. New windows have no such bias. They are of the same question with another seed, and
the draws of the step times' error are new too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from twin.planning.confidence import adjusted_p_value, p_value
from twin.planning.evaluation import SEARCH_DRAWS, Evaluator
from twin.planning.windows import Trial

OTHER_SEED = 1_000_000
"""Difference of the seeds of windows that select and of those that confirm."""

LOOKS = 4
"""Looks at one candidate: after `plan.replications` windows, and twice, four and eight times as many."""

EARLY = 8
"""Windows of one more look before, which confirms a candidate far below its goals and refuses none."""

REQUESTS = 200_000
"""Further looks are taken up to this number of requests, where only the p-value speaks against a candidate: a few
windows, or short ones, cannot make it small."""

PROMISING = 0.75
"""A candidate less likely than this to meet its goals is not worth further windows."""


def max_looks(replications: int, requests: int) -> int:
    """Looks at one candidate at most, of which the first is at this number of windows, of `requests` each."""
    if not requests:  # a window is a whole run
        return LOOKS
    return max(LOOKS, 1 + int(math.log2(max(REQUESTS / (replications * requests), 1.0))))


class Confirmer:
    """Tests candidates one after the other, until one is confirmed.

    Args:
        evaluator: of the question with another seed. attempts: deployments that were tested before.
        looks: at one candidate, at most; None: as many as `REQUESTS` allow.
    """

    def __init__(self, evaluator: Evaluator, attempts: int = 0, looks: int | None = None) -> None:
        self.evaluator = evaluator
        self._attempts = attempts
        self._looks = looks

    def confirm(self, trial: Trial) -> Trial:
        """The trial of a candidate by new windows.

        It is confirmed if the probability of a span, times one minus the adjusted p-value of the windows, reaches the
        plan's reliability, and if goals hold under enough new draws of the step times. Where nothing is random, the
        trial is returned as it is.
        """
        candidate, spec = trial.candidate, self.evaluator.question.spec
        if not self.evaluator.is_random([candidate]):
            return trial
        self._attempts += 1
        if self._looks is None and self.evaluator.can_draw(candidate):
            (first,) = self.evaluator.evaluate([candidate])
            first = self.evaluator.add_draws(replace(first, meets=True), SEARCH_DRAWS)
            if first.draws and not first.meets:
                return replace(first, reason=f"new draws: {first.reason}", seed=self.evaluator.question.seed)
        looks = self._looks or max_looks(spec.replications, self.evaluator.horizon.long)
        early = spec.replications > EARLY
        for look in range(1 - early, looks + 1):
            (trial,) = self.evaluator.evaluate([candidate], EARLY if not look else spec.replications << (look - 1))
            claim = trial.probability * (1 - self._p_value(trial, looks + early))
            if claim >= spec.reliability:
                trial = self.evaluator.add_draws(replace(trial, meets=True, reason=""))
                break
            if look and trial.probability < (PROMISING if look < LOOKS else spec.reliability):
                break
        meets = claim >= spec.reliability and (trial.sure is None or trial.meets)
        reason = "" if meets else f"new windows: {trial.reason}"
        if not meets and not trial.reason:
            reason = f"too close to its goals: not certain after {len(trial.windows)} new windows"
        return replace(trial, decided=True, meets=meets, reason=reason, seed=self.evaluator.question.seed)

    def _p_value(self, trial: Trial, looks: int) -> float:
        """The adjusted p-value of a trial's windows; 1 for a system whose queue grows."""
        if trial.saturated or len(trial.windows) < 2:
            return 1.0
        variance = np.array([window["variance"] for window in trial.windows]).sum(axis=0)
        # Shares of requests that must be within a limit; 0 for goals that do not count requests.
        goals = self.evaluator.goals
        shares = np.array([goal.limit if goal.metric == "goodput" else goal.quantile or 0.0 for goal in goals])
        expected_misses = np.where(shares > 0, variance / np.maximum(shares, 1e-9), 0.0)
        return adjusted_p_value(p_value(trial.excess, expected_misses), self._attempts, looks)
