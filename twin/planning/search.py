"""The search for the best candidate: short simulations eliminate, from the middle of each family, and long ones settle.

A candidate that fails takes with it all candidates of its family whose pools are no larger, and a feasible one makes
all dearer ones pointless. What is left is settled in the order of the objective, so the first candidate that meets the
goals is the best one, up to the errors of the screening.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twin.planning.judging import Judge, Verdict
from twin.planning.prospects import Prospect, Refused
from twin.planning.question import Question
from twin.planning.space import Candidate, Family

SEEDS = 4
"""Candidates of the first look: the cheapest of those estimated to meet the goals."""

FINALISTS = 4
"""Equally good candidates that are settled; the one with the most room to its goals is recommended."""

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
        found: called with the first feasible candidate, and with each better one.

    Attributes:
        best: the recommendation; None while there is none.
    """

    def __init__(
        self,
        question: Question,
        prospects: Sequence[Prospect],
        judge: Judge,
        found: Callable[[Verdict], object] = lambda verdict: None,
    ) -> None:
        self.question, self.judge, self._found = question, judge, found
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
        self._begin()
        self._screen()
        self._settle()
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

    def _settle(self) -> None:
        """Settle open candidates in the order of the objective, until one meets the goals."""
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
            meeting = [verdict for verdict in settled if verdict.meets]
            for verdict in sorted(meeting, key=lambda verdict: verdict.worst(goals)[0]):
                confirmed = self.judge.confirm(verdict.candidate)
                self._record(confirmed)
                if confirmed.meets:
                    self._recommend(confirmed)
                    return

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
        """The recommendation, and the best candidates of other layouts and kinds of engines, from some long windows."""
        groups: dict[tuple[str, ...], list[Candidate]] = {}
        for prospect in self._prospects.values():
            groups.setdefault(_group(prospect.family), []).extend(prospect.candidates)
        best = [] if self.best is None else [self.best]
        if self.best is not None:
            del groups[_group(self.best.candidate.family)]
        found = []
        for candidates in groups.values():
            verdict = self._known(candidates) or self._next_likely(candidates)
            found += [] if verdict is None else [verdict]
        found.sort(key=lambda verdict: (verdict.decided and not verdict.meets, self.key(verdict.candidate)))
        return best + self.judge.look([verdict.candidate for verdict in found[: most - len(best)]])

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

    def _level(self) -> list[Candidate]:
        """Open candidates of the smallest objective."""
        every = [
            each
            for name in self._open
            for each in self._open[name]
            if not (each.name in self.ledger.statuses and self.ledger.statuses[each.name][0] != "feasible")
        ]
        if not every:
            return []
        least = min(self.key(each)[0] for each in every)
        return [each for each in every if self.key(each)[0] <= least]


def _group(family: Family) -> tuple[str, ...]:
    """Families that share a row of the table."""
    return family.layout, *(kind.name for kind in family.kinds)
