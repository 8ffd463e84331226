"""Evaluates candidates by simulation: a short window, some long ones, then as many as a decision needs.

Every candidate gets the same requests at the same times (common random numbers): window r of each uses replication r.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from latency_models.step_time import Unknown
from reports.run_directory import fingerprint
from scenarios.fields import Goal
from twin.planning.confidence import CERTAIN, LIKELY, clearly_missed, last_miss, met_under_draws, probability
from twin.planning.family_estimates import FamilyEstimate
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, document
from twin.planning.windows import Horizon, Simulations, Trial, Window, describe_overload, in_unit
from twin.serving.plan.plan import Draw, ServingPlan

HOPELESS = 0.02
"""A candidate less likely than this to meet its goals gets no further windows."""

SHORT = 0
"""In place of a number of long windows: one short window."""

LONG_WINDOWS, DRAWS = 4, 20
"""Long windows of a first evaluation; draws of the step-time model, a window of each."""

SEARCH_DRAWS = 6
"""Draws, the worst, under which a search evaluates a candidate; its confirmation goes on if one of them misses."""


class Evaluator:
    """Simulates windows of candidates, once each.

    `simulations`: the windows of the plan, which several questions may share. `families`: estimates of the candidates,
    by which draws of the step times are ranked.
    """

    def __init__(
        self, question: Question, horizon: Horizon, simulations: Simulations, families: Sequence[FamilyEstimate] = ()
    ) -> None:
        self.question = question
        self.horizon = horizon
        self.goals = question.goals
        self._simulations = simulations
        self._keys: set[str] = set()  # of windows that were asked for
        self._families = {estimate.family.name: estimate for estimate in families}
        self._ranks = list(range(DRAWS))  # draws from the worst to the mildest, for the candidate that ranked them
        self._plans: dict[tuple[str, int], ServingPlan] = {}
        name, workload = question.document.get("name"), question.document["workload"]
        self._identity = fingerprint([name, workload, question.seed, question.change, horizon.warmup])

    def is_random(self, candidates: Sequence[Candidate]) -> bool:
        """True if windows of some candidate differ from one another."""
        return any(self._plan(candidate, self.horizon.long).random for candidate in candidates)

    def can_draw(self, candidate: Candidate) -> bool:
        """True if the error of a candidate's step times is known, so that they can be drawn."""
        return self._plan(candidate, self.horizon.long).can_draw

    # -- trials ------------------------------------------------------------------------------------------------------

    def evaluate(
        self, candidates: Sequence[Candidate], windows: int = LONG_WINDOWS, limit: int | None = None
    ) -> list[Trial]:
        """Evaluate candidates with the step times at their best estimates.

        `windows`: long ones for each, or `SHORT`: one short window, which decides only where it is clear. `limit`:
        double the windows of those that are undecided, up to this number.
        """
        trials: dict[str, Trial] = {}
        pending = list(candidates)
        while pending:
            trials |= {trial.candidate.name: trial for trial in self._simulated(pending, windows)}
            if limit is None or windows >= limit:
                break
            pending = [candidate for candidate in pending if not trials[candidate.name].decided]
            windows = min(2 * windows, limit)
        return [trials[candidate.name] for candidate in candidates]

    def settle(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Evaluate candidates until each is decided, by at most `plan.replications` windows."""
        limit = self.question.spec.replications
        return self.evaluate(candidates, min(LONG_WINDOWS, limit), limit)

    def add_draws(self, trial: Trial, limit: int = DRAWS) -> Trial:
        """The trial with the error of the step times, where it is known.

        Draws come in batches, the worst first as estimated, until too many of them speak against the candidate, or
        `SEARCH_DRAWS` in a row do not: milder ones are taken not to, either.

        `limit`: draws to simulate; the candidate is taken to meet its goals under the others.
        """
        if not self._has_draws(trial):
            return trial
        order, sure = self._from_worst(trial)[0], 1.0
        shifts: list[list[float]] = []
        while len(shifts) < limit and sure >= self.question.spec.confidence - 1e-9:
            shifts += self._shifts(trial, order[len(shifts) : min(len(shifts) + len(self.worst_draws), limit)])
            sure = (DRAWS - self._num_missed(trial, shifts)) / DRAWS
            recent = shifts[-SEARCH_DRAWS:]
            if self._families and len(recent) == SEARCH_DRAWS and not self._num_missed(trial, recent):
                break
        return self._with_draws(trial, shifts, sure)

    def add_all_draws(self, trial: Trial) -> Trial:
        """The trial under every draw of the step times, for the probability over all of them."""
        if not self._has_draws(trial):
            return trial
        shifts = self._shifts(trial, range(DRAWS))
        return self._with_draws(trial, shifts, (DRAWS - self._num_missed(trial, shifts)) / DRAWS)

    def bracket_draws(self, trial: Trial) -> Trial:
        """The trial with the share of draws under which its goals hold, by those at the edge.

        Goals that hold under two draws in a row, from the worst to the mildest, are taken to hold under all milder
        ones; goals that are missed under one, under all worse ones that were not simulated.
        """
        if trial.candidate.family.name not in self._families:
            return self.add_all_draws(trial)
        if not self._has_draws(trial):
            return trial
        order, num_likely = self._from_worst(trial)
        shifts: dict[int, list[float]] = {}

        def misses(place: int) -> bool:
            if place not in shifts:
                (shifts[place],) = self._shifts(trial, [order[place]])
            return self._num_missed(trial, [shifts[place]]) > 0

        last = last_miss(misses, num_likely, DRAWS)
        held = sum(place < last and not misses(place) for place in shifts)
        return self._with_draws(trial, list(shifts.values()), (DRAWS - 1 - last + held) / DRAWS)

    def _has_draws(self, trial: Trial) -> bool:
        return bool(trial.windows) and not trial.saturated and self.can_draw(trial.candidate)

    def _num_missed(self, trial: Trial, shifts: Sequence[Sequence[float]]) -> int:
        """Draws with these shifts under which some goal is missed."""
        return int((~met_under_draws(trial.excess, np.array(shifts))).sum())

    def _with_draws(self, trial: Trial, shifts: Sequence[Sequence[float]], sure: float) -> Trial:
        meets = trial.meets and sure >= self.question.spec.confidence - 1e-9
        unsure = f"its goals hold under at most {100 * sure:.0f} % of the draws of the step times"
        reason = "" if meets else trial.reason or unsure
        return replace(trial, shifts=shifts, draws=len(shifts), sure=sure, meets=meets, decided=True, reason=reason)

    def reject(
        self, candidates: Sequence[Candidate], as_bad: Callable[[Candidate, int, int], bool] | None = None
    ) -> list[Trial]:
        """Trials of those candidates that clearly miss their goals under too many of the worst draws.

        One window under each draw. A candidate gets no further ones when it is rejected, or cannot be any more.

        Args:
            as_bad: says of a candidate that estimates are no better under the first of two draws than under the
                second, so that a short window under the mildest of `worst_draws` speaks for such a worse one, too;
                None: long windows of `SEARCH_DRAWS` draws, which `add_draws` uses too.
        """
        worst, num_allowed = self.worst_draws, len(self.worst_draws) - 1
        draws = self._ranks[:SEARCH_DRAWS] if as_bad is None else worst[::-1]
        requests, beyond = (self.horizon.long, LIKELY) if as_bad is None else (self.horizon.short, CERTAIN)
        misses: Counter[str] = Counter()
        pending = [candidate for candidate in candidates if self.can_draw(candidate)]
        for remaining, draw in zip(range(len(draws), 0, -1), draws, strict=True):
            pending = [c for c in pending if misses[c.name] <= num_allowed < misses[c.name] + remaining]
            replication = draw % LONG_WINDOWS if as_bad is None else 0
            results = self._simulate([self._window(candidate, requests, replication, draw) for candidate in pending])
            missing = [c for c, result in zip(pending, results, strict=True) if _misses(result, beyond)]
            misses.update(candidate.name for candidate in missing)
            if as_bad is not None and draw == draws[0]:
                sure = (c.name for c in missing if all(as_bad(c, other, draw) for other in draws[1:]))
                misses.update(dict.fromkeys(sure, len(draws) - 1))
        why = "misses its goals under {} of the {} draws of the step times, at least"
        return [
            Trial(candidate, 0.5, reason=why.format(count, DRAWS), draws=count, sure=(DRAWS - count) / DRAWS)
            for candidate in candidates
            if (count := misses[candidate.name]) > num_allowed
        ]

    # -- draws of the step times ------------------------------------------------------------------------------------

    def rank_draws(self, trial: Trial) -> None:
        """Rank the draws of the step times by how far they move a candidate beyond its goals.

        Scores go by the names of unknowns, so a draw that is bad for one deployment is bad for most.
        """
        self._ranks, _ = self._from_worst(trial)

    def _from_worst(self, trial: Trial) -> tuple[list[int], int]:
        """Draws from the worst to the mildest, and how many are likely to miss a goal, as estimated."""
        family = self._families.get(trial.candidate.family.name)
        if family is None:
            return list(range(DRAWS)), 0
        severities = family.severities(trial, self.question, DRAWS)
        return sorted(range(DRAWS), key=lambda draw: -severities[draw]), sum(severity > 1 for severity in severities)

    @property
    def worst_draws(self) -> list[int]:
        """The worst draws, one more than those under which a candidate may miss its goals."""
        num_allowed = math.floor((1 - self.question.spec.confidence) * DRAWS + 1e-9)
        return self._ranks[: num_allowed + 1]

    def severity_of_worst(self, candidate: Candidate) -> float:
        """The distance of a candidate beyond its goals under the worst draws, in short windows in the store."""
        windows = [self._window(candidate, self.horizon.short, 0, draw) for draw in self.worst_draws]
        store = self._simulations.store
        return sum(_severity(store[window.key]) for window in windows if window.key in store)

    def costliest_unknowns(self, candidate: Candidate) -> list[tuple[Unknown, float]]:
        """The unknowns of the step times, the one first that moves a candidate furthest alone at a score of -1 or 1.

        With how far it moves it beyond its goals, in deviations of a short window; infinite where a queue grows.
        """
        unknowns = self._plan(candidate, self.horizon.short).unknowns()
        pairs = [(unknown, score) for unknown in unknowns for score in (-1.0, 1.0)]
        windows = [self._window(candidate, self.horizon.short, 0, (unknown.name, score)) for unknown, score in pairs]
        severities = list(map(_severity, self._simulate(windows)))
        worst = [max(severities[2 * i : 2 * i + 2]) for i in range(len(unknowns))]
        return sorted(zip(unknowns, worst, strict=True), key=lambda pair: -pair[1])

    def _shifts(self, trial: Trial, draws: Iterable[int]) -> list[list[float]]:
        """The shifts of the excesses of a trial's windows by draws of the step-time model: a window for each draw."""
        count = min(len(trial.windows), LONG_WINDOWS)  # so that these are windows of `reject`, too
        windows = [self._window(trial.candidate, self.horizon.long, draw % count, draw) for draw in draws]
        pairs = zip(windows, self._simulate(windows), strict=True)
        return [_shift(result, trial.windows[window.replication]) for window, result in pairs]

    # -- windows -----------------------------------------------------------------------------------------------------

    def scenario(self, candidate: Candidate, requests: int) -> Document:
        """The scenario of a candidate's windows, each with this number of requests on average."""
        horizon, question = self.horizon, self.question
        scenario = document(question, candidate.family, candidate.sizes)
        if question.rate is not None:
            measure = {**(scenario.get("measure") or {}), "after": horizon.warmup, "before": requests / question.rate}
            scenario = {**scenario, "measure": measure, "workload": question.window(requests)}
        return scenario

    def _plan(self, candidate: Candidate, requests: int) -> ServingPlan:
        key = (candidate.name, requests)
        if key not in self._plans:
            detail = any(goal.of is not None for goal in self.goals)  # ids, for goals of some of the requests
            self._plans[key] = self.question.plan({**self.scenario(candidate, requests), "detail": detail})
        return self._plans[key]

    def _window(self, candidate: Candidate, requests: int, replication: int, draw: Draw = None) -> Window:
        plan = self._plan(candidate, requests)
        label = "-" if draw is None else f"{draw[0]}{draw[1]:+g}" if isinstance(draw, tuple) else draw
        key = f"{self._identity}/{candidate.name}/{plan.requests}/{label}/{replication}"
        return Window(key, plan, tuple(self.goals), replication, draw)

    def _simulate(self, windows: Sequence[Window]) -> list[Document]:
        by_key = {window.key: window for window in windows if window.key not in self._keys}
        results = self._simulations.results(windows)
        self._simulations.requests += sum(window.plan.requests for window in by_key.values())
        self._keys |= by_key.keys()
        return results

    # -- from windows to trials --------------------------------------------------------------------------------------

    def _simulated(self, candidates: Sequence[Candidate], count: int) -> list[Trial]:
        """A trial of each candidate by `count` windows; one where nothing is random."""
        if count == SHORT:
            results = self._simulate([self._window(candidate, self.horizon.short, 0) for candidate in candidates])
            return [self._screened(*pair) for pair in zip(candidates, results, strict=True)]
        count = count if self.is_random(candidates) else 1
        windows = [self._window(candidate, self.horizon.long, r) for candidate in candidates for r in range(count)]
        results = self._simulate(windows)
        return [self._trial(candidate, results[i * count : (i + 1) * count]) for i, candidate in enumerate(candidates)]

    def _screened(self, candidate: Candidate, result: Document) -> Trial:
        """A trial by one short window."""
        if failed := _failure(candidate, [result]):
            return failed
        pairs = zip(self.goals, result["excess"], result["variance"], strict=True)
        missed = [goal for goal, excess, variance in pairs if clearly_missed(excess, variance)]
        if missed:
            return Trial(candidate, 0.0, [result], reason=self._describe_miss([result], missed[0]))
        return Trial(candidate, 0.5, [result], decided=False, meets=True)

    def _trial(self, candidate: Candidate, windows: list[Document]) -> Trial:
        if failed := _failure(candidate, windows):
            return failed
        spec, plan = self.question.spec, self._plan(candidate, self.horizon.long)
        likelihood = probability(np.array([window["excess"] for window in windows]), self.windows_in_span(windows))
        # A candidate in doubt with the estimates of the step times fails with their error.
        last = len(windows) >= (LONG_WINDOWS if plan.can_draw else spec.replications) or not plan.random
        meets = likelihood >= (spec.reliability if last else (1 + spec.reliability) / 2)
        decided = last or meets or likelihood < HOPELESS
        reason = "" if meets else self._describe_worst(windows)
        if not meets and likelihood >= HOPELESS:
            reason += f" (met in {100 * likelihood:.2g} % of spans)"
        return Trial(candidate, likelihood, windows, decided, meets, reason)

    def windows_in_span(self, windows: Sequence[Document]) -> float:
        """Windows in a span; 1 where a window is a whole run, as of a replay."""
        if self.question.rate is None:
            return 1.0
        seconds = float(np.mean([window["summary"]["duration"] for window in windows]))
        return max(self.horizon.span / seconds, 1.0) if seconds else 1.0

    def _describe_worst(self, windows: Sequence[Document]) -> str:
        """The goal that is missed by most deviations, in words."""

        def deviations(goal: int) -> float:
            scale = math.sqrt(sum(window["variance"][goal] for window in windows)) or 1.0
            return float(sum(window["excess"][goal] for window in windows) / scale)

        return self._describe_miss(windows, self.goals[max(range(len(self.goals)), key=deviations)])

    def _describe_miss(self, windows: Sequence[Document], goal: Goal) -> str:
        index = self.goals.index(goal)
        values = [window["values"][index] for window in windows]
        if None in values:
            return f"no request counts for {goal.name}"
        return f"{goal.name} is {in_unit(goal, float(np.mean(values)))}, goal {in_unit(goal, goal.limit)}"


def _failure(candidate: Candidate, windows: Sequence[Document]) -> Trial | None:
    """The trial of a candidate that cannot run, or whose queue grows in half of the windows."""
    for window in windows:
        if "refused" in window:
            return Trial(candidate, reason=window["refused"])
    overloads = [window["overload"] for window in windows if window["overload"]]
    if 2 * len(overloads) < len(windows):
        return None
    return Trial(candidate, 0.0, windows, reason=describe_overload(overloads[0]), saturated=True)


def _misses(result: Document, beyond: float) -> bool:
    """True if a window says clearly that some goal is missed. `beyond`: deviations, as of `clearly_missed`."""
    if "refused" in result or result["overload"]:
        return True
    pairs = zip(result["excess"], result["variance"], strict=True)
    return any(clearly_missed(excess, variance, beyond) for excess, variance in pairs)


def _severity(result: Document) -> float:
    """The largest excess of a window, in deviations of that of a deployment that just meets the goal."""
    if "refused" in result or result["overload"]:
        return math.inf
    pairs = zip(result["excess"], result["variance"], strict=True)
    return max(
        (float(excess / math.sqrt(variance) if variance > 0 else excess) for excess, variance in pairs), default=0.0
    )


def _shift(result: Document, base: Document) -> list[float]:
    """The shift of a window's excesses by a draw of the step-time model."""
    if "refused" in result or result["overload"]:
        return [math.inf] * len(base["excess"])
    return [after - before for after, before in zip(result["excess"], base["excess"], strict=True)]
