"""A plan from beginning to end: prospects, search, alternatives, headroom, changes, document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
)
from twin.planning.confirming import OTHER_SEED, Confirmer
from twin.planning.judging import Judge, Verdict
from twin.planning.load import Load, MostThroughput, changes, confirmed, highest_rate
from twin.planning.prospects import horizon, prospects
from twin.planning.question import Document, Question
from twin.planning.search import Search
from twin.planning.space import Candidate
from workloads.errors import BadInput

ALTERNATIVES = 8
"""Rows of the table: the recommendation, and the best of other layouts and kinds of engines."""


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

    def judge(self, question: Question) -> Judge:
        made = Judge(question, self.horizon, self.done, self.keep, self.executor, self.advance)
        self.judges.append(made)
        return made

    def _confirmer(self, question: Question, tried: int = 0) -> Confirmer:
        return Confirmer(self.judge(question.at_seed(question.seed + OTHER_SEED)), tried)

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

    def _by_estimate(self) -> Document | None:
        """The cheapest deployment at the best estimate of the step times, and what to measure to know more."""
        verdict, judge = self.search.by_estimate, self.search.judge
        if verdict is None:
            return None
        unknown = judge.costliest_unknown(verdict.candidate)
        costliest = None if unknown is None else {"about": unknown.about, "measure": unknown.measure}
        return {**row(self.question, verdict), "costliest_unknown": costliest}

    def _document(self, load: Load | None) -> Document:
        question, search, best = self.question, self.search, self.search.best
        alternatives: list[Verdict] = []
        if question.spec.aim == "throughput":
            alternatives = [] if best is None else [best]
        elif any(each.candidates for each in self.prospects):
            alternatives = search.alternatives(ALTERNATIVES)
        rows = [row(question, each) for each in alternatives if each.windows]
        recommendation = row(question, best) if best is not None else None
        headroom = describe_load(load, question.rate)
        miss = nearest_miss(search, question.goals) if best is None else None
        what_if = [] if best is None or self.brief else changes(self.judge, question, best.candidate)
        by_estimate = self._by_estimate()
        told = price_of_error(by_estimate, recommendation)
        return {
            "schema": SCHEMA,
            "name": str(question.document.get("name", "plan")),
            "simulated": True,
            "note": NOTE,
            "question": describe_question(question, self.horizon),
            "answer": " ".join(filter(None, [sentence(question, recommendation, headroom), told])),
            "feasible": best is not None,
            "recommendation": recommendation,
            "by_best_estimate": by_estimate,
            "nearest_miss": None if miss is None else row(question, miss),
            "rows": rows,
            "headroom": headroom,
            "changes": what_if,
            "ledger": ledger(search, self.prospects, self.refused),
            "simulated_requests": sum(judge.simulated for judge in self.judges),
        }
