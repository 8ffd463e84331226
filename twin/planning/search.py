"""The search for the best candidate: short windows reject candidates from the middle of each family, long ones decide.

If a candidate fails, smaller ones of its family are pruned; if one is feasible, more expensive ones are pruned. The
rest are evaluated in the order of the objective, so the first candidate that meets the goals is the best one, up to the
errors of the screening.

Where the error of the step times is known, there are two searches. The first takes the step times at their best
estimates, and ends when a deployment meets the goals with these but not with their error. The second begins with the
candidates that the first has not rejected, and screens under the draws that were worst for that deployment: candidates
that fail under more of them than the plan's confidence allows are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from twin.planning.confidence import last_miss
from twin.planning.confirming import PROMISING, Confirmer
from twin.planning.evaluation import SEARCH_DRAWS, SHORT, Evaluator
from twin.planning.family_estimates import FamilyEstimate, under_draw
from twin.planning.question import Question
from twin.planning.space import Candidate, Family
from twin.planning.windows import CpuLimitReached, Trial

FIRST_CANDIDATES = 4
"""Candidates of the first evaluation: the cheapest of those estimated to meet the goals."""

FINALISTS = 2
"""Equally good and equally simple candidates that are evaluated to the end at a time; the one that is further below its
goals is the first to be confirmed."""

DEARER = 1.25
"""Where all candidates that are cheap enough have failed, the second search goes on to this multiple of the price."""


class Search:
    """One search.

    Args:
        confirmer: decides on a recommendation.
        on_better: called with the first candidate that seems feasible, and with each better one.

    Attributes:
        trials: of every candidate that was simulated, by name; the latest.
        statuses: status and reason of every candidate that has them, by name.
        best: the recommendation; None while there is none.
        incumbent: where the CPU limit was reached, the cheapest deployment found to meet the goals, not confirmed.
        by_estimate: the cheapest deployment that meets the goals with the step times at their best estimates; None
            where their error is unknown, or where none does.
    """

    def __init__(
        self,
        question: Question,
        families: Sequence[FamilyEstimate],
        evaluator: Evaluator,
        confirmer: Confirmer,
        on_better: Callable[[Trial], object] = lambda trial: None,
    ) -> None:
        self.question = question
        self.evaluator = evaluator
        self.confirmer = confirmer
        self._on_better = on_better
        self.trials: dict[str, Trial] = {}
        self.statuses: dict[str, tuple[str, str]] = {}
        self.best: Trial | None = None
        self.incumbent: Trial | None = None
        self.by_estimate: Trial | None = None
        self._families = {estimate.family.name: estimate for estimate in families}
        self._estimates: Mapping[str, FamilyEstimate] = self._families  # in the second search, under a bad draw
        self._under: dict[int, Mapping[str, FamilyEstimate]] = {}  # each of the worst draws
        self._open = {name: list(estimate.candidates) for name, estimate in self._families.items()}
        self._likely: set[str] = set()
        self._with_error = False  # True in the second search
        self._limit = math.inf  # of the second search: the lowest objective that short windows let pass
        self._ratios: dict[str, float] = {}

    def run(self) -> Trial | None:
        """Search; the recommendation, or None if no candidate meets the goals.

        Raises `CpuLimitReached` before a recommendation is confirmed; what has been rejected by then stays so.
        """
        try:
            self._run()
        except CpuLimitReached:
            trial = self.incumbent or self.best or self.by_estimate
            self.incumbent = None if trial is None or self._rejected(trial.candidate) else trial
            self.best = None
            raise
        self._close()
        return self.best

    def _run(self) -> None:
        self._prune([self._families])
        while True:
            self._find_feasible()
            self._screen()
            confirmed = self._decide()
            if confirmed is None:
                self._begin_with_error()
            elif confirmed or self.best is None:
                break
            else:  # an unconfirmed best candidate is rejected, and those pruned because of it are open again
                self._restore()
                if not any(self._open.values()):
                    break

    def key(self, candidate: Candidate) -> tuple[float, ...]:
        """The objective, to be small, then the number of devices or the price, and then how simple it is."""
        cost = float("inf") if candidate.cost is None else candidate.cost
        if self.question.spec.aim == "gpus":
            return candidate.gpus, 0.0 if candidate.cost is None else cost, *candidate.complexity
        return cost, candidate.gpus, *candidate.complexity

    def record(self, trial: Trial) -> None:
        """Record a trial, in place of an earlier one on fewer windows."""
        name = trial.candidate.name
        self.trials[name] = trial
        if trial.failed:
            self.statuses[name] = ("saturated" if trial.saturated else "infeasible", trial.reason)
        elif trial.decided:
            self.statuses[name] = ("feasible", "")

    # -- the phases --------------------------------------------------------------------------------------------------

    def _prune(self, estimates: Sequence[Mapping[str, FamilyEstimate]]) -> None:
        """Drop candidates that are far beyond their capacity by all of some estimates."""
        rate = self.question.load
        if rate is None:
            return
        for name, candidates in self._open.items():
            for candidate in list(candidates):
                reasons = [families[name].saturated(candidate, rate) for families in estimates]
                if reasons[0] is not None and all(reasons):
                    self.statuses[candidate.name] = ("saturated", reasons[0])
                    candidates.remove(candidate)

    def _find_feasible(self) -> None:
        """Find some feasible candidate soon, by the estimates."""
        rate = self.question.load
        if rate is None:
            return
        goals, likely = self.question.goals, []
        for name, estimate in self._estimates.items():
            in_order = sorted(self._open[name], key=self.key)
            first = next((candidate for candidate in in_order if estimate.ratio(candidate, rate, goals) <= 1.0), None)
            likely += [] if first is None else [first]
        likely.sort(key=self.key)
        for start in range(0, len(likely), FIRST_CANDIDATES):
            trials = self._screened(likely[start : start + FIRST_CANDIDATES])
            self._update_all(trial for trial in trials if trial.decided)
            passed = [trial.candidate for trial in trials if not trial.decided]
            if not self._with_error:
                self._update_all(self.evaluator.evaluate(passed[:2]))
            elif passed:
                self._limit = min(self.key(candidate)[0] for candidate in passed)
            if self.best is not None or (self._with_error and passed):
                return

    def _screen(self) -> None:
        """Screen the middle of each family's open candidates until each is rejected or likely.

        In the second search, those that cost more than one which passes wait until it is rejected.
        """
        while candidates := [middle for name in self._open if (middle := self._middle(name)) is not None]:
            for trial in self._screened(candidates):
                if trial.decided:
                    self._update(trial)
                    continue
                candidate = trial.candidate
                self.trials.setdefault(candidate.name, trial)
                family = self._open[candidate.family.name]
                self._likely |= {larger.name for larger in family if candidate.within(larger)}
                if self._with_error:
                    self._limit = min(self._limit, self.key(candidate)[0])

    def _screened(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """Trials by short windows; in the second search under the worst draws, where step times can be drawn."""
        if not self._with_error:
            return self.evaluator.evaluate(candidates, SHORT)
        certain = [candidate for candidate in candidates if not self.evaluator.can_draw(candidate)]
        trials = {candidate.name: Trial(candidate, 0.5, decided=False, meets=True) for candidate in candidates}
        for trial in [*self.evaluator.reject(candidates, self._as_bad), *self.evaluator.evaluate(certain, SHORT)]:
            trials[trial.candidate.name] = trial
        return [trials[candidate.name] for candidate in candidates]

    def _as_bad(self, candidate: Candidate, draw: int, milder: int) -> bool:
        """True if the worst goal is estimated to be no closer under a draw of the step times than under another."""
        rate, goals, name = self.question.load, self.question.goals, candidate.family.name
        if rate is None:
            return False
        worse, better = (self._under[at][name].ratio(candidate, rate, goals) for at in (draw, milder))
        return worse >= better

    def _decide(self) -> bool | None:
        """Evaluate open candidates in the order of the objective, until one is confirmed; False if none is.

        None, at the end of the first search: one meets its goals, but not with the error of the step times.
        """
        while level := self._cheapest_open():
            if self.key(level[0])[0] > self._limit:
                self._limit = DEARER * self.key(level[0])[0]
                self._screen()
                continue
            if self._with_error and (rejected := self.evaluator.reject(level, self._as_bad)):
                self._update_all(rejected)
                continue
            # Simpler ones win at equal prices, so the others are simulated only if these fail.
            simplest = min(candidate.complexity for candidate in level)
            level = [candidate for candidate in level if candidate.complexity == simplest]
            level = sorted(level, key=self._short_margin)[:FINALISTS]
            if self._with_error and (rejected := self.evaluator.reject(level)):
                self._update_all(rejected)
                continue
            trials = self.evaluator.evaluate(level)
            self._update_all(trials)
            trials = self.evaluator.settle([trial.candidate for trial in trials if not trial.failed])
            self._update_all(trials)
            likely = [trial for trial in trials if trial.meets or trial.probability >= PROMISING]
            goals = self.question.goals
            # Of equally simple ones, that furthest below its goals comes first.
            likely.sort(key=lambda trial: (not trial.meets, trial.candidate.complexity, trial.worst(goals)[0]))
            for trial in likely:
                trial = self._add_error(trial)
                if trial.meets:
                    self.incumbent = trial
                if trial.meets or not trial.draws:
                    trial = self.confirmer.confirm(trial)
                self._update(trial)
                self.incumbent = None
                if trial.meets:
                    self._recommend(trial)
                    return True
                if trial.draws and not self._with_error:
                    return None
        return False

    def _short_margin(self, candidate: Candidate) -> float:
        """How far a candidate is from its goals in short windows; small is good."""
        if self._with_error:
            return self.evaluator.severity_of_worst(candidate)
        trial = self.trials.get(candidate.name)
        return math.inf if trial is None else trial.worst(self.question.goals)[0]

    def _add_error(self, trial: Trial) -> Trial:
        """A trial that meets its goals, with the error of the step times where it is known."""
        candidate = trial.candidate
        if not trial.meets or not self.evaluator.can_draw(candidate):
            return trial
        if self.by_estimate is None:
            self.by_estimate = trial
            self.evaluator.rank_draws(trial)
        if self.evaluator.is_random([candidate]):
            return self.evaluator.add_draws(trial, SEARCH_DRAWS)
        return self.evaluator.add_draws(trial)

    def _begin_with_error(self) -> None:
        """Restore all candidates that are not rejected, for the second search."""
        seed, draws = self.question.seed, self.evaluator.worst_draws
        self._under = {draw: under_draw(self._families, seed, draw) for draw in draws}
        self._estimates = self._under[draws[-1]]
        # Those that are feasible are so at the best estimates.
        self.statuses = {name: entry for name, entry in self.statuses.items() if entry[0] != "feasible"}
        self._with_error = True
        self._limit = 0.0  # until one passes
        self._likely = set()
        self._restore()
        self._prune(list(self._under.values()))

    def bounds(self) -> tuple[int | None, int]:
        """The fewest GPUs of a candidate that is not rejected, None without one, and how many are not."""
        members = (candidate for family in self._families.values() for candidate in family.candidates)
        gpus = [candidate.gpus for candidate in members if not self._rejected(candidate)]
        return min(gpus, default=None), len(gpus)

    def _restore(self) -> None:
        """Open all candidates that are not rejected."""
        self.best = None
        for name, family in self._families.items():
            self._open[name] = [candidate for candidate in family.candidates if not self._rejected(candidate)]

    def _close(self) -> None:
        """Give the others a status: they cost more than the recommendation, or as much and are closer to a limit."""
        if self.best is None:
            return
        limit = self.key(self.best.candidate)[0]
        for family in self._families.values():
            for candidate in family.candidates:
                dearer = self.key(candidate)[0] > limit
                reason = "costs more than the recommendation" if dearer else "no better than the recommendation"
                self.statuses.setdefault(candidate.name, ("dominated", reason))

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _update_all(self, trials: Iterable[Trial]) -> None:
        for trial in trials:
            self._update(trial)

    def _update(self, trial: Trial) -> None:
        """Record a trial, and prune by it."""
        self.record(trial)
        candidate, family = trial.candidate, trial.candidate.family.name
        if trial.failed:
            why = f"no larger than {'+'.join(map(str, candidate.sizes))} engines, which: {trial.reason}"
            for smaller in self._open[family]:
                if smaller is not candidate and smaller.within(candidate):
                    self.statuses.setdefault(smaller.name, ("infeasible", why))
            self._open[family] = [smaller for smaller in self._open[family] if not smaller.within(candidate)]
        elif trial.meets and self._with_error and not trial.draws and self.evaluator.can_draw(candidate):
            self.statuses.pop(candidate.name, None)
        elif trial.meets and (self.best is None or self.key(candidate) < self.key(self.best.candidate)):
            self._recommend(trial)

    def _recommend(self, trial: Trial) -> None:
        self.best = trial
        self._on_better(trial)
        limit = self.key(trial.candidate)[0]
        for name, candidates in self._open.items():
            self._open[name] = [candidate for candidate in candidates if self.key(candidate)[0] <= limit]

    def _middle(self, name: str) -> Candidate | None:
        """The candidate in the middle of a family's open ones that are not known to be likely.

        By price, and in the second search by how likely it is to meet the goals, as far as estimates can tell.
        """
        unlikely = (candidate for candidate in self._open[name] if candidate.name not in self._likely)
        candidates = sorted((c for c in unlikely if self.key(c)[0] <= self._limit), key=self.key)
        if self._with_error:
            candidates.sort(key=self._ratio, reverse=True)
        return candidates[len(candidates) // 2] if candidates else None

    def _ratio(self, candidate: Candidate) -> float:
        """The estimate of a candidate's worst goal relative to its limit, under a bad draw of the step times."""
        if candidate.name not in self._ratios:
            estimate, rate = self._estimates[candidate.family.name], self.question.load or 1.0
            self._ratios[candidate.name] = estimate.ratio(candidate, rate, self.question.goals)
        return self._ratios[candidate.name]

    def _rejected(self, candidate: Candidate) -> bool:
        return self.statuses.get(candidate.name, ("feasible", ""))[0] != "feasible"

    def _cheapest_open(self) -> list[Candidate]:
        """Open candidates of the smallest objective."""
        members = (candidate for candidates in self._open.values() for candidate in candidates)
        candidates = [candidate for candidate in members if not self._rejected(candidate)]
        lowest = min((self.key(candidate)[0] for candidate in candidates), default=0.0)
        return [candidate for candidate in candidates if self.key(candidate)[0] <= lowest]

    # -- the table ---------------------------------------------------------------------------------------------------

    def alternatives(self, limit: int) -> list[Trial]:
        """The best candidates of other layouts and kinds of engines than the recommendation's; then given deployments.

        Without a recommendation, those of all groups that come closest to their goals, the closest first. Trials are
        those of the search, on whatever windows it had use for.
        """
        groups: dict[tuple[str, ...], list[Candidate]] = {}
        for family in self._families.values():
            groups.setdefault(_group(family.family), []).extend(family.candidates)
        if self.best is not None:
            del groups[_group(self.best.candidate.family)]
        trials, stated = [], []
        for candidates in groups.values():
            if candidates and candidates[0].family.given is not None:
                stated += [Trial(candidate) for candidate in candidates]
            elif candidates:
                trial = self._cheapest(candidates) or self._next_likely(candidates) or self._closest(candidates)
                trials += [] if trial is None else [trial]
        if self.best is None:
            trials.sort(key=self.distance)
        else:
            trials.sort(key=lambda trial: (trial.failed, self.key(trial.candidate)))
        return trials[:limit] + stated

    def ladder(self) -> list[Candidate]:
        """Candidates of the best deployments' families, one of each price: that estimated to be closest to its goals.

        By price, from that of the deployment by the best estimate of the step times on.
        """
        trials = [trial for trial in (self.by_estimate, self.best) if trial is not None]
        names = dict.fromkeys(trial.candidate.family.name for trial in trials)
        members = [candidate for name in names for candidate in self._families[name].candidates]
        rungs: dict[float, Candidate] = {}
        for candidate in [*(trial.candidate for trial in reversed(trials)), *sorted(members, key=self._ratio)]:
            rungs.setdefault(self.key(candidate)[0], candidate)
        lowest = self.key(trials[0].candidate)[0] if trials else 0.0
        return [rungs[price] for price in sorted(rungs) if price >= lowest]

    def distance(self, trial: Trial) -> tuple[float, ...]:
        """The ratio of the worst goal to its limit; in the second search an estimate of it under a bad draw."""
        worst = trial.worst(self.question.goals)[0] if trial.windows else math.inf
        ratio = round(self._ratio(trial.candidate), 2) if self._with_error else worst
        return float(trial.saturated), ratio, *self.key(trial.candidate)

    def _closest(self, candidates: Sequence[Candidate]) -> Trial | None:
        """The candidate that was simulated and comes closest to its goals."""
        trials = [self.trials[candidate.name] for candidate in candidates if candidate.name in self.trials]
        return min(trials, key=self.distance, default=None)

    def _cheapest(self, candidates: Sequence[Candidate]) -> Trial | None:
        """The cheapest of some candidates whose simulations do not speak against it."""
        trials = [self.trials[c.name] for c in candidates if c.name in self.trials and not self._rejected(c)]
        likely = [trial for trial in trials if trial.meets]
        return min(likely, key=lambda trial: self.key(trial.candidate), default=None)

    def _next_likely(self, candidates: Sequence[Candidate]) -> Trial | None:
        """The cheapest of some expensive candidates that a short window does not speak against; else the dearest.

        Of each price the one that is estimated to be closest to its goals, if it is closer than all cheaper ones.
        """
        rungs: list[Candidate] = []
        for candidate in sorted(candidates, key=lambda candidate: (self.key(candidate)[0], self._ratio(candidate))):
            if self.statuses.get(candidate.name, ("", ""))[0] not in ("infeasible", "saturated"):
                closer = not rungs or self._ratio(candidate) < self._ratio(rungs[-1])
                rungs += [candidate] if closer else []
        trials: dict[int, Trial] = {}

        def misses(place: int) -> bool:
            if place not in trials:
                (trials[place],) = self._screened([rungs[place]])
            return not trials[place].meets

        if not rungs:
            return None
        guess = sum(self._ratio(candidate) > 1 for candidate in rungs)
        return trials[min(last_miss(misses, guess, len(rungs)) + 1, len(rungs) - 1)]


def _group(family: Family) -> tuple[str, ...]:
    """Families that share a row of the table, as all with AFD bundles do; a given deployment has one of its own."""
    if family.given is not None:
        return "given", family.given.name
    if family.layout == "afd":
        return ("afd",)
    return family.layout, *(kind.name for kind in family.kinds)
