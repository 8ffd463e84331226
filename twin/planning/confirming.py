"""Confirms the candidate that a search has selected, by windows that had no part in the selection.

A search evaluates many candidates and takes the first that seems to meet its goals, so it tends to select one whose
windows were favourable by chance. New windows have no such bias. They are of the same question with another seed, and
the draws of the step times' error are new too. Trials by these windows also say what confidence costs, and why
alternatives lose, so that all rows have one basis.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scenarios.fields import Goal
from twin.planning.confidence import adjusted_p_value, p_value
from twin.planning.evaluation import SEARCH_DRAWS, Evaluator
from twin.planning.family_estimates import LedgerEntry, beyond_reach
from twin.planning.question import Document, Question
from twin.planning.space import Candidate
from twin.planning.windows import Trial, in_unit

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

    `evaluator`: of the question with another seed. `attempts`: deployments that were tested before. `looks`: at one
    candidate, at most; None: as many as `REQUESTS` allow.
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


LEVELS = (0.5, 0.8, 0.95)
"""Confidences of the curve, beside that of the plan."""


@dataclass(frozen=True)
class Level:
    """The cheapest deployment that was seen to reach a confidence; None: the best estimate.

    `trial`: None where no deployment reaches it.
    """

    confidence: float | None
    trial: Trial | None

    def document(self) -> Document:
        """The entry of `twin.plan/1`."""
        trial, deployment = self.trial, self.trial and self.trial.candidate
        fields = {"name": "name", "devices": "devices", "gpus": "gpus", "cost_per_hour": "cost"}
        row = {field: getattr(deployment, name, None) for field, name in fields.items()}
        return {"confidence": self.confidence, **row, "sure": trial and trial.sure}


def confidence_curve(
    question: Question,
    by_estimate: Trial,
    best: Trial | None,
    rungs: Sequence[Candidate],
    trial_of: Callable[[Candidate], Trial],
) -> list[Level]:
    """The cheapest deployment at each confidence, by bisection of candidates of rising price.

    `rungs`: from that of the best estimate on. `trial_of`: simulates one; called once for each.
    """
    plan_confidence, reliability = question.spec.confidence, question.spec.reliability
    trials = {trial.candidate.name: trial for trial in (by_estimate, best) if trial is not None}

    def trial_at(rung: int) -> Trial:
        name = rungs[rung].name
        if name not in trials:
            trials[name] = trial_of(rungs[rung])
        return trials[name]

    def reaches(rung: int, confidence: float) -> bool:
        trial = trial_at(rung)
        return trial.probability >= reliability and (trial.sure or 0.0) >= confidence - 1e-9

    levels, start = [Level(None, by_estimate)], 0
    top = len(rungs) if best is None else [rung.name for rung in rungs].index(best.candidate.name)
    for confidence in sorted({*LEVELS, plan_confidence}):
        if best is not None and confidence == plan_confidence:
            levels.append(Level(confidence, best))
            start = top
            continue
        end = top if best is not None and confidence < plan_confidence else len(rungs)
        end = start if start < end and rungs[start].name in trials and reaches(start, confidence) else end
        start = bisect_left(range(len(rungs)), True, start, end, key=lambda rung: reaches(rung, confidence))
        levels.append(Level(confidence, trial_at(start) if start < len(rungs) else None))
    return levels


def why_not(
    question: Question,
    best: Trial | None,
    trials: Sequence[Trial],
    refused: Sequence[LedgerEntry],
    statuses: Mapping[str, Counter[str]],
) -> list[Document]:
    """Each alternative and each layout without a row in a line: why it loses, and what would admit it.

    `trials`: of the table, without the recommendation. `statuses`: reasons of candidates that are out, by layout.
    """
    lines = [
        {"layout": trial.candidate.family.layout, "name": trial.candidate.name, "devices": trial.candidate.devices,
         "why": _reason(trial, best), "admitted_by": _admission(question, trial)}
        for trial in trials
    ]  # fmt: skip
    layouts = {trial.candidate.family.layout for trial in trials if trial.candidate.family.given is None}
    layouts |= set() if best is None else {best.candidate.family.layout}
    for layout in question.spec.layouts:
        if layout in layouts:
            continue
        families = [family for family in refused if family.family.layout == layout]
        bounds = [(goal.ratio(value), goal, value) for family in families for goal, value in family.bounds]
        if bounds:
            _, goal, value = min(bounds, key=lambda bound: bound[0])
            why, admission = beyond_reach(goal, value), _flag(goal, value)
        else:
            reasons = Counter(family.reason for family in families) + statuses.get(layout, Counter())
            why = reasons.most_common(1)[0][0] if reasons else "it has no candidate within the limits"
            admission = None
        lines.append({"layout": layout, "name": None, "devices": None, "why": why, "admitted_by": admission})
    return lines


def _reason(trial: Trial, best: Trial | None) -> str:
    if not trial.meets or best is None:
        return trial.reason or "its goals are in doubt"
    candidate, cheapest = trial.candidate, best.candidate
    if candidate.cost is not None and cheapest.cost is not None and candidate.cost > cheapest.cost:
        return f"meets the goals at {candidate.cost:.4g} an hour, {cheapest.cost:.4g} suffice"
    if candidate.gpus > cheapest.gpus:
        return f"meets the goals on {candidate.gpus} GPUs, {cheapest.gpus} suffice"
    return "meets the goals, but the recommendation is simpler or has more room"


def _admission(question: Question, trial: Trial) -> str | None:
    """Flags under which a deployment would be taken: its worst values as goals, or a lower confidence."""
    if trial.meets or trial.saturated:
        return None
    values = [(goal, trial.value(i)) for i, goal in enumerate(question.goals)]
    flags = [_flag(goal, value) for goal, value in values if value is not None and goal.ratio(value) > 1]
    if not flags and trial.sure is not None and 0.5 < trial.sure < question.spec.confidence:
        flags.append(f"--confidence {trial.sure:g}")
    return " ".join(flags) or None


def _flag(goal: Goal, value: float) -> str:
    return f"--slo {goal.name}={in_unit(goal, value).replace(' ', '').removesuffix('/s')}"
