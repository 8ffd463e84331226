"""Judges candidates by simulation: a short window, some long ones, then as many as a verdict needs.

Every candidate gets the same requests at the same times (common random numbers): window r of each uses replication r.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from latency_models.unknowns import Unknown
from reports.records.run_directory import fingerprint
from scenarios.goals import Goal
from twin.executors.executor import Executor
from twin.planning.confidence import CERTAIN, LIKELY, clearly_missed, held, probability
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, document
from twin.planning.windows import Window, describe_overload, needs_detail, run_window
from twin.serving.plan import ServingPlan
from twin.serving.randomness import Draw
from twin.serving.uncertainty import combine

HOPELESS = 0.02
"""A candidate less likely than this to meet its goals gets no further windows."""

LONG_WINDOWS, DRAWS = 4, 20
"""Long windows of the first look; draws of the step-time model, a window of each."""

RACED = 6
"""Draws, the worst, under which the race tries a candidate; new windows try all."""


@dataclass(frozen=True)
class Horizon:
    """The lengths of windows.

    Attributes:
        short, long: requests of a window. warmup: seconds that do not count at its begin.
        span: seconds that a verdict is about.
    """

    short: int
    long: int
    warmup: float
    span: float


@dataclass(frozen=True)
class Verdict:
    """The verdict of simulation on a candidate.

    Attributes:
        probability: that a span meets all goals at the best estimate of the step times; 0 for a saturated system.
        sure: share of the draws of the step times under which goals hold, if they were drawn; those that were not tried
            are taken to. windows: of the long kind, or 1 short one.
        decided: no further windows would be made. meets: the verdict so far.
        reason: why not; empty for a candidate that meets its goals.
        seed: of the windows, where they are new ones that confirm it; None: the question's.
    """

    candidate: Candidate
    probability: float
    windows: list[Document]
    short: bool
    decided: bool
    meets: bool
    reason: str
    saturated: bool = False
    draws: int = 0
    summary: Document = field(default_factory=dict)
    intervals: Document = field(default_factory=dict)
    seed: int | None = None
    sure: float | None = None

    def value(self, goal: int) -> float | None:
        """The mean over windows of a goal's metric; None where no request counts."""
        values = [window["values"][goal] for window in self.windows]
        return None if None in values else float(np.mean(values))

    def worst(self, goals: Sequence[Goal]) -> tuple[float, Goal]:
        """The largest ratio of a metric to its limit, and its goal."""
        ratios = [
            (math.inf if (value := self.value(i)) is None else goal.ratio(value), goal) for i, goal in enumerate(goals)
        ]
        return max(ratios, key=lambda each: each[0])


