"""Before anything is simulated: what fits in memory, what no size of pools can reach, and where to begin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scenarios.goals import Goal
from twin.planning.estimates import BEYOND, EngineEstimate, bound, estimate
from twin.planning.judging import Horizon, in_unit
from twin.planning.question import Lengths, Question
from twin.planning.space import Candidate, Family, candidates, document, families
from twin.serving.randomness import scores_of
from workloads.errors import BadInput

ROOM = 2.5
"""Pools of up to so many times the estimated need are tried, where the plan has no limit."""

TIMES = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Multiples of the engines that the load alone takes, of which the goals are estimated to need the first that meets
them, or the last."""

BUSY = 0.7
"""Share of an engine's capacity at which windows are measured out."""

WARM, SHORT, LONG = 0.95, 6.0, 20.0
"""A window begins to count when so many of the answers that began with it have ended. Its length in such times."""

LEAST_SHORT, LEAST_LONG, MOST = 800, 3000, 200_000
"""Requests of a window."""

COLD = 0.25
"""Largest part of `MOST`, or of the rows of a trace, in which prefix caches may become warm before a window counts."""


@dataclass(frozen=True)
class Refused:
    """Families or candidates that are not simulated. `status`: out of memory, unsupported or infeasible."""

    name: str
    family: Family
    status: str
    reason: str


@dataclass(frozen=True)
class Prospect:
    """A family that can run.

    Attributes:
        prefill, decode: estimates of an engine; the same one in a colocated family. candidates: by size.
    """

    family: Family
    prefill: EngineEstimate
    decode: EngineEstimate
    candidates: list[Candidate]

    def rates(self, candidate: Candidate, rate: float) -> tuple[float, float]:
        """Requests per second and engine, of prefill and of decode."""
        engines = self.family.engines(candidate.sizes)
        return rate / engines[0], rate / engines[-1]

    def ratio(self, candidate: Candidate, rate: float, goals: Sequence[Goal]) -> float:
        """The estimate of the worst goal relative to its limit."""
        rates = self.rates(candidate, rate)
        return max((estimate(goal, self.prefill, self.decode, rates) for goal in goals), default=0.0)

    def saturated(self, candidate: Candidate, rate: float) -> str | None:
        """The reason why a candidate is far beyond its capacity; None if it is not."""
        for side, engine, each in zip(
            ("", "decode "), (self.prefill, self.decode), self.rates(candidate, rate), strict=True
        ):
            most = engine.ceiling.capacity
            if each > BEYOND * most:
                return f"saturated: {each:.3g} requests/s at each {side}engine, which is estimated to bear {most:.3g}"
        return None


def prospects(question: Question, given: Sequence[Candidate] = ()) -> tuple[list[Prospect], list[Refused]]:
    """The families of a question that can run, with their candidates, and those that cannot; given deployments last."""
    found: list[Prospect] = []
    refused: list[Refused] = []
    lengths: Lengths | None = None
    known: dict[str, EngineEstimate] = {}
    fixed = {each.family.name: each for each in given}
    for family in [*families(question), *(each.family for each in given)]:
        only = fixed.get(family.name)
        try:
            plan = question.plan(document(question, family, only.sizes if only else (1,) * len(family.kinds)))
        except BadInput as error:
            refused.append(_refusal(family, error))
            continue
        lengths = lengths or question.sample(plan)
        roles = ("both",) if len(plan.pools) == 1 else ("prefill", "decode")
        engines = []
        for kind, pool, role in zip(family.kinds, plan.pools, roles, strict=True):
            key = f"{role} {kind.name} {family.settings} {family.name if only else ''}"
            if key not in known:
                known[key] = EngineEstimate(pool.scheduler.config, pool.step_time, lengths, role, pool.scheduler.stages)
            engines.append(known[key])
        problem = _too_long(engines, lengths, question) or _unreachable(question.goals, engines[0], engines[-1])
        if problem is not None:
            refused.append(Refused(family.name, family, *problem))
            continue
        own = [only] if only else candidates(question, family, _largest(engines, question))
        found.append(Prospect(family, engines[0], engines[-1], own))
    return found, refused


def under_draw(found: Mapping[str, Prospect], seed: int, draw: int) -> dict[str, Prospect]:
    """The same families, estimated under one draw of the unknowns of their step times."""
    engines = {id(each): each for prospect in found.values() for each in (prospect.prefill, prospect.decode)}
    unknowns = {unknown.name: unknown for each in engines.values() for unknown in each.step_time.unknowns()}
    scores = scores_of(unknowns.values(), seed, draw)
    drawn = {key: each.under(scores) for key, each in engines.items()}
    return {
        name: replace(each, prefill=drawn[id(each.prefill)], decode=drawn[id(each.decode)])
        for name, each in found.items()
    }


