"""The search for the best candidate: short simulations eliminate, from the middle of each family, and long ones settle.

A candidate that fails takes with it all candidates of its family whose pools are no larger, and a feasible one makes
all dearer ones pointless. What is left is settled in the order of the objective, so the first candidate that meets the
goals is the best one, up to the errors of the screening.

Where the error of the step times is known, there are two searches. The first takes the step times at their best
estimates, and ends when a deployment meets the goals with these but not with their error. The second begins with what
the first has not ruled out, and screens under the draws that were worst for that deployment: what fails under more of
them than the plan's confidence allows is out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from twin.planning.confirming import PROMISING, Confirmer
from twin.planning.judging import RACED, Judge, Verdict
from twin.planning.prospects import Prospect, Refused, under_draw
from twin.planning.question import Question
from twin.planning.space import Candidate, Family

SEEDS = 4
"""Candidates of the first look: the cheapest of those estimated to meet the goals."""

FINALISTS = 4
"""Equally good candidates that are settled; the simplest one is the first to be confirmed."""

TRIED = 12
"""Candidates of one layout and kind that are tried for the table, when all that are cheap enough have failed."""

Key = tuple[float, ...]


@dataclass
class Ledger:
    """The record of every candidate: at most one verdict and one status each.

    Attributes:
        verdicts: by name. statuses: status and reason by name, in the order in which they were found.
    """

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    statuses: dict[str, tuple[str, str]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Record a verdict, in place of an earlier one on fewer windows."""
        name = verdict.candidate.name
        self.verdicts[name] = verdict
        if verdict.decided and not verdict.meets:
            status = "saturated" if verdict.saturated else "infeasible"
            self.statuses[name] = (status, verdict.reason)
        elif verdict.decided:
            self.statuses[name] = ("feasible", "")


