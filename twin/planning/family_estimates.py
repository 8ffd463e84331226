"""Before anything is simulated: families that fit in memory and can reach the goals, their candidates and estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scenarios.fields import Goal
from twin.planning.engine_estimates import BEYOND, EngineEstimate, bound, estimate
from twin.planning.question import Lengths, Question
from twin.planning.space import Candidate, Family, candidates, document, families
from twin.planning.windows import Horizon, Trial, in_unit
from twin.serving.plan.plan import scores_of
from workloads.errors import BadInput

LARGEST = 2.5
"""The largest pools relative to the estimated need, where the plan has no limit."""

MULTIPLES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Multiples of the engines that the load alone needs. The goals are estimated to need the first that meets them, or the
last."""

LOAD = 0.7
"""Share of an engine's capacity at which the times of windows are computed."""

WARMUP_QUANTILE = 0.95
"""Measurement starts when this share of the initial requests has finished."""

SHORT, LONG = 3.0, 7.0
"""Lengths of windows, in warm-ups."""

MIN_SHORT, MIN_LONG, MAX_REQUESTS = 800, 3000, 200_000
"""Requests of a window."""

MAX_COLD = 0.25
"""Largest part of `MAX_REQUESTS`, or of the rows of a trace, in which prefix caches warm up before a window counts."""


@dataclass(frozen=True)
class LedgerEntry:
    """A candidate with its status and the reason of it; a family that is not simulated is one entry, without sizes.

    `bounds`: the goal that a family cannot reach, with its lowest value.
    """

    family: Family
    candidate: Candidate | None
    status: str
    reason: str
    bounds: tuple[tuple[Goal, float], ...] = ()


@dataclass(frozen=True)
class FamilyEstimate:
    """A family that can run.

    `prefill`, `decode`: estimates of an engine; the same one in a colocated family. `candidates`: by size.
    """

    family: Family
    prefill: EngineEstimate
    decode: EngineEstimate
    candidates: list[Candidate]
    _engine_rates: dict[tuple[Goal, ...], tuple[float, float]] = field(default_factory=dict, init=False, compare=False)
    _drawn: dict[tuple[int, int], FamilyEstimate] = field(default_factory=dict, init=False, compare=False)

    def rates(self, candidate: Candidate, rate: float) -> tuple[float, float]:
        """Requests per second and engine, of prefill and of decode."""
        engines = self.family.engines(candidate.sizes)
        return rate / engines[0], rate / engines[-1]

    def ratio(self, candidate: Candidate, rate: float, goals: Sequence[Goal]) -> float:
        """The estimate of the worst goal relative to its limit."""
        rates = self.rates(candidate, rate)
        return max((estimate(goal, self.prefill, self.decode, rates) for goal in goals), default=0.0)

    def under(self, seed: int, draw: int) -> FamilyEstimate:
        """The same family, estimated under one draw of the unknowns of its step times."""
        if (seed, draw) not in self._drawn:
            self._drawn[seed, draw] = under_draw({"": self}, seed, draw)[""]
        return self._drawn[seed, draw]

    def severities(self, trial: Trial, question: Question, draws: int) -> list[float]:
        """The worst goal relative to its limit under each draw: as simulated, times the estimated effect of a draw."""
        candidate, rate = trial.candidate, question.load or 1.0
        values = [trial.value(i) for i in range(len(question.goals))]
        goals = [(goal, value) for goal, value in zip(question.goals, values, strict=True) if value is not None]
        base = [self.ratio(candidate, rate, [goal]) for goal, _ in goals]
        factors = [
            goal.ratio(value) / ratio if ratio else 1.0 for (goal, value), ratio in zip(goals, base, strict=True)
        ]
        drawn = [self.under(question.seed, draw) for draw in range(draws)]
        weighed = [(factor, goal) for factor, (goal, _) in zip(factors, goals, strict=True)]
        return [
            max((factor * family.ratio(candidate, rate, [goal]) for factor, goal in weighed), default=0.0)
            for family in drawn
        ]

    def engine_rates(self, goals: Sequence[Goal]) -> tuple[float, float]:
        """Requests per second and engine, of prefill and of decode, at which goals are estimated to be just met."""
        key = tuple(goals)
        if key not in self._engine_rates:
            together, prefill, decode = self.prefill is self.decode, self.prefill.capacity, self.decode.capacity
            idle = 1e-6 * min(prefill, decode)
            first = _highest(lambda rate: (rate, rate if together else idle), prefill, self, goals)
            later = first if together else _highest(lambda rate: (idle, rate), decode, self, goals)
            self._engine_rates[key] = first, later
        return self._engine_rates[key]

    def saturated(self, candidate: Candidate, rate: float) -> str | None:
        """The reason why a candidate is far beyond its capacity; None if it is not."""
        sides = zip(("", "decode "), (self.prefill, self.decode), self.rates(candidate, rate), strict=True)
        for side, engine, load in sides:
            capacity = engine.ceiling.capacity
            if load > BEYOND * capacity:
                bears = f"each {side}engine, which is estimated to bear {capacity:.3g}"
                return f"saturated: {load:.3g} requests/s at {bears}"
        return None


