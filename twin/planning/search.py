"""The search for the best candidate: short simulations eliminate, from the middle of each family, and long ones settle.

A candidate that fails takes with it all candidates of its family whose pools are no larger, and a feasible one makes
all dearer ones pointless. What is left is settled in the order of the objective, so the first candidate that meets the
goals is the best one, up to the errors of the screening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twin.planning.confirming import PROMISING, Confirmer
from twin.planning.judging import Judge, Verdict
from twin.planning.prospects import Prospect, Refused
from twin.planning.question import Question
from twin.planning.space import Candidate, Family

SEEDS = 4
"""Candidates of the first look: the cheapest of those estimated to meet the goals."""

FINALISTS = 4
"""Equally good candidates that are settled; the one with the most room to its goals is the first to be confirmed."""

TRIED = 12
"""Candidates of one layout and kind that are tried for the table, when all that are cheap enough have failed."""

Key = tuple[float, float]


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
        self._open: dict[str, list[Candidate]] = {
            prospect.family.name: list(prospect.candidates) for prospect in prospects
        }
        self._likely: set[str] = set()

    def run(self) -> Verdict | None:
        """Search; the recommendation, or None if no candidate meets the goals."""
        self._prune()
        while True:
            self._begin()
            self._screen()
            if self._settle() or not self._reopen():
                break
        self._close()
        return self.best

    def key(self, candidate: Candidate) -> Key:
        """The objective, to be small, and then the number of devices or the price."""
        cost = float("inf") if candidate.cost is None else candidate.cost
        if self.question.spec.aim == "gpus":
            return candidate.gpus, 0.0 if candidate.cost is None else cost
        return cost, candidate.gpus

    # -- the phases --------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """Drop candidates that are far beyond their capacity."""
        rate = self.question.rate
        if rate is None:
            return
        for name, prospect in self._prospects.items():
            for candidate in list(self._open[name]):
                if (reason := prospect.saturated(candidate, rate)) is not None:
                    self.ledger.statuses[candidate.name] = ("saturated", reason)
                    self._open[name].remove(candidate)

    def _begin(self) -> None:
        """Find some feasible candidate soon, by the estimates."""
        rate = self.question.rate
        if rate is None:
            return
        goals = self.question.goals
        likely = []
        for name, prospect in self._prospects.items():
            in_order = sorted(self._open[name], key=self.key)
            first = next((each for each in in_order if prospect.ratio(each, rate, goals) <= 1.0), None)
            likely += [] if first is None else [first]
        likely.sort(key=self.key)
        for start in range(0, len(likely), SEEDS):
            screened = self.judge.screen(likely[start : start + SEEDS])
            for verdict in screened:
                if verdict.decided:
                    self._record(verdict)
            passed = [each.candidate for each in screened if not each.decided]
            for verdict in self.judge.look(passed[:2]):
                self._record(verdict)
            if self.best is not None:
                return

    def _screen(self) -> None:
        """Test the middle of each family's open candidates until each is out or likely."""
        while True:
            tests = [each for name in self._open if (each := self._middle(name)) is not None]
            if not tests:
                return
            for verdict in self.judge.screen(tests):
                if verdict.decided:
                    self._record(verdict)
                else:
                    self.ledger.verdicts.setdefault(verdict.candidate.name, verdict)
                    self._likely |= {
                        each.name
                        for each in self._open[verdict.candidate.family.name]
                        if verdict.candidate.within(each)
                    }

    def _settle(self) -> bool:
        """Settle open candidates in the order of the objective, until one is confirmed; False if none is."""
        while level := self._level():
            if doubted := self.judge.doubt(level):
                for verdict in doubted:
                    self._record(verdict)
                continue
            looked = []
            for verdict in self.judge.look(level):
                self._record(verdict)
                if not (verdict.decided and not verdict.meets):
                    looked.append(verdict)
            goals = self.question.goals
            looked.sort(key=lambda verdict: (-round(verdict.probability, 2), verdict.worst(goals)[0]))
            settled = self.judge.settle([each.candidate for each in looked[:FINALISTS]])
            for verdict in settled:
                self._record(verdict)
            promising = [verdict for verdict in settled if verdict.meets or verdict.probability >= PROMISING]
            for verdict in sorted(promising, key=lambda each: (-round(each.probability, 2), each.worst(goals)[0])):
                last = self.judge.with_draws(verdict) if verdict.meets else verdict
                if last.meets or not last.draws:
                    last = self.confirmer.confirm(last)
                self._record(last)
                if last.meets:
                    self._recommend(last)
                    return True
        return False

    def _reopen(self) -> bool:
        """Give up a candidate that seemed the best and was not confirmed, and take up all that it had made pointless.

        False if nothing is left.
        """
        if self.best is None:
            return False
        self.best = None
        for name, prospect in self._prospects.items():
            self._open[name] = [each for each in prospect.candidates if not self._ruled_out(each)]
        return any(self._open.values())

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

    def _record(self, verdict: Verdict) -> None:
        self.ledger.add(verdict)
        candidate = verdict.candidate
        name = candidate.family.name
        if verdict.decided and not verdict.meets:
            for other in self._open[name]:
                if other is not candidate and other.within(candidate):
                    why = f"no larger than {'+'.join(map(str, candidate.sizes))} engines, which: {verdict.reason}"
                    self.ledger.statuses.setdefault(other.name, ("infeasible", why))
            self._open[name] = [each for each in self._open[name] if not each.within(candidate)]
        elif verdict.meets and (self.best is None or self.key(candidate) < self.key(self.best.candidate)):
            self._recommend(verdict)

    def alternatives(self, most: int) -> list[Verdict]:
        """The recommendation, the best candidates of other layouts and kinds of engines, and given deployments.

        From some long windows each; given deployments from as many as a verdict needs.
        """
        groups: dict[tuple[str, ...], list[Candidate]] = {}
        for prospect in self._prospects.values():
            groups.setdefault(_group(prospect.family), []).extend(prospect.candidates)
        best = [] if self.best is None else [self.best]
        if self.best is not None:
            del groups[_group(self.best.candidate.family)]
        given = [each for candidates in groups.values() for each in candidates if each.family.given is not None]
        found = []
        for candidates in groups.values():
            if candidates and candidates[0].family.given is None:
                verdict = self._known(candidates) or self._next_likely(candidates)
                found += [] if verdict is None else [verdict]
        found.sort(key=lambda verdict: (verdict.decided and not verdict.meets, self.key(verdict.candidate)))
        rivals = [verdict.candidate for verdict in found[: most - len(best)]]
        return best + self.judge.look(rivals) + self.judge.settle(given)

    def _known(self, candidates: Sequence[Candidate]) -> Verdict | None:
        """The cheapest of some candidates whose simulations do not speak against it."""
        verdicts = [self.ledger.verdicts[each.name] for each in candidates if each.name in self.ledger.verdicts]
        likely = [each for each in verdicts if each.meets]
        return min(likely, key=lambda each: self.key(each.candidate), default=None)

    def _next_likely(self, candidates: Sequence[Candidate]) -> Verdict | None:
        """The cheapest of some dear candidates that a short window does not speak against.

        If none of those tried is, the last one.
        """
        ruled_out = {"infeasible", "saturated"}
        rest = [each for each in candidates if self.ledger.statuses.get(each.name, ("",))[0] not in ruled_out]
        goals, rate = self.question.goals, self.question.rate or 1.0
        rest.sort(key=lambda each: (self.key(each)[0], self._prospects[each.family.name].ratio(each, rate, goals)))
        last = None
        for candidate in rest[:TRIED]:
            (last,) = self.judge.screen([candidate])
            if last.meets:
                return last
        return last

    def _recommend(self, verdict: Verdict) -> None:
        self.best = verdict
        self._found(verdict)
        limit = self.key(verdict.candidate)[0]
        for name, every in self._open.items():
            self._open[name] = [each for each in every if self.key(each)[0] <= limit]

    def _middle(self, name: str) -> Candidate | None:
        """The candidate in the middle of a family's open ones that are not known to be likely."""
        rest = sorted((each for each in self._open[name] if each.name not in self._likely), key=self.key)
        return rest[len(rest) // 2] if rest else None

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