class Judge:
    """Simulates windows of candidates, once each.

    Args:
        done: windows by key that have been made, to which new ones are added; `keep` saves each.
        executor: runs windows.

    Attributes:
        simulated: requests in all windows, also those taken from `done`.
    """

    def __init__(
        self,
        question: Question,
        horizon: Horizon,
        done: dict[str, Document],
        keep: Callable[[str, Document], None],
        executor: Executor,
        advance: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.question, self.horizon, self.goals = question, horizon, question.goals
        self._done, self._keep, self._executor, self._advance = done, keep, executor, advance
        self._used: dict[str, int] = {}
        self._severity: dict[int, float] = {}  # of draws, for the candidate that ranked them
        self._plans: dict[tuple[str, int], ServingPlan] = {}
        self._identity = fingerprint([question.document["workload"], question.seed, question.change, horizon.warmup])

    @property
    def simulated(self) -> int:
        """Requests simulated for this question."""
        return sum(self._used.values())

    def screen(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """A verdict on each from one short window, decided only where it is clear."""
        self._simulate([self._window(each, self.horizon.short, 0) for each in candidates])
        return [self._screened(each) for each in candidates]

    def look(self, candidates: Sequence[Candidate], replications: int = LONG_WINDOWS) -> list[Verdict]:
        """A verdict on each from so many long windows."""
        replications = replications if self.random(candidates) else 1
        self._simulate([self._window(each, self.horizon.long, r) for each in candidates for r in range(replications)])
        return [self._looked(each, replications) for each in candidates]

    def settle(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """A final verdict on each: windows are doubled until it is clear, or there are `plan.replications` of them."""
        found = {each.name: each for each in candidates}
        verdicts: dict[str, Verdict] = {}
        count = LONG_WINDOWS
        while found:
            for verdict in self.look(list(found.values()), min(count, self.question.spec.replications)):
                verdicts[verdict.candidate.name] = verdict
                if verdict.decided:
                    del found[verdict.candidate.name]
            count *= 2
        return [verdicts[each.name] for each in candidates]

    def random(self, candidates: Sequence[Candidate]) -> bool:
        """True if windows of some candidate differ from one another."""
        return any(self._plan(each, self.horizon.long).random for each in candidates)

    def with_draws(self, verdict: Verdict, most: int = DRAWS, *, every: bool = False) -> Verdict:
        """The verdict under the error of the step-time model, where the model has any.

        Args:
            most: draws to try, the worst; the candidate is taken to meet its goals under the others.
            every: try all of them, also where some suffice to refuse it.
        """
        drawable = bool(verdict.windows) and not verdict.saturated and self.can_draw(verdict.candidate)
        return self._with_draws(verdict, most, every=every) if drawable else verdict

    def whole(self, candidate: Candidate) -> tuple[Verdict, float]:
        """The verdict from all windows and draws of the plan, and the probability that goals are met in the long run.

        That probability is over luck and draws. A short window decides where it is clear.
        """
        (screened,) = self.screen([candidate])
        if screened.decided:
            return screened, 0.0
        (verdict,) = self.look([candidate], self.question.spec.replications)
        if verdict.saturated or not verdict.windows:
            return verdict, 0.0
        excess = np.array([window["excess"] for window in verdict.windows])
        draws = DRAWS if self.can_draw(candidate) else 0
        shifts = np.array(self._moves(verdict, range(draws))) if draws else None
        always, spec = probability(excess, math.inf, shifts), self.question.spec
        sure = None if shifts is None else float(held(excess, shifts).mean())
        meets = verdict.probability >= spec.reliability and (sure is None or sure >= spec.confidence - 1e-9)
        reason = "" if meets else verdict.reason or self._unsure(sure)
        return replace(verdict, sure=sure, meets=meets, decided=True, reason=reason, draws=draws), always

    def can_draw(self, candidate: Candidate) -> bool:
        """True if the error of a candidate's step times is known, so that they can be drawn."""
        return self._plan(candidate, self.horizon.long).can_draw

    def rank_draws(self, candidate: Candidate) -> None:
        """Find the draws of the step times that move a candidate furthest beyond its goals.

        Scores go by the names of unknowns, so a draw that is bad for one deployment is bad for most.
        """
        windows = {draw: self._window(candidate, self.horizon.short, 0, draw) for draw in range(DRAWS)}
        self._simulate(windows.values())
        self._severity = {draw: _severity(self._result(window)) for draw, window in windows.items()}

    def costliest_unknown(self, candidate: Candidate) -> Unknown | None:
        """The unknown of the step times that moves a candidate furthest, alone at a score of -1 or 1, short windows."""
        unknowns = self._plan(candidate, self.horizon.short).unknowns()
        pairs = [(each, score) for each in unknowns for score in (-1.0, 1.0)]
        windows = [self._window(candidate, self.horizon.short, 0, (each.name, score)) for each, score in pairs]
        self._simulate(windows)
        found = [(_severity(self._result(window)), each) for window, (each, _) in zip(windows, pairs, strict=True)]
        return max(found, key=lambda each: each[0])[1] if found else None

    @property
    def worst(self) -> list[int]:
        """The worst draws, one more than those under which a candidate may miss its goals."""
        allowed = math.floor((1 - self.question.spec.confidence) * DRAWS + 1e-9)
        return self._draws()[: allowed + 1]

    def screen_with_draws(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Screen under the worst draws of the step times, where these can be drawn."""
        doubted = {each.candidate.name: each for each in self.doubt(candidates)}
        fixed = {each.candidate.name: each for each in self.screen([c for c in candidates if not self.can_draw(c)])}
        passed = (Verdict(each, 0.5, [], True, False, True, "") for each in candidates)
        return [doubted.get(each.name) or fixed.get(each.name) or verdict
                for each, verdict in zip(candidates, passed, strict=True)]  # fmt: skip

    def doubt(self, candidates: Sequence[Candidate], *, long: bool = False) -> list[Verdict]:
        """Verdicts on those that clearly miss their goals under too many of the worst draws of the step times.

        One window under each draw. A candidate gets no further ones when it has failed, or cannot fail any more.

        Args:
            long: long windows of `RACED` draws, of which `with_draws` makes use; else short ones of the `worst`.
        """
        draws, requests = (self._draws()[:RACED], self.horizon.long) if long else (self.worst[::-1], self.horizon.short)
        beyond, allowed = LIKELY if long else CERTAIN, len(self.worst) - 1
        failed: Counter[str] = Counter()
        rest = [each for each in candidates if self.can_draw(each)]
        for left, draw in zip(range(len(draws), 0, -1), draws, strict=True):
            rest = [each for each in rest if failed[each.name] <= allowed < failed[each.name] + left]
            replication = draw % LONG_WINDOWS if long else 0
            windows = {each.name: self._window(each, requests, replication, draw) for each in rest}
            self._simulate(windows.values())
            failed.update(name for name, window in windows.items() if self._fails(self._result(window), beyond))
        return [self._doubted(each, failed[each.name]) for each in candidates if failed[each.name] > allowed]

    @staticmethod
    def _doubted(candidate: Candidate, failed: int) -> Verdict:
        reason = f"misses its goals under {failed} of the {DRAWS} draws of the step times, at least"
        return Verdict(candidate, 0.5, [], True, True, False, reason, draws=failed, sure=(DRAWS - failed) / DRAWS)

    def hardship(self, candidate: Candidate) -> float:
        """The distance beyond its goals of a candidate under the worst draws, in short windows that were made."""
        windows = [self._window(candidate, self.horizon.short, 0, draw) for draw in self.worst]
        return sum(_severity(self._done[each.key]) for each in windows if each.key in self._done)

    def _draws(self) -> list[int]:
        """Draws of the step-time model, the worst first, once they are ranked."""
        return sorted(range(DRAWS), key=lambda draw: (-self._severity.get(draw, 0.0), draw))

    @staticmethod
    def _fails(result: Document, beyond: float) -> bool:
        missed = map(clearly_missed, result["excess"], result["variance"], repeat(beyond)) if "excess" in result else ()
        return "refused" in result or bool(result["overload"]) or any(missed)

    # -- windows -----------------------------------------------------------------------------------------------------

    def scenario(self, candidate: Candidate, requests: int) -> Document:
        """The scenario of a candidate's windows of so many requests on average."""
        horizon, question = self.horizon, self.question
        made = document(question, candidate.family, candidate.sizes)
        if question.rate is not None:
            measure = {**(made.get("measure") or {}), "after": horizon.warmup, "before": requests / question.rate}
            made = {**made, "measure": measure, "workload": question.window(requests)}
        return made

    def _plan(self, candidate: Candidate, requests: int) -> ServingPlan:
        key = (candidate.name, requests)
        if key not in self._plans:
            made = self.scenario(candidate, requests)
            plan = self.question.plan({**made, "detail": needs_detail(self.goals)})
            self._plans[key] = plan
        return self._plans[key]

    def _window(self, candidate: Candidate, requests: int, replication: int, draw: Draw = None) -> Window:
        plan = self._plan(candidate, requests)
        drawn = "-" if draw is None else f"{draw[0]}{draw[1]:+g}" if isinstance(draw, tuple) else draw
        key = f"{self._identity}/{candidate.name}/{plan.requests}/{drawn}/{replication}"
        return Window(key, plan, tuple(self.goals), replication, draw)

    def _simulate(self, windows: Iterable[Window]) -> None:
        every = {window.key: window for window in windows}
        missing = [window for key, window in every.items() if key not in self._done]
        if missing:
            with self._executor.each_as_done(run_window, missing) as results:
                for window, result in results:
                    self._keep(window.key, result)
                    self._done[window.key] = result
                    self._advance(window.key)
        self._used |= {key: window.plan.requests for key, window in every.items()}

    def _result(self, window: Window) -> Document:
        return self._done[window.key]

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _screened(self, candidate: Candidate) -> Verdict:
        result = self._result(self._window(candidate, self.horizon.short, 0))
        failed = self._failed(candidate, [result])
        if failed is not None:
            return replace(failed, short=True)
        missed = [
            goal
            for goal, excess, variance in zip(self.goals, result["excess"], result["variance"], strict=True)
            if clearly_missed(excess, variance)
        ]
        reason = self._missed([result], missed[0]) if missed else ""
        summary, intervals = combine([result["summary"]])
        chance = 0.0 if missed else 0.5
        return Verdict(
            candidate, chance, [result], True, bool(missed), not missed, reason, False, 0, summary, intervals
        )  # fmt: skip

    def _looked(self, candidate: Candidate, replications: int) -> Verdict:
        windows = [self._result(self._window(candidate, self.horizon.long, r)) for r in range(replications)]
        failed = self._failed(candidate, windows)
        if failed is not None:
            return failed
        excess = np.array([window["excess"] for window in windows])
        chance = probability(excess, self.span_of(windows))
        return self._verdict(candidate, windows, chance, replications)

    def _verdict(self, candidate: Candidate, windows: list[Document], chance: float, replications: int) -> Verdict:
        spec = self.question.spec
        plan = self._plan(candidate, self.horizon.long)
        # What is in doubt with the estimates of the step times is out with their error.
        most = LONG_WINDOWS if plan.can_draw else spec.replications
        last = replications >= most or not plan.random
        clear = (1 + spec.reliability) / 2
        meets = chance >= (spec.reliability if last else clear)
        summary, intervals = combine([window["summary"] for window in windows])
        reason = ""
        if not meets:
            totals = [sum(window["excess"][i] for window in windows) for i in range(len(self.goals))]
            scale = [math.sqrt(sum(window["variance"][i] for window in windows)) or 1.0 for i in range(len(self.goals))]
            worst = max(range(len(self.goals)), key=lambda i: totals[i] / scale[i])
            reason = self._missed(windows, self.goals[worst])
            reason += f" (met in {100 * chance:.2g} % of spans)" if chance >= HOPELESS else ""
        decided = last or meets or chance < HOPELESS
        return Verdict(candidate, chance, windows, False, decided, meets, reason, False, 0, summary, intervals)

    def _failed(self, candidate: Candidate, windows: list[Document]) -> Verdict | None:
        """A verdict on a candidate that cannot run, or whose queue grows in half of the windows."""
        for window in windows:
            if "refused" in window:
                return Verdict(candidate, 0.0, [], False, True, False, window["refused"])
        overloads = [window["overload"] for window in windows if window["overload"]]
        if 2 * len(overloads) < len(windows):
            return None
        reason = describe_overload(overloads[0])
        summary, intervals = combine([window["summary"] for window in windows])
        return Verdict(candidate, 0.0, windows, False, True, False, reason, True, 0, summary, intervals)

    def _with_draws(self, verdict: Verdict, most: int, *, every: bool) -> Verdict:
        """The verdict with its share of the draws of the step-time model under which goals hold.

        Draws come in batches, the worst first and each twice as large as the one before, which end as soon as too many
        of them speak against the candidate.
        """
        spec = self.question.spec
        excess = np.array([window["excess"] for window in verdict.windows])
        moved: list[list[float]] = []
        in_order, sure = self._draws(), 1.0
        while len(moved) < most and (every or sure >= spec.confidence - 1e-9):
            some = in_order[len(moved) : min(max(2 * len(moved), len(self.worst)), most)]
            moved += self._moves(verdict, some)
            sure = (DRAWS - int((~held(excess, np.array(moved))).sum())) / DRAWS
        meets = verdict.meets and sure >= spec.confidence - 1e-9
        reason = "" if meets else verdict.reason or self._unsure(sure)
        return replace(verdict, sure=sure, meets=meets, decided=True, reason=reason, draws=len(moved))

    @staticmethod
    def _unsure(sure: float | None) -> str:
        return "" if sure is None else f"its goals hold under at most {100 * sure:.0f} % of the draws of the step times"

    def _moves(self, verdict: Verdict, draws: Iterable[int]) -> list[list[float]]:
        """By how much draws of the step-time model move the excesses of a verdict's windows: a window for each draw."""
        windows = [
            self._window(verdict.candidate, self.horizon.long, draw % len(verdict.windows), draw) for draw in draws
        ]
        self._simulate(windows)
        return [_moved(self._result(window), verdict.windows[window.replication]) for window in windows]

    def span_of(self, windows: list[Document]) -> float:
        """Windows in the span of a verdict; 1 where a window is a whole run, as of a replay."""
        if self.question.rate is None:
            return 1.0
        seconds = float(np.mean([window["summary"]["duration"] for window in windows]))
        return max(self.horizon.span / seconds, 1.0) if seconds else 1.0

    def _missed(self, windows: list[Document], goal: Goal) -> str:
        index = self.goals.index(goal)
        values = [window["values"][index] for window in windows]
        if None in values:
            return f"no request counts for {goal.name}"
        return f"{goal.name} is {in_unit(goal, float(np.mean(values)))}, goal {in_unit(goal, goal.limit)}"


def _severity(result: Document) -> float:
    """The largest excess of a window, in deviations of that of a deployment that just meets the goal."""
    if "refused" in result or result["overload"]:
        return math.inf
    pairs = zip(result["excess"], result["variance"], strict=True)
    return max(float(excess / math.sqrt(variance) if variance > 0 else excess) for excess, variance in pairs)


def _moved(drawn: Document, base: Document) -> list[float]:
    """By how much a draw of the step-time model moves the excesses of a window."""
    if drawn["overload"]:
        return [math.inf] * len(base["excess"])
    return [after - before for after, before in zip(drawn["excess"], base["excess"], strict=True)]


def in_unit(goal: Goal, value: float) -> str:
    """A goal's value with its unit."""
    if goal.at_most:
        return f"{1e3 * value:.4g} ms" if value < 1 else f"{value:.4g} s"
    return f"{100 * value:.4g} %" if goal.metric == "goodput" else f"{value:.4g}/s"