def _highest(
    rates: Callable[[float], tuple[float, float]], capacity: float, family: FamilyEstimate, goals: Sequence[Goal]
) -> float:
    """The highest rate of an engine, up to its capacity, at which all goals are estimated to be met."""
    low, high = 0.0, capacity
    for _ in range(10):
        middle = (low + high) / 2
        misses = any(estimate(goal, family.prefill, family.decode, rates(middle)) > 1.0 for goal in goals)
        low, high = (low, middle) if misses else (middle, high)
    return low


def estimate_families(
    question: Question, deployments: Sequence[Candidate] = ()
) -> tuple[list[FamilyEstimate], list[LedgerEntry]]:
    """The families of a question that can run, with their candidates, and those that cannot; given deployments last."""
    estimates: list[FamilyEstimate] = []
    refused: list[LedgerEntry] = []
    lengths: Lengths | None = None
    engines: dict[str, EngineEstimate] = {}
    fixed = {candidate.family.name: candidate for candidate in deployments}
    for family in [*families(question), *(candidate.family for candidate in deployments)]:
        only = fixed.get(family.name)
        try:
            plan = question.plan(document(question, family, only.sizes if only else (1,) * len(family.kinds)))
        except BadInput as error:
            place = f"{error.field} {error.expected}"
            memory = any(word in place for word in ("kv_memory", "num_gpu_blocks", "leave room"))
            reason = f"{error.field}: {error.expected}" if error.field else error.expected
            refused.append(LedgerEntry(family, None, "out of memory" if memory else "unsupported", reason))
            continue
        lengths = lengths or question.sample(plan)
        roles = ("both",) if len(plan.pools) == 1 else ("prefill", "decode")
        sides = []
        for kind, pool, role in zip(family.kinds, plan.pools, roles, strict=True):
            key = f"{role} {kind.name} {family.settings} {family.name if only else ''}"
            if key not in engines:
                config, stages = pool.scheduler.config, pool.scheduler.stages
                replicas = pool.spec.engine.data_parallel_size
                engines[key] = EngineEstimate(config, pool.step_time, lengths, role, stages, replicas)
            sides.append(engines[key])
        problem = _too_long(sides, lengths, question) or _unreachable(question.goals, sides)
        if problem is not None:
            refused.append(LedgerEntry(family, None, *problem))
            continue
        members = [only] if only else candidates(question, family, _largest(sides, question))
        estimates.append(FamilyEstimate(family, sides[0], sides[-1], members))
    return estimates, refused


def under_draw(families: Mapping[str, FamilyEstimate], seed: int, draw: int) -> dict[str, FamilyEstimate]:
    """The same families, estimated under one draw of the unknowns of their step times."""
    engines = {id(engine): engine for family in families.values() for engine in (family.prefill, family.decode)}
    unknowns = {unknown.name: unknown for engine in engines.values() for unknown in engine.step_time.unknowns()}
    scores = scores_of(unknowns.values(), seed, draw)
    varied = {key: engine.under(scores) for key, engine in engines.items()}
    return {
        name: replace(family, prefill=varied[id(family.prefill)], decode=varied[id(family.decode)])
        for name, family in families.items()
    }


