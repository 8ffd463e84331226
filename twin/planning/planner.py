"""A plan from beginning to end: estimates, search, alternatives, headroom, changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from twin.planning import max_load
from twin.planning.confirming import LEVELS, OTHER_SEED, Confirmer, Level, confidence_curve, max_looks, why_not
from twin.planning.evaluation import DRAWS, LONG_WINDOWS, Evaluator
from twin.planning.family_estimates import LedgerEntry, estimate_families, horizon
from twin.planning.question import Document, Question
from twin.planning.result import MaxLoad, Plan, Stop
from twin.planning.search import Search
from twin.planning.space import Candidate
from twin.planning.windows import CpuLimitReached, Simulations, Trial
from workloads.errors import BadInput

ALTERNATIVES, CLOSEST = 8, 3
"""Rows of the table: the recommendation and the best of other layouts and kinds of engines; those without one."""

RATE_REQUESTS = 20_000
"""Requests by which a rate can be confirmed: their misses are enough for a small p-value."""

TRIALS_AFTER = 24
"""Trials after the search, at most: on rates between which the highest is, and on changes."""


@dataclass
class Planner:
    """Answers one question.

    Args:
        on_better: called with each better deployment. brief: leave out headroom and changes.
        given: deployments that compete with those of the question's space. variants: changed questions, by the change,
            which are answered briefly beside it.
    """

    question: Question
    simulations: Simulations
    on_better: Callable[[Trial], object] = lambda trial: None
    brief: bool = False
    given: Sequence[Candidate] = ()
    variants: Sequence[tuple[str, Question]] = ()

    def run(self) -> Plan:
        """Find the plan."""
        question = self.question
        self.families, self.refused = estimate_families(question, self.given)
        if not self.families and not self.refused:
            raise BadInput("expected kinds of engines, or --candidate FILE", field="plan.engines", file=question.path)
        if not self.families and all(entry.status == "unsupported" for entry in self.refused):
            raise BadInput(f"expected a candidate that can run: {self.refused[0].reason}", file=question.path)
        self.horizon = horizon(question, self.families)
        evaluator, confirmer = self.evaluator(question), Confirmer(self.confirming(question))
        self.search = Search(question, self.families, evaluator, confirmer, self.on_better)
        self.stopped = False
        load: max_load.Load | None = None
        with self._within_limit():
            if question.spec.aim == "throughput":
                load = self._highest_throughput()
            elif (best := self.search.run()) is not None and question.rate is not None and not self.brief:
                load = max_load.highest_rate(self.evaluator, question, best.candidate, question.rate * 1.25)
        plan = self._plan(load)
        what_if = [
            (text, Planner(variant, self.simulations, brief=True, given=self.given).run())
            for text, variant in self.variants
        ]
        return replace(plan, what_if=what_if)

    @contextmanager
    def _within_limit(self) -> Iterator[None]:
        try:
            yield
        except CpuLimitReached:
            self.stopped = True

    @property
    def best(self) -> Trial | None:
        """The recommendation; None if no candidate meets the goals."""
        return self.search.best

    def windows_left(self) -> int:
        """Windows that are still to come, at most: of candidates, of the confirmation, and of what follows it."""
        long = self.question.spec.replications
        confirming = (long << (max_looks(long, self.horizon.long) - 1)) + DRAWS
        following = 0 if self.brief else TRIALS_AFTER * (1 + long + DRAWS)
        following += 0 if self.brief else 8 * len(LEVELS) * (LONG_WINDOWS + DRAWS)  # bisections of up to 2^8 prices
        searching = self.search.bounds()[1] * (1 + long + 2 * DRAWS)
        return searching + confirming + ALTERNATIVES * (long + DRAWS) + following

    def evaluator(self, question: Question) -> Evaluator:
        """An evaluator of a question with the plan's windows."""
        return Evaluator(question, self.horizon, self.simulations, self.families)

    def confirming(self, question: Question) -> Evaluator:
        """An evaluator by the windows and draws that confirm a recommendation."""
        return self.evaluator(question.at_seed(question.seed + OTHER_SEED))

    def _rate_confirmer(self, question: Question, attempts: int) -> Confirmer:
        """A confirmer that takes no more looks than a p-value needs, since a lower rate is tried next."""
        requests = question.spec.replications * self.horizon.long
        looks = 1 + math.ceil(math.log2(max(RATE_REQUESTS / requests, 1.0)))
        return Confirmer(self.confirming(question), attempts, looks)

    def _highest_throughput(self) -> max_load.Load | None:
        if self.question.rate is None:
            expected = "expected arrivals with a rate, which objective throughput changes"
            raise BadInput(expected, field="workload.arrivals.process", file=self.question.path)
        best, trials = max_load.highest_throughput(self.evaluator, self.question, self.families)
        for trial in trials:
            self.search.record(trial)
        load = None
        if best is not None:
            deployment = best.trial.candidate
            estimate = next(family for family in self.families if family.family is deployment.family)
            share = max_load.share_under_draws(self.question, estimate, deployment)
            load = max_load.confirmed(self._rate_confirmer, self.question, best, share)
        if load is not None:
            self.search.best = load.trial
            self.question = self.search.question = self.question.at_rate(load.rate)
            self.search.record(load.trial)
        return load

    def _confirming_trial(self, candidate: Candidate) -> Trial:
        """The trial of an alternative by the windows and draws that confirm a recommendation, so that rows compare."""
        evaluator = self.search.confirmer.evaluator
        evaluate = evaluator.settle if candidate.family.given is not None else evaluator.evaluate
        (trial,) = evaluate([candidate])
        trial = replace(evaluator.bracket_draws(trial), seed=evaluator.question.seed)
        status, reason = self.search.statuses.get(candidate.name, ("", ""))
        refused = trial.meets and status == "infeasible"  # by more windows than these
        return replace(trial, meets=False, reason=reason) if refused else trial

    def _rows(self) -> list[tuple[str, Trial]]:
        """Deployments of the table by their roles."""
        search, best = self.search, self.search.best
        rows = [] if best is None else [("recommended", best)]
        if self.question.spec.aim == "throughput" or not any(family.candidates for family in self.families):
            return rows
        with self._within_limit():
            if search.by_estimate is not None and (best is None or search.by_estimate.candidate is not best.candidate):
                rows.append(("best estimate", self._confirming_trial(search.by_estimate.candidate)))
            names = {trial.candidate.name for _, trial in rows}
            for trial in search.alternatives(ALTERNATIVES - len(rows) if best is not None else CLOSEST):
                if trial.candidate.name not in names:
                    role = "alternative" if trial.candidate.family.given is None else "given"
                    rows.append((role, self._confirming_trial(trial.candidate)))
        return [(role, trial) for role, trial in rows if trial.windows]

    def _nearest_miss(self, trials: Sequence[Trial]) -> Trial | None:
        """The deployment that is most certain to meet its goals; else the one that exceeds its worst goal least."""
        goals = self.question.goals
        certain = [(trial.sure, -trial.worst(goals)[0], trial) for trial in trials if trial.sure is not None]
        if certain:
            return max(certain, key=lambda entry: entry[:2])[2]
        failed = [trial for trial in self.search.trials.values() if trial.windows and not trial.meets]
        return min(failed, key=lambda trial: (trial.saturated, trial.worst(goals)[0]), default=None)

    def _plan(self, load: max_load.Load | None) -> Plan:
        question, search, best = self.question, self.search, self.search.best
        rows = self._rows()
        trials = [trial for _, trial in rows]
        missed = self._nearest_miss(trials) if best is None and not self.stopped else None
        effects: list[Document] = []
        with self._within_limit():
            effects = [] if best is None or self.brief else max_load.changes(self.confirming, question, best.candidate)
        by_estimate, unknowns = search.by_estimate, []
        if by_estimate is not None:
            candidate = by_estimate.candidate
            by_estimate = next((trial for trial in trials if trial.candidate is candidate), by_estimate)
            with self._within_limit():
                unknowns = search.evaluator.costliest_unknowns(candidate)
        curve = self._curve(by_estimate)
        return Plan(
            question, self.horizon, best, rows, by_estimate, unknowns, missed, load, effects, self._ledger(),
            curve=curve, alternatives=self._alternatives(trials), capacity=self._capacity(trials),
            evaluated=len(search.trials), simulated_requests=self.simulations.requests, stop=self._stop(),
        )  # fmt: skip

    def _stop(self) -> Stop | None:
        """What is decided where the CPU limit was reached."""
        if not self.stopped:
            return None
        incumbent = self.search.incumbent if self.search.best is None else None
        return Stop(self.simulations.cpu_limit, incumbent, *self.search.bounds())

    def _curve(self, by_estimate: Trial | None) -> list[Level]:
        """What confidence costs; of a brief plan no more than is known."""
        if by_estimate is None or by_estimate.sure is None or self.question.spec.aim == "throughput":
            return []
        rungs = [] if self.brief else self.search.ladder()
        with self._within_limit():
            if rungs:
                return confidence_curve(self.question, by_estimate, self.best, rungs, self._confirming_trial)
        return [Level(None, by_estimate), Level(self.question.spec.confidence, self.best)]

    def _capacity(self, trials: Sequence[Trial]) -> list[Document]:
        """Estimates of the highest rate at the goals over GPUs, of each family in the table."""
        names = {trial.candidate.family.name for trial in trials}
        points = []
        for estimate in (family for family in self.families if family.family.name in names):
            best = 0.0
            for candidate in sorted(estimate.candidates, key=lambda candidate: candidate.gpus):
                rate, family = max_load.highest_estimate(estimate, candidate, self.question.goals), estimate.family
                if rate > best:
                    best = rate
                    identity = {"family": family.name, "layout": family.layout, "parallelism": family.parallelism}
                    points.append({**identity, "gpus": candidate.gpus, "rate": rate})
        return points

    def _alternatives(self, trials: Sequence[Trial]) -> list[Document]:
        reasons: dict[str, Counter[str]] = {}
        for entry in self._ledger():
            reasons.setdefault(entry.family.layout, Counter())[entry.reason] += 1
        rivals = [trial for trial in trials if trial is not self.best]
        return why_not(self.question, self.best, rivals, self.refused, reasons)

    def _ledger(self) -> list[LedgerEntry]:
        """Every candidate with its status and reason, after families that cannot run."""
        entries = list(self.refused)
        undecided = ("not decided", "the CPU limit was reached" if self.stopped else "no candidate meets the goals")
        for family in self.families:
            for candidate in family.candidates:
                status, reason = self.search.statuses.get(candidate.name, undecided)
                entries.append(LedgerEntry(family.family, candidate, status, reason))
        return entries


def find_max_load(question: Question, deployment: Candidate, simulations: Simulations) -> MaxLoad:
    """The highest rate at which a deployment meets its goals, with an interval."""
    if question.rate is None:
        expected = "expected arrivals with a rate, which --max-load changes"
        raise BadInput(expected, field="workload.arrivals.process", file=question.path)
    families, refused = estimate_families(question, [deployment])
    if refused:
        status, reason = refused[0].status, refused[0].reason
        if status != "infeasible":
            raise BadInput(f"expected a deployment that can run: {reason}", file=question.path)
        return MaxLoad(question, deployment, None, None, reason, 0)
    start = max_load.estimated_rate(families[0], deployment)
    lengths = horizon(question.at_rate(start), families)
    load = max_load.load_with_interval(lambda at: Evaluator(at, lengths, simulations), question, deployment, start)
    reason = "" if load else "goals are missed at every rate that was tried"
    return MaxLoad(question, deployment, lengths, load, reason, simulations.requests)
