"""The maximum sustainable load of a deployment under its goals, and the effects of changes.

Loads are searched by the rate of arrivals: for the headroom of a recommendation, for the deployment of the highest rate
within limits (objective `throughput`), and for a given deployment, with an interval (`twin plan --max-load`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from scenarios.fields import Goal
from twin.planning.confirming import Confirmer
from twin.planning.evaluation import DRAWS, SHORT, Evaluator
from twin.planning.family_estimates import FamilyEstimate
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, candidate, document, without_prefix_cache
from twin.planning.windows import Trial

PRECISION, FINE_PRECISION = 0.02, 0.01
"""The precision of the highest rate, relative to it; that of the ends of an interval."""

STEPS = 10
"""Steps up or down that look for a rate on the other side of the goals."""

GROWTH, FINE_STEPS = 1.1, 30
"""The same for an interval, and their factor."""

CORRECTIONS = 5
"""Rates that new windows are asked about, each lower than the one before by twice as much: 2 to 49 % in all."""

CONTENDERS = 10
"""Deployments of which the one of the highest rate is searched by simulation."""

TAIL = 0.025
"""Probability beyond each end of the interval."""

Evaluators = Callable[[Question], Evaluator]


@dataclass(frozen=True)
class Load:
    """The highest rate at which a deployment meets its goals.

    Attributes:
        rate: requests per second. binds: the goal that is missed first above it, or None where a queue grows.
        reason: the goal that is missed a little above it, in words. trial: at that rate.
        interval: rates between which it just meets the goals in the long run; None if they were not looked for.
    """

    rate: float
    binds: Goal | None
    reason: str
    trial: Trial
    interval: tuple[float, float] | None = None

    def document(self, rate: float | None) -> Document:
        """The load beside a rate of arrivals."""
        return {
            "rate": self.rate,
            "factor": None if rate is None else self.rate / rate,
            "binds": None if self.binds is None else self.binds.name,
            "beyond": self.reason,
        }


def highest_rate(evaluators: Evaluators, question: Question, deployment: Candidate, start: float) -> Load | None:
    """Bisect the rate of arrivals, between one that meets the goals and one that does not.

    Args:
        start: the first rate to try, requests per second.

    Returns:
        None if no rate meets the goals.
    """
    low: tuple[float, Trial] | None = None
    high: tuple[float, Trial] | None = None
    rate = start
    for _ in range(STEPS):
        trial = _at(evaluators, question, deployment, rate)
        low, high = ((rate, trial), high) if trial.meets else (low, (rate, trial))
        if low is not None and high is not None:
            break
        rate *= 1.25 if trial.meets else 0.8
    if low is None or high is None:
        return None if low is None else Load(low[0], None, "no higher rate was tried", low[1])
    while high[0] - low[0] > PRECISION * low[0]:
        rate = rounded((low[0] + high[0]) / 2)
        trial = _at(evaluators, question, deployment, rate)
        low, high = ((rate, trial), high) if trial.meets else (low, (rate, trial))
    return Load(low[0], _binding(high[1], question), high[1].reason, low[1])


def load_with_interval(evaluators: Evaluators, question: Question, deployment: Candidate, start: float) -> Load | None:
    """The highest rate at which a span meets the goals, and those between which the long run just meets them.

    Each is a test of every rate, inverted. All rates have the same windows, so goals that are likely at one are more
    likely at a lower one, and the first rate that a test rejects ends the search.
    """
    trials: dict[float, tuple[Trial, float]] = {}

    def at(rate: float) -> tuple[Trial, float]:
        if rate not in trials:
            trials[rate] = _whole(evaluators(question.at_rate(rate)), deployment)
        return trials[rate]

    span = _crossing(lambda rate: at(rate)[0].meets, start)
    low = _crossing(lambda rate: at(rate)[1] >= 1 - TAIL, start if span is None else span[0])
    if span is None or low is None:
        return None
    high = _crossing(lambda rate: at(rate)[1] >= TAIL, low[0])
    assert high is not None  # it is met where the lower end is
    trial, beyond = at(span[0])[0], at(span[1])[0]
    return Load(span[0], _binding(beyond, question), beyond.reason, trial, (low[0], high[1]))


def _whole(evaluator: Evaluator, deployment: Candidate) -> tuple[Trial, float]:
    """The trial by all windows and draws of the plan, unless a short window decides, and its long-run probability."""
    (trial,) = evaluator.evaluate([deployment], SHORT)
    if trial.decided:
        return trial, 0.0
    (trial,) = evaluator.evaluate([deployment], evaluator.question.spec.replications)
    trial = replace(evaluator.add_all_draws(trial), decided=True)
    return trial, trial.long_run_probability()


def _crossing(condition: Callable[[float], bool], start: float) -> tuple[float, float] | None:
    """Two rates close together, of which the lower one meets a condition; None if no rate that was tried does."""
    low = high = start
    for _ in range(FINE_STEPS):
        if condition(low):
            break
        low = rounded(low / GROWTH)
    else:
        return None
    for _ in range(FINE_STEPS):
        if not condition(high):
            break
        high = rounded(high * GROWTH)
    while high - low > FINE_PRECISION * low:
        middle = rounded((low + high) / 2)
        low, high = (middle, high) if condition(middle) else (low, middle)
    return low, high


def _binding(trial: Trial, question: Question) -> Goal | None:
    """The goal that a trial is worst for; None where a queue grows."""
    return None if trial.saturated or not trial.windows else trial.worst(question.goals)[1]


def confirmed(
    confirmer_of: Callable[[Question, int], Confirmer], question: Question, load: Load, share: float
) -> Load | None:
    """The load by windows that had no part in finding it: the first lower rate that they confirm.

    The rate itself just meets the goals, so that many windows would be spent on it in vain.

    `confirmer_of`: makes a confirmer of a question, after a number of attempts. `share`: of the rate that is estimated
    to remain with the error of the step times.
    """
    rate = load.rate * share
    for attempt in range(CORRECTIONS):
        rate = rounded(rate * (1 - PRECISION * 2**attempt))
        trial = confirmer_of(question.at_rate(rate), attempt).confirm(load.trial)
        if trial.meets:
            return replace(load, rate=rate, trial=trial)
    return None


def share_under_draws(question: Question, estimate: FamilyEstimate, deployment: Candidate) -> float:
    """The highest rate with the error of the step times, relative to that without, by estimates."""
    draws = [estimate.under(question.seed, draw) for draw in range(DRAWS)]
    rates = sorted(highest_estimate(drawn, deployment, question.goals) for drawn in draws)
    num_allowed = math.floor((1 - question.spec.confidence) * DRAWS + 1e-9)
    return min(rates[num_allowed] / max(highest_estimate(estimate, deployment, question.goals), 1e-9), 1.0)


def highest_estimate(estimate: FamilyEstimate, deployment: Candidate, goals: Sequence[Goal]) -> float:
    """The rate at which a deployment is estimated to just meet its goals, requests per second."""
    engines, (first, later) = deployment.family.engines(deployment.sizes), estimate.engine_rates(goals)
    return min(engines[0] * first, engines[-1] * later)


def rounded(rate: float) -> float:
    return float(f"{rate:.5g}")


def _at(evaluators: Evaluators, question: Question, deployment: Candidate, rate: float) -> Trial:
    evaluator = evaluators(question.at_rate(rounded(rate)))
    (screened,) = evaluator.evaluate([deployment], SHORT)
    return screened if screened.decided else evaluator.settle([deployment])[0]


def estimated_rate(estimate: FamilyEstimate, deployment: Candidate) -> float:
    """The rate at which the busier pool is near its capacity, requests per second."""
    engines = deployment.family.engines(deployment.sizes)
    return rounded(0.7 * min(engines[0] * estimate.prefill.capacity, engines[-1] * estimate.decode.capacity))


def highest_throughput(
    evaluators: Evaluators, question: Question, estimates: Sequence[FamilyEstimate]
) -> tuple[Load | None, list[Trial]]:
    """The deployment of the highest rate within the limits, as for objective `throughput`, and all trials.

    The `CONTENDERS` deployments of the highest estimates are tried. One that fails above the highest rate of those
    before is out.
    """
    best: Load | None = None
    trials = []
    likely = [
        (rounded(highest_estimate(estimate, deployment, question.goals)), deployment)
        for estimate in estimates
        for deployment in estimate.candidates
    ]
    likely.sort(key=lambda pair: (-pair[0], pair[1].gpus, pair[1].complexity))
    for start, deployment in likely[:CONTENDERS]:
        if best is not None:
            start = rounded(best.rate * (1 + PRECISION))
            trial = _at(evaluators, question, deployment, start)
            if not trial.meets:
                trials.append(trial)
                continue
        load = highest_rate(evaluators, question, deployment, start) if start else None
        if load is not None:
            trials.append(load.trial)
            best = load
    return best, trials


def changes(evaluators: Evaluators, question: Question, deployment: Candidate) -> list[Document]:
    """Trials of the recommended deployment where something differs from the question.

    `evaluators`: by the windows and draws that confirmed it, so that a change is never more certain by chance.
    """
    rows = []
    for name, changed, variant in _variants(question, deployment):
        trial = Trial(deployment, reason="none is left")
        if variant is not None:
            evaluator = evaluators(changed)
            (trial,) = evaluator.settle([variant])
            trial = evaluator.bracket_draws(trial) if trial.meets else trial
        values = {goal.name: trial.value(i) for i, goal in enumerate(question.goals)} if trial.windows else None
        rows.append({
            "change": name, "meets": trial.meets, "probability": trial.probability, "sure": trial.sure,
            "reason": trial.reason, "values": values,
        })  # fmt: skip
    return rows


def _variants(question: Question, deployment: Candidate) -> Iterator[tuple[str, Question, Candidate | None]]:
    """Each change in words, with the question and the deployment after it; None where no engine is left."""
    if question.rate is not None:
        for factor in (0.8, 1.2):
            yield f"rate {100 * (factor - 1):+.0f} %", question.at_rate(rounded(factor * question.rate)), deployment
    for factor in (0.8, 1.2):
        yield f"lengths {100 * (factor - 1):+.0f} %", question.with_lengths(factor), deployment
    plan = question.plan(document(question, deployment.family, deployment.sizes))
    if question.shares_prefixes and any(pool.scheduler.config.enable_prefix_caching for pool in plan.pools):
        for factor in (0.8, 1.2):
            if (changed := question.with_prefixes(factor)) is not None:
                yield f"shared prefixes {100 * (factor - 1):+.0f} %", changed, deployment
        yield "no hits in the prefix cache", question, without_prefix_cache(question, deployment)
    roles = ("engine",) if len(deployment.sizes) == 1 else ("prefill engine", "decode engine")
    for pool, role in enumerate(roles):
        sizes = tuple(size - (index == pool) for index, size in enumerate(deployment.sizes))
        smaller = candidate(question.spec, deployment.family, sizes) if sizes[pool] else None
        yield f"one {role} lost", question, smaller