class Search:
    """One search.

    Args:
        confirmer: has the last word on a recommendation.
        found: called with the first candidate that seems feasible, and with each better one.

    Attributes:
        best: the recommendation; None while there is none.
        by_estimate: the cheapest deployment that meets the goals with the step times at their best estimates, found by
            the race alone; None where their error is unknown, or where none does.
    """

    def __init__(
        self,
        question: Question,
        prospects: Sequence[Prospect],
        judge: Judge,
        confirmer: Confirmer,
        found: Callable[[Verdict], object] = lambda verdict: None,
    ) -> None:
        self.question, self.judge, self.confirmer, self._found = question, judge, confirmer, found
        self.ledger = Ledger()
        self.best: Verdict | None = None
        self._prospects = {prospect.family.name: prospect for prospect in prospects}
        self._estimates = self._prospects  # in the second search, those under a bad draw of the step times
        self._open: dict[str, list[Candidate]] = {
            prospect.family.name: list(prospect.candidates) for prospect in prospects
        }
        self._likely: set[str] = set()
        self.by_estimate: Verdict | None = None
        self._drawing = False  # True in the second search
        self._ratios: dict[str, float] = {}

    def run(self) -> Verdict | None:
        """Search; the recommendation, or None if no candidate meets the goals."""
        self._prune([self._prospects])
        while True:
            self._begin()
            self._screen()
            settled = self._settle()
            if settled is None:
                self._begin_drawing()
            elif settled or not self._reopen():
                break
        self._close()
        return self.best

    def key(self, candidate: Candidate) -> Key:
        """The objective, to be small, then the number of devices or the price, and then how simple it is."""
        cost = float("inf") if candidate.cost is None else candidate.cost
        if self.question.spec.aim == "gpus":
            return candidate.gpus, 0.0 if candidate.cost is None else cost, *candidate.complexity
        return cost, candidate.gpus, *candidate.complexity

    def undecided(self) -> int:
        """Candidates that have no final status yet."""
        statuses, undecided = self.ledger.statuses, ("", "feasible")
        every = (each.name for prospect in self._prospects.values() for each in prospect.candidates)
        return sum(statuses.get(name, ("",))[0] in undecided for name in every)

    # -- the phases --------------------------------------------------------------------------------------------------

    def _prune(self, estimates: Sequence[Mapping[str, Prospect]]) -> None:
        """Drop candidates that are far beyond their capacity by all of some estimates."""
        rate = self.question.rate
        if rate is None:
            return
        for name, candidates in self._open.items():
            for candidate in list(candidates):
                reasons = [each[name].saturated(candidate, rate) for each in estimates]
                if reasons[0] is not None and all(reasons):
                    self.ledger.statuses[candidate.name] = ("saturated", reasons[0])
                    candidates.remove(candidate)

    def _begin(self) -> None:
        """Find some feasible candidate soon, by the estimates."""
        rate = self.question.rate
        if rate is None:
            return
        goals, estimates = self.question.goals, self._estimates
        likely = []
        for name in self._prospects:
            in_order = sorted(self._open[name], key=self.key)
            first = next((each for each in in_order if estimates[name].ratio(each, rate, goals) <= 1.0), None)
            likely += [] if first is None else [first]
        likely.sort(key=self.key)
        for start in range(0, len(likely), SEEDS):
            screened = self._screened(likely[start : start + SEEDS])
            for verdict in screened:
                if verdict.decided:
                    self._record(verdict)
            passed = [each.candidate for each in screened if not each.decided]
            self._look(passed[:2])
            if self.best is not None:
                return

    def _screen(self) -> None:
        """Test the middle of each family's open candidates until each is out or likely."""
        while True:
            tests = [each for name in self._open if (each := self._middle(name)) is not None]
            if not tests:
                return
            passed = []
            for verdict in self._screened(tests):
                if verdict.decided:
                    self._record(verdict)
                else:
                    passed.append(verdict.candidate)
                    self.ledger.verdicts.setdefault(verdict.candidate.name, verdict)
                    self._likely |= {
                        each.name
                        for each in self._open[verdict.candidate.family.name]
                        if verdict.candidate.within(each)
                    }
            if self._drawing:
                self._improve(passed)

    def _improve(self, passed: Sequence[Candidate]) -> None:
        """See whether the cheapest of some candidates that pass short windows is a better deployment."""
        cheaper = [each for each in passed if self.best is None or self.key(each) < self.key(self.best.candidate)]
        if cheaper:
            self._look([min(cheaper, key=lambda each: (self.key(each), self.judge.hardship(each)))])

    def _look(self, candidates: Sequence[Candidate]) -> None:
        """Record verdicts that may make dearer candidates pointless: in the second search, under bad draws too."""
        if not self._drawing:
            self._record_all(self.judge.look(candidates))
            return
        doubted = self.judge.doubt(candidates, long=True)
        self._record_all(doubted)
        out = {each.candidate.name for each in doubted}
        for verdict in self.judge.look([each for each in candidates if each.name not in out]):
            self._record(self.judge.with_draws(verdict, RACED) if verdict.meets else verdict)

    def _screened(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Verdicts from short windows."""
        return self.judge.screen_with_draws(candidates) if self._drawing else self.judge.screen(candidates)

    def _settle(self) -> bool | None:
        """Settle open candidates in the order of the objective, until one is confirmed; False if none is.

        None, at the end of the first search: one meets its goals, but not with the error of the step times.
        """
        while level := self._level():
            if self._drawing:
                if doubted := self.judge.doubt(level):
                    self._record_all(doubted)
                    continue
                level = sorted(level, key=lambda each: (each.complexity, self.judge.hardship(each)))[:FINALISTS]
                if doubted := self.judge.doubt(level, long=True):
                    self._record_all(doubted)
                    continue
            looked = self.judge.look(level)
            self._record_all(looked)
            looked = [verdict for verdict in looked if verdict.meets or not verdict.decided]
            settled = self.judge.settle([each.candidate for each in self._simplest(looked)[:FINALISTS]])
            self._record_all(settled)
            promising = [verdict for verdict in settled if verdict.meets or verdict.probability >= PROMISING]
            for verdict in self._simplest(promising):
                last = self._with_draws(verdict)
                if last.meets or not last.draws:
                    last = self.confirmer.confirm(last)
                self._record(last)
                if last.meets:
                    self._recommend(last)
                    return True
                if last.draws and not self._drawing:
                    return None
        return False

    def _with_draws(self, verdict: Verdict) -> Verdict:
        """A verdict that goals are met, with the error of the step times where it is known."""
        candidate = verdict.candidate
        if not verdict.meets or not self.judge.can_draw(candidate):
            return verdict
        if self.by_estimate is None:
            self.by_estimate = verdict
            self.judge.rank_draws(candidate)
        return (
            self.judge.with_draws(verdict, RACED) if self.judge.random([candidate]) else self.judge.with_draws(verdict)
        )

    def _simplest(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Those that meet their goals first, of these the simplest, and of equally simple ones that with most room."""
        goals = self.question.goals
        return sorted(verdicts, key=lambda each: (not each.meets, each.candidate.complexity, each.worst(goals)[0]))

    def _begin_drawing(self) -> None:
        """Take up all that is not ruled out, for the second search."""
        drawn = [under_draw(self._prospects, self.question.seed, draw) for draw in self.judge.worst]
        self._estimates = drawn[-1]
        for name, (status, _) in list(self.ledger.statuses.items()):
            if status == "feasible":  # at the best estimates
                del self.ledger.statuses[name]
        self._drawing, self._likely = True, set()
        self._take_up_the_rest()
        self._prune(drawn)

    def _reopen(self) -> bool:
        """Give up a candidate that seemed the best and was not confirmed, and take up all that it had made pointless.

        False if nothing is left.
        """
        if self.best is None:
            return False
        self._take_up_the_rest()
        return any(self._open.values())

    def _take_up_the_rest(self) -> None:
        """Open all candidates that are not ruled out."""
        self.best = None
        for name, prospect in self._prospects.items():
            self._open[name] = [each for each in prospect.candidates if not self._ruled_out(each)]

    def _close(self) -> None:
        """Give what is left its status: it costs more than the recommendation, or as much with less room."""
        if self.best is None:
            return
        best = self.best.candidate
        for prospect in self._prospects.values():
            for candidate in prospect.candidates:
                if candidate.name not in self.ledger.statuses:
                    dearer = self.key(candidate)[0] > self.key(best)[0]
                    reason = "costs more than the recommendation" if dearer else "no better than the recommendation"
                    self.ledger.statuses[candidate.name] = ("dominated", reason)

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _record_all(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self._record(verdict)

    def _record(self, verdict: Verdict) -> None:
        self.ledger.add(verdict)
        candidate = verdict.candidate
        if verdict.meets and not self._final(verdict):
            self.ledger.statuses.pop(candidate.name, None)
        name = candidate.family.name
        if verdict.decided and not verdict.meets:
            for other in self._open[name]:
                if other is not candidate and other.within(candidate):
                    why = f"no larger than {'+'.join(map(str, candidate.sizes))} engines, which: {verdict.reason}"
                    self.ledger.statuses.setdefault(other.name, ("infeasible", why))
            self._open[name] = [each for each in self._open[name] if not each.within(candidate)]
        elif (
            verdict.meets
            and self._final(verdict)
            and (self.best is None or self.key(candidate) < self.key(self.best.candidate))
        ):
            self._recommend(verdict)

    def alternatives(self, most: int) -> list[Verdict]:
        """The best candidates of other layouts and kinds of engines than the recommendation's; then given deployments.

        Without a recommendation, those of all groups that come closest to their goals, the closest first. Verdicts are
        those of the search, on whatever windows it had use for.
        """
        groups: dict[tuple[str, ...], list[Candidate]] = {}
        for prospect in self._prospects.values():
            groups.setdefault(_group(prospect.family), []).extend(prospect.candidates)
        if self.best is not None:
            del groups[_group(self.best.candidate.family)]
        own, given = [], []
        for candidates in groups.values():
            if candidates and candidates[0].family.given is not None:
                given += [Verdict(each, 0.0, [], True, False, False, "") for each in candidates]
            elif candidates:
                verdict = self._known(candidates) or self._next_likely(candidates) or self._closest(candidates)
                own += [] if verdict is None else [verdict]
        if self.best is None:
            own.sort(key=self.distance)
        else:
            own.sort(key=lambda verdict: (verdict.decided and not verdict.meets, self.key(verdict.candidate)))
        return own[:most] + given

    def distance(self, verdict: Verdict) -> tuple[float, ...]:
        """The ratio of the worst goal to its limit; in the second search an estimate of it under a bad draw."""
        worst = verdict.worst(self.question.goals)[0] if verdict.windows else math.inf
        by = round(self._ratio(verdict.candidate), 2) if self._drawing else worst
        return float(verdict.saturated), by, *self.key(verdict.candidate)

    def _closest(self, candidates: Sequence[Candidate]) -> Verdict | None:
        """The candidate that was simulated and comes closest to its goals."""
        verdicts = [verdict for each in candidates if (verdict := self.ledger.verdicts.get(each.name)) is not None]
        return min(verdicts, key=self.distance, default=None)

    def _known(self, candidates: Sequence[Candidate]) -> Verdict | None:
        """The cheapest of some candidates whose simulations do not speak against it."""
        rest = [each for each in candidates if not self._ruled_out(each) and each.name in self.ledger.verdicts]
        likely = [verdict for each in rest if (verdict := self.ledger.verdicts[each.name]).meets]
        return min(likely, key=lambda each: self.key(each.candidate), default=None)

    def _next_likely(self, candidates: Sequence[Candidate]) -> Verdict | None:
        """The cheapest of some dear candidates that a short window does not speak against.

        If none of those tried is, the last one.
        """
        ruled_out = {"infeasible", "saturated"}
        rest = [each for each in candidates if self.ledger.statuses.get(each.name, ("",))[0] not in ruled_out]
        goals, rate = self.question.goals, self.question.rate or 1.0
        rest.sort(key=lambda each: (self.key(each)[0], self._estimates[each.family.name].ratio(each, rate, goals)))
        last = None
        for candidate in rest[:TRIED]:
            (last,) = self._screened([candidate])
            if last.meets:
                return last
        return last

    def _final(self, verdict: Verdict) -> bool:
        """True if a verdict that goals are met says so with the error of the step times, if this search looks at it."""
        return not self._drawing or verdict.draws > 0 or not self.judge.can_draw(verdict.candidate)

    def _recommend(self, verdict: Verdict) -> None:
        self.best = verdict
        self._found(verdict)
        limit = self.key(verdict.candidate)[0]
        for name, every in self._open.items():
            self._open[name] = [each for each in every if self.key(each)[0] <= limit]

    def _middle(self, name: str) -> Candidate | None:
        """The candidate in the middle of a family's open ones that are not known to be likely.

        By price, and in the second search by how likely it is to meet the goals, as far as estimates can tell.
        """
        rest = sorted((each for each in self._open[name] if each.name not in self._likely), key=self.key)
        if self._drawing:
            rest.sort(key=self._ratio, reverse=True)
        return rest[len(rest) // 2] if rest else None

    def _ratio(self, candidate: Candidate) -> float:
        """The estimate of a candidate's worst goal relative to its limit, under a bad draw of the step times."""
        if candidate.name not in self._ratios:
            estimate, rate = self._estimates[candidate.family.name], self.question.rate or 1.0
            self._ratios[candidate.name] = estimate.ratio(candidate, rate, self.question.goals)
        return self._ratios[candidate.name]

    def _ruled_out(self, candidate: Candidate) -> bool:
        """True for a candidate that fails."""
        return self.ledger.statuses.get(candidate.name, ("feasible", ""))[0] != "feasible"

    def _level(self) -> list[Candidate]:
        """Open candidates of the smallest objective."""
        every = [each for name in self._open for each in self._open[name] if not self._ruled_out(each)]
        if not every:
            return []
        least = min(self.key(each)[0] for each in every)
        return [each for each in every if self.key(each)[0] <= least]


def _group(family: Family) -> tuple[str, ...]:
    """Families that share a row of the table, as all with AFD bundles do; a given deployment has one of its own."""
    if family.given is not None:
        return "given", family.given.name
    if family.layout == "afd":
        return ("afd",)
    return family.layout, *(kind.name for kind in family.kinds)