def horizon(question: Question, estimates: Sequence[FamilyEstimate]) -> Horizon:
    """The lengths of windows, as multiples of the time that most answers take in a busy engine."""
    spec = question.spec
    if question.rate is None or not estimates:
        return Horizon(0, 0, 0.0, spec.span)
    steps, prompts = zip(*map(_busy_times, estimates), strict=True)
    step, prompt = float(np.median(steps)), float(np.median(prompts))
    warmup = float(np.quantile(estimates[0].decode.lengths.answers, WARMUP_QUANTILE)) * step + prompt
    rows = MAX_REQUESTS
    if question.trace is not None and question.trace.prefix_blocks is not None:
        rows = len(question.trace)  # which come once
    # The queue that cold caches leave behind drains afterwards, in the warm-up that every system has.
    rate, until_warm = question.rate, 0.0
    for engine in (engine for family in estimates for engine in (family.prefill, family.decode)):
        until_warm = max(engine.requests_until_warm * math.ceil(rate / (LOAD * engine.capacity)) / rate, until_warm)
    cold = float(f"{min(until_warm, MAX_COLD * rows / question.rate):.2g}")
    warm_up = math.ceil(question.rate * cold)  # so that as many requests count as without prefix caches
    warmup = float(f"{warmup:.2g}")
    stated = spec.window and spec.window + math.ceil(question.rate * warmup)
    long = min((stated or _requests(question.rate * LONG * warmup, MIN_LONG)) + warm_up, rows)
    short = min(_requests(question.rate * SHORT * warmup, MIN_SHORT) + warm_up, long)
    return Horizon(short, long, warmup + cold, spec.span)


def _busy_times(estimate: FamilyEstimate) -> tuple[float, float]:
    """Seconds of a decode step, and of a prompt and the step before it, in busy engines."""
    later = estimate.decode.steady(LOAD * estimate.decode.capacity)
    first = estimate.prefill.steady(LOAD * estimate.prefill.capacity)
    prompt = estimate.prefill.prompt_seconds(estimate.prefill.prompt)
    return later.seconds if later else 0.0, prompt + (first.seconds if first else 0.0)


def _requests(number: float, lowest: int) -> int:
    """A number of requests with two significant digits, within limits."""
    return min(max(int(float(f"{number:.2g}")), lowest), MAX_REQUESTS)


def _too_long(engines: list[EngineEstimate], lengths: Lengths, question: Question) -> tuple[str, str] | None:
    longest = int((lengths.prompts + lengths.answers).max())
    if question.trace is not None:
        longest = max(longest, int((question.trace.prefill_tokens + question.trace.decode_tokens).max()))
    for engine in engines:
        tokens = engine.config.num_gpu_blocks * engine.config.block_size
        if engine.role != "prefill" and longest > tokens:
            return "out of memory", f"a request of {longest:,} tokens, KV memory for {tokens:,}"
    return None


def _unreachable(
    goals: Sequence[Goal], engines: list[EngineEstimate]
) -> tuple[str, str, tuple[tuple[Goal, float], ...]] | None:
    """The goal that an engine misses even with a single request, if there is one."""
    for goal in goals:
        lowest = bound(goal, engines[0], engines[-1])
        if lowest is not None and lowest > goal.limit:
            return "infeasible", beyond_reach(goal, lowest), ((goal, lowest),)
    return None


def beyond_reach(goal: Goal, lowest: float) -> str:
    limit = in_unit(goal, goal.limit)
    return f"{goal.name} is at least {in_unit(goal, lowest)}, goal {limit}, however many engines"


def _largest(engines: list[EngineEstimate], question: Question) -> tuple[int, ...]:
    """The largest pools that are tried: `LARGEST` times the estimated need of the load and then the goals."""
    rate = question.load
    if rate is None or question.spec.aim == "throughput":
        return (64,) * len(engines)
    loads = [rate / engine.floor.capacity for engine in engines]
    prefill, decode = engines[0].floor, engines[-1].floor

    def misses(multiple: float) -> bool:
        sizes = [max(multiple * load, 1.0) for load in loads]
        rates = rate / sizes[0], rate / sizes[-1]
        return any(estimate(goal, prefill, decode, rates) > 1.0 for goal in question.goals)

    multiple = next((multiple for multiple in MULTIPLES if not misses(multiple)), MULTIPLES[-1])
    return tuple(max(math.ceil(LARGEST * multiple * load), 2) + 2 for load in loads)