def horizon(question: Question, found: Sequence[Prospect]) -> Horizon:
    """The lengths of windows: some times the time that most answers take in a busy engine."""
    spec = question.spec
    if question.rate is None or not found:
        return Horizon(0, 0, 0.0, spec.span)
    steps = [_busy_times(prospect) for prospect in found]
    step, prompt = (float(np.median(column)) for column in zip(*steps, strict=True))
    warmup = float(np.quantile(found[0].decode.lengths.answers, WARM)) * step + prompt
    rows = MOST
    if question.trace is not None and question.trace.prefix_blocks is not None:
        rows = len(question.trace)  # which come once
    # The queue that cold caches leave behind drains afterwards, in the warm-up that every system has.
    cold = min(max(_until_warm(prospect, question.rate) for prospect in found), COLD * rows / question.rate)
    cold = float(f"{cold:.2g}")
    more = math.ceil(question.rate * cold)  # so that as many requests count as without prefix caches
    warmup = float(f"{warmup:.2g}")
    stated = spec.window and spec.window + math.ceil(question.rate * warmup)
    long = min((stated or _requests(question.rate * LONG * warmup, LEAST_LONG)) + more, rows)
    short = min(_requests(question.rate * SHORT * warmup, LEAST_SHORT) + more, long)
    return Horizon(short, long, warmup + cold, spec.span)


def _until_warm(prospect: Prospect, rate: float) -> float:
    """Seconds until the prefix caches of a busy deployment, empty at first, supply what they do in the long run."""
    engines = (prospect.prefill, prospect.decode)
    return max(each.requests_until_warm * math.ceil(rate / (BUSY * each.capacity)) / rate for each in engines)


def _busy_times(prospect: Prospect) -> tuple[float, float]:
    """Seconds of a decode step, and of a prompt and the step before it, in busy engines."""
    later = prospect.decode.steady(BUSY * prospect.decode.capacity)
    first = prospect.prefill.steady(BUSY * prospect.prefill.capacity)
    prompt = prospect.prefill.prompt_seconds(prospect.prefill.prompt)
    return later.seconds if later else 0.0, prompt + (first.seconds if first else 0.0)


def _requests(wanted: float, least: int) -> int:
    """A number of requests with two significant digits."""
    return min(max(int(float(f"{wanted:.2g}")), least), MOST)


def _refusal(family: Family, error: BadInput) -> Refused:
    memory = any(word in f"{error.field} {error.expected}" for word in ("kv_memory", "num_gpu_blocks", "leave room"))
    reason = f"{error.field}: {error.expected}" if error.field else error.expected
    return Refused(family.name, family, "out of memory" if memory else "unsupported", reason)


def _too_long(engines: list[EngineEstimate], lengths: Lengths, question: Question) -> tuple[str, str] | None:
    longest = int((lengths.prompts + lengths.answers).max())
    if question.trace is not None:
        longest = max(longest, int((question.trace.prefill_tokens + question.trace.decode_tokens).max()))
    for engine in engines:
        tokens = engine.config.num_gpu_blocks * engine.config.block_size
        if engine.role != "prefill" and longest > tokens:
            return "out of memory", f"a request of {longest:,} tokens, KV memory for {tokens:,}"
    return None


def _unreachable(goals: Sequence[Goal], prefill: EngineEstimate, decode: EngineEstimate) -> tuple[str, str] | None:
    """The goal that an engine misses even with a single request, if there is one."""
    for goal in goals:
        least = bound(goal, prefill, decode)
        if least is not None and least > goal.limit:
            limit = in_unit(goal, goal.limit)
            return "infeasible", f"{goal.name} is at least {in_unit(goal, least)}, goal {limit}, however many engines"
    return None


def _largest(engines: list[EngineEstimate], question: Question) -> tuple[int, ...]:
    """The largest pools that are tried: `ROOM` times what the load and then the goals are estimated to need."""
    rate = question.rate
    if rate is None:
        return (64,) * len(engines)
    loads = [rate / engine.floor.capacity for engine in engines]
    prefill, decode = engines[0].floor, engines[-1].floor

    def misses(times: float) -> bool:
        sizes = [max(times * load, 1.0) for load in loads]
        rates = rate / sizes[0], rate / sizes[-1]
        return any(estimate(goal, prefill, decode, rates) > 1.0 for goal in question.goals)

    times = next((each for each in TIMES if not misses(each)), TIMES[-1])
    return tuple(max(math.ceil(ROOM * times * load), 2) + 2 for load in loads)
