"""A plan from beginning to end: prospects, search, alternatives, headroom, changes, document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from twin.executors.executor import Executor
from twin.planning.answer import (
    NOTE,
    SCHEMA,
    describe_load,
    describe_question,
    ledger,
    nearest_miss,
    price_of_error,
    row,
    sentence,
    untried,
)
from twin.planning.confirming import OTHER_SEED, Confirmer, most_looks
from twin.planning.judging import DRAWS, Judge, Verdict
from twin.planning.load import Load, MostThroughput, changes, confirmed, highest_rate
from twin.planning.prospects import horizon, prospects
from twin.planning.question import Document, Question
from twin.planning.search import Search
from twin.planning.space import Candidate
from workloads.errors import BadInput

ALTERNATIVES, CLOSEST = 8, 3
"""Rows of the table: the recommendation, and the best of other layouts and kinds of engines; those without any."""

AFTERWARDS = 24
"""Verdicts after the search, at most: on rates between which the highest is, and on changes."""


@dataclass
class Planner:
    """Answers one question.

    Args:
        done: windows by key that have been made; `keep` saves each new one.
        executor: runs windows.
        advance: called for each window, with its name. found: called with each better deployment.
        brief: leave out headroom and changes. given: deployments that compete with those of the question's space.
    """

    question: Question
    done: dict[str, Document]
    keep: Callable[[str, Document], None]
    executor: Executor
    advance: Callable[[str], object] = lambda text: None
    found: Callable[[Verdict], object] = lambda verdict: None
    brief: bool = False
    given: Sequence[Candidate] = ()
    judges: list[Judge] = field(default_factory=list, init=False)

    def run(self) -> Document:
        """The document `twin.plan/1`.

        Raises:
            BadInput: no candidate is left to try.
        """
        question = self.question
        self.prospects, self.refused = prospects(question, self.given)
        self._require_candidates()
        self.horizon = horizon(question, self.prospects)
        confirmer = self._confirmer(question)
        self.search = Search(question, self.prospects, self.judge(question), confirmer, self.found)
        load: Load | None = None
        if question.spec.aim == "throughput":
            load = self._most_throughput()
        elif (best := self.search.run()) is not None and question.rate is not None and not self.brief:
            load = highest_rate(self.judge, question, best.candidate, question.rate * 1.25)
        return self._document(load)

    def _require_candidates(self) -> None:
        if not self.prospects and not self.refused:
            expected = "expected kinds of engines, or --candidate FILE"
            raise BadInput(expected, field="plan.engines", file=self.question.path)
        reasons = [each.reason for each in self.refused] or ["none is within the limits"]
        if not self.prospects and all(each.status == "unsupported" for each in self.refused):
            raise BadInput(f"expected a candidate that can run: {reasons[0]}", file=self.question.path)

    @property
    def best(self) -> Verdict | None:
        """The recommendation; None if no candidate meets the goals."""
        return self.search.best

    def windows_left(self) -> int:
        """Windows that are still to come, at most: of candidates, of the confirmation, and of what follows it."""
        long = self.question.spec.replications
        confirming = (long << (most_looks(long, self.horizon.long) - 1)) + DRAWS
        following = 0 if self.brief else AFTERWARDS * (1 + long + DRAWS)
        return self.search.undecided() * (1 + long + 2 * DRAWS) + confirming + ALTERNATIVES * (long + DRAWS) + following

    def judge(self, question: Question) -> Judge:
        made = Judge(question, self.horizon, self.done, self.keep, self.executor, self.advance)
        self.judges.append(made)
        return made

    def _confirming(self, question: Question) -> Judge:
        """A judge by the windows and draws that confirm a recommendation."""
        return self.judge(question.at_seed(question.seed + OTHER_SEED))

    def _confirmer(self, question: Question, tried: int = 0) -> Confirmer:
        return Confirmer(self._confirming(question), tried)

    def _most_throughput(self) -> Load | None:
        if self.question.rate is None:
            expected = "expected arrivals with a rate, which objective throughput changes"
            raise BadInput(expected, field="workload.arrivals.process", file=self.question.path)
        most = MostThroughput(self.question, self.judge)
        for verdict in most.run(self.prospects):
            self.search.ledger.add(verdict)
        if most.best is None:
            return None
        load = confirmed(self._confirmer, self.question, most.best[1])
        if load is None:
            return None
        self.search.best = load.verdict
        self.question = self.search.question = self.question.at_rate(load.rate)
        self.search.ledger.add(load.verdict)
        return load

    def _evaluated(self, verdict: Verdict) -> Verdict:
        """The verdict on a rival by the windows and draws that confirm a recommendation, so that rows compare."""
        judge, candidate = self.search.confirmer.judge, verdict.candidate
        alone = judge.settle if candidate.family.given is not None else judge.look
        (looked,) = alone([candidate])
        drawn = replace(judge.with_draws(looked, every=True), seed=judge.question.seed)
        status, why = self.search.ledger.statuses.get(candidate.name, ("", ""))
        refused = drawn.meets and status == "infeasible"  # by more windows than these
        return replace(drawn, meets=False, reason=why) if refused else drawn

    def _shown(self) -> list[tuple[str, Verdict]]:
        """Deployments of the table by their roles."""
        search, best = self.search, self.search.best
        shown = [] if best is None else [("recommended", best)]
        if self.question.spec.aim == "throughput" or not any(each.candidates for each in self.prospects):
            return shown
        if search.by_estimate is not None and (best is None or search.by_estimate.candidate is not best.candidate):
            shown.append(("best estimate", self._evaluated(search.by_estimate)))
        names = {each.candidate.name for _, each in shown}
        for verdict in search.alternatives(ALTERNATIVES - len(shown) if best is not None else CLOSEST):
            if verdict.candidate.name not in names:
                role = "alternative" if verdict.candidate.family.given is None else "given"
                shown.append((role, self._evaluated(verdict)))
        return [(role, verdict) for role, verdict in shown if verdict.windows]

    def _by_estimate(self, shown: list[tuple[str, Verdict]]) -> Document | None:
        """The cheapest deployment at the best estimate of the step times, and what to measure to know more."""
        estimated, judge = self.search.by_estimate, self.search.judge
        if estimated is None:
            return None
        verdict = next((each for _, each in shown if each.candidate is estimated.candidate), estimated)
        unknown = judge.costliest_unknown(verdict.candidate)
        costliest = None if unknown is None else {"about": unknown.about, "measure": unknown.measure}
        return {**row(self.question, verdict, "best estimate"), "costliest_unknown": costliest}

    def _document(self, load: Load | None) -> Document:
        question, search, best = self.question, self.search, self.search.best
        shown = self._shown()
        rows = [row(question, each, role) for role, each in shown]
        recommendation = row(question, best) if best is not None else None
        headroom = describe_load(load, question.rate)
        missed = nearest_miss(search, [each for _, each in shown], question.goals) if best is None else None
        miss = None if missed is None else row(question, missed, "nearest miss")
        what_if = [] if best is None or self.brief else changes(self._confirming, question, best.candidate)
        by_estimate = self._by_estimate(shown)
        told = price_of_error(by_estimate, recommendation)
        entries = ledger(search, self.prospects, self.refused)
        return {
            "schema": SCHEMA,
            "name": str(question.document.get("name", "plan")),
            "simulated": True,
            "note": NOTE,
            "question": describe_question(question, self.horizon),
            "answer": " ".join(filter(None, [sentence(question, recommendation, headroom, miss), told])),
            "feasible": best is not None,
            "recommendation": recommendation,
            "by_best_estimate": by_estimate,
            "nearest_miss": miss,
            "rows": rows,
            "headroom": headroom,
            "changes": what_if,
            "notes": untried(question),
            "evaluated": len(search.ledger.verdicts),
            "ledger": entries,
            "simulated_requests": sum(judge.simulated for judge in self.judges),
        }
