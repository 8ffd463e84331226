"""The question that a plan answers: a workload, goals, and what may vary, checked; changes that `--what` states.

Hits in prefix caches are expected from a sample of the requests: how many, and how soon. A block hits if its last use
is not so long ago that a cache has evicted it, which drops what was used least recently. Within w requests a cache sees
Σ_{j<w} a·P(D > j) distinct blocks, where D is the distance of two uses of a block in requests and a the blocks of a
request (the footprint of working-set theory). It is full after as many requests as that equals its capacity, and blocks
of smaller distances hit. This also says when caches that begin empty are warm: later requests find what they would have
found in a cache that had served for long.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from latency_models.io.config_io import checked
from latency_models.step_time import StepTime
from scenarios.fields import Goal, MeasuredSpec, MeasureSpec
from scenarios.planning import PlanSpec
from scenarios.reading import ScenarioFile, Settings, apply, load_plugins
from scenarios.serving import OpenLoopSpec, ServingWorkloadSpec, check_scenario
from twin.serving.plan.plan import ServingPlan, make_plan
from twin.serving.run.simulation import realisation
from workloads.arrivals import peak_of
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.mixes import SharedPrefixes
from workloads.request import Request
from workloads.traces import Trace

Document = dict[str, Any]

SAMPLE, REUSE_SAMPLE = 4000, 40_000
"""Requests drawn for estimates; of a trace with prefixes, whose reuse is rare at its begin."""

WARM_HITS = 0.999
"""Share of the hits of a warm cache that one which began empty has when it counts as warm."""


@dataclass(frozen=True)
class PrefixHits:
    """Reuse of prompt blocks in a sample of requests.

    Attributes:
        cacheable: tokens of each prompt that a cache of any size can supply.
        distances: requests between a use of a block and the one before, of all blocks that are looked up, ascending;
            infinite for the first use. tokens: of a block. requests: in the sample.
    """

    cacheable: NDArray[np.int64]
    distances: NDArray[np.float64]
    tokens: int
    requests: int

    def share(self, blocks: float) -> float:
        """The part of `cacheable` that a cache of this many blocks is expected to supply."""
        return min(len(self._hits(blocks)) * self.tokens / max(int(self.cacheable.sum()), 1), 1.0)

    def settled(self, blocks: float) -> float:
        """Requests of one engine after which its cache of this many blocks is warm."""
        hits = self._hits(blocks)
        return float(hits[int(WARM_HITS * (len(hits) - 1))]) if len(hits) else 0.0

    def _hits(self, blocks: float) -> NDArray[np.float64]:
        """The distances of the blocks that hit."""
        places = np.searchsorted(self.distances, np.arange(self.requests), side="right")
        footprint = np.cumsum(len(self.distances) - places) / self.requests
        full = np.searchsorted(footprint, blocks, side="right")
        longest = full if full < self.requests else np.finfo(float).max
        return self.distances[: np.searchsorted(self.distances, longest, side="right")]


def prefix_hits(requests: Sequence[Request], tokens: int, shared: SharedPrefixes | None) -> PrefixHits | None:
    """The reuse in a sample; None if no request has a block that another one may have.

    `tokens`: of a block. `shared`: the beginnings that prompts may have beside those in the sample.
    """
    numbers: dict[tuple[int, int], int] = {}
    latest: list[int] = []  # by block: the request that used it last
    distances: list[float] = []
    paths: list[list[int]] = []
    for index, request in enumerate(requests):
        path, blocks = -1, []
        for key in request.prefix_blocks[: max(request.prompt_tokens - 1, 0) // tokens]:
            path = numbers.setdefault((path, key), len(numbers))  # the same id after another path is another block
            if path == len(latest):
                latest.append(index)
                distances.append(np.inf)
            else:
                distances.append(index - latest[path])
                latest[path] = index
            blocks.append(path)
        paths.append(blocks)
    uses = np.bincount([block for blocks in paths for block in blocks], minlength=len(latest))
    num_shared = 0 if shared is None else shared.shared_blocks
    counts = [max(int((uses[blocks] > 1).sum()), min(len(blocks), num_shared)) if blocks else 0 for blocks in paths]
    cacheable = np.array(counts, dtype=np.int64) * tokens
    return PrefixHits(cacheable, np.sort(np.array(distances)), tokens, len(paths)) if cacheable.any() else None


@dataclass(frozen=True)
class Lengths:
    """Prompts and answers, tokens, of a sample of the requests, and the reuse of blocks of their prompts, if any."""

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    hits: PrefixHits | None = None

    @property
    def context(self) -> float:
        """Mean tokens that a decode attends to, over all decode steps."""
        answers = np.maximum(self.answers, 1)
        return float(((self.prompts + answers / 2) * answers).sum() / answers.sum())


@dataclass(frozen=True)
class Question:
    """A checked question.

    Attributes:
        document: the scenario without `plan` and `system`; the workload may be changed.
        path: the file; relative paths start from its folder. spec: the `plan` section.
        trace: the trace of the workload, read. step_times: read once for all candidates. goals: those of `spec`.
        change: the difference to the file, in words. peak: the highest rate of arrivals relative to the mean.
    """

    document: Document
    path: Path
    spec: PlanSpec
    trace: Trace | None
    step_times: dict[str, StepTime]
    goals: list[Goal] = field(default_factory=list)
    change: str = ""
    peak: float = 1.0

    @property
    def rate(self) -> float | None:
        """Requests per second of an open loop; None where arrivals are replayed or wait for answers."""
        arrivals = self.document["workload"].get("arrivals", {})
        return float(arrivals["rate"]) if "rate" in arrivals else None

    @property
    def load(self) -> float | None:
        """Requests per second on average, also of a replayed trace; None where arrivals wait for answers."""
        arrivals = self.document["workload"].get("arrivals", {})
        times = None if self.trace is None else self.trace.arrivals
        if arrivals.get("process") == "replay" and times is not None and len(times) > 1 and times[-1] > 0:
            return float(arrivals.get("speed", 1.0) * len(times) / times[-1])
        return self.rate

    @property
    def seed(self) -> int:
        """The seed of the scenario."""
        return int(self.document.get("seed", 0))

    def window(self, requests: int) -> Document:
        """The workload of a window with this number of requests on average.

        Where the rate changes over time, windows begin at a random time of its profile, and there are enough requests
        for those of the highest rate.
        """
        workload = self.document["workload"]
        arrivals = workload["arrivals"]
        if arrivals.get("profile"):
            arrivals = {**arrivals, "profile": {**arrivals["profile"], "start": "random"}}
        return {**workload, "arrivals": arrivals, "requests": math.ceil(requests * self.peak)}

    def plan(self, document: Document) -> ServingPlan:
        """The simulation of a candidate's document."""
        scenario = check_scenario(document, {}, self.path)
        return make_plan(scenario, self.path.parent, self.trace, self.step_times)

    def at_rate(self, rate: float) -> Question:
        """The same question at another rate of arrivals."""
        workload = self.document["workload"]
        changed = {**workload, "arrivals": {**workload["arrivals"], "rate": rate}}
        return self._with_workload(changed, f"rate {rate:.6g}")

    def at_seed(self, seed: int) -> Question:
        """The same question with other requests and draws."""
        return replace(self, document={**self.document, "seed": seed})

    def with_lengths(self, factor: float, sides: Sequence[str] = ("prefill", "decode")) -> Question:
        """The same question with prompts and answers of all requests, or one of the `sides`, longer by a factor."""
        workload = copy.deepcopy(self.document["workload"])
        for section in (workload, *(workload.get("tasks") or [])):
            for side in sides:
                _scale(section.get(side), factor)
        trace = self.trace
        if trace is not None:
            prompts = _scaled(trace.prefill_tokens, factor if "prefill" in sides else 1.0)
            answers = _scaled(trace.decode_tokens, factor if "decode" in sides else 1.0)
            trace = replace(trace, prefill_tokens=prompts, decode_tokens=answers)
        name = "lengths" if len(sides) > 1 else sides[0]
        return replace(self._with_workload(workload, f"{name} x {factor:g}"), trace=trace)

    def with_hit_rate(self, share: float) -> Question:
        """The same question of which prefix caches supply a share of the prompt tokens, and whose engines have some."""
        workload = {name: value for name, value in self.document["workload"].items() if name != "prefixes"}
        caches = {"enable_prefix_caching": True}
        kinds = [kind.model_copy(update={"engine": kind.engine | caches}) for kind in self.spec.engines]
        document = {**self.document, "engine": {**(self.document.get("engine") or {}), **caches}}
        shared = replace(self, document=document, spec=self.spec.model_copy(update={"engines": kinds}))
        shared = shared._with_workload({**workload, "hit_rate": share}, f"hit rate {share:g}")
        checked(ServingWorkloadSpec, shared.document["workload"], self.path).build(self.trace)
        return shared

    def lengths(self) -> Lengths:
        """Lengths of some requests, which do not depend on the engine."""
        step_time = {"source": "linear", "overhead": 1.0}
        return self.sample(self.plan({**self.document, "engine": {"num_gpu_blocks": 10**6}, "step_time": step_time}))

    @property
    def shares_prefixes(self) -> bool:
        """True if prompts may begin as earlier ones did, so that a prefix cache has an effect."""
        workload = self.document["workload"]
        recorded = self.trace is not None and self.trace.prefix_blocks is not None
        return recorded or any(workload.get(field) for field in ("prefixes", "sessions", "hit_rate"))

    def with_prefixes(self, factor: float) -> Question | None:
        """The same question with longer or shorter shared beginnings of the prompts.

        None where a trace has them, or where they would be longer than the prompts.
        """
        workload = self.document["workload"]
        if share := workload.get("hit_rate"):
            changed = {**workload, "hit_rate": min(factor * share, 0.999)}
        elif prefixes := workload.get("prefixes"):
            longer = {"tokens": max(round(factor * prefixes["tokens"]), 1)}
            changed = {**workload, "prefixes": prefixes | longer}
        else:
            return None
        try:
            checked(ServingWorkloadSpec, changed, self.path).build(self.trace)
        except BadInput:
            return None
        return self._with_workload(changed, f"prefixes x {factor:g}")

    def sample(self, plan: ServingPlan) -> Lengths:
        """Lengths of some requests of a candidate's workload."""
        recorded = self.trace is not None and self.trace.prefix_blocks is not None
        limit = REUSE_SAMPLE if recorded else SAMPLE
        pairs = realisation(replace(plan, requests=min(limit, plan.requests)), 0)
        prompts = np.array([request.prompt_tokens for request, _ in pairs], dtype=np.int64)
        answers = np.array([min(answer, request.max_tokens) for request, answer in pairs], dtype=np.int64)
        if not self.shares_prefixes:
            return Lengths(prompts, answers)
        assert isinstance(plan.workload, Workload)
        tokens, requests = plan.scheduler.config.prefix_id_tokens, [request for request, _ in pairs]
        return Lengths(prompts, answers, prefix_hits(requests, tokens, plan.workload.prefixes))

    def _with_workload(self, workload: Document, change: str) -> Question:
        change = f"{self.change}, {change}" if self.change else change
        return replace(self, document={**self.document, "workload": workload}, change=change)


class _SharedSections(ScenarioFile):
    """A scenario of which the sections that all candidates share are checked: workload, goals and measurements."""

    kind: Literal["serving"]
    workload: ServingWorkloadSpec
    engine: Any = None
    step_time: Any = None
    system: Any = None
    failures: Any = None
    measure: MeasureSpec = Field(default_factory=MeasureSpec)
    measured: MeasuredSpec | None = None
    plan: PlanSpec
    fast_forward: bool = True
    detail: bool | Literal["requests"] = True


def read_question(document: Document, settings: Settings, path: Path, trace: Path | None = None) -> Question:
    """Check the parts of a scenario that all candidates share.

    `trace`: file whose lengths, and arrivals where the scenario replays, take the place of the scenario's.
    """
    document = apply(document, settings)
    load_plugins(document, path)
    if not isinstance(document.get("plan"), dict):
        raise BadInput("expected a section plan, with goals and engines", field="plan", file=path)
    workload = document.get("workload")
    if trace is not None:
        lengths = ("prefill", "decode", "tasks")
        workload = {name: value for name, value in (workload or {}).items() if name not in lengths}
        workload["trace"] = {**(workload.get("trace") or {}), "path": str(trace.absolute())}
    if isinstance(workload, dict):
        requests = {} if workload.get("requests") or workload.get("trace") else {"requests": SAMPLE}
        document = {**document, "workload": {**workload, **requests}}
    sections = checked(_SharedSections, document, path)
    spec, arrivals = sections.plan, sections.workload.arrivals
    names = [kind.name for kind in spec.engines if kind.step_time is not None]
    unused = next((key for key in settings if key.partition(".")[0] == "step_time"), None)
    if unused is not None and names and len(names) == len(spec.engines):
        expected = f"expected plan.engines.{names[0]}.{unused}, since every kind of engine has step times of its own"
        raise BadInput(expected, field="--set", value=unused, file=path)
    if isinstance(arrivals, OpenLoopSpec) and (document.get("measure") or {}).keys() & {"after", "before"}:
        raise BadInput("expected none: a plan chooses the measured time itself", field="measure", file=path)
    goals = spec.wanted
    if any(goal.metric == "goodput" for goal in goals) and not sections.measure.slo:
        raise BadInput("expected limits of ttft, tpot or e2e, for the goal goodput", field="measure.slo", file=path)
    base = {name: value for name, value in document.items() if name not in ("plan", "system", "failures", "measured")}
    peak = peak_of(arrivals.build()) if isinstance(arrivals, OpenLoopSpec) else 1.0
    rows = sections.workload.read_trace(path.parent)
    question = Question(base, path, spec, rows, {}, goals, peak=peak)
    if spec.bundles:
        from twin.planning.bundles import with_bundles  # slow to import, and few plans have some

        sample = question.lengths()
        spec = with_bundles(spec, sample.prompts, sample.answers, base.get("engine") or {}, path)
        return replace(question, spec=spec)
    return question


def _scale(lengths: Any, factor: float) -> None:
    """Scale the section of one distribution in place."""
    if not isinstance(lengths, dict):
        return
    integral = lengths.get("distribution") in ("fixed", "uniform")
    for name in ("mean", "low", "high"):
        if name in lengths:
            lengths[name] = max(round(lengths[name] * factor), 1) if integral else max(lengths[name] * factor, 1.0)


def _scaled(tokens: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    longer: NDArray[np.int64] = np.maximum(np.rint(tokens * factor), np.minimum(tokens, 1)).astype(np.int64)
    return longer


EXPECTED = "expected rate, prompts or answers with a factor (2x), a change (+50%) or a rate; or hit_rate with a share"


def with_changes(question: Question, text: str) -> Question:
    """The question after the changes of one `--what`, with commas between.

    Raises `BadInput` for what cannot be changed, or not to this value.
    """
    variant = question
    for part in text.split(","):
        name, equals, amount = (word.strip() for word in part.partition("="))
        try:
            if name not in CHANGES or not equals:
                raise BadInput(EXPECTED)
            change, side = CHANGES[name]
            variant = change(variant, amount, side)
        except BadInput as error:
            raise BadInput(error.expected, field="--what", value=part) from None
    return variant


def _factor(amount: str) -> float | None:
    """The factor of `2x` or `+50%`; None for a plain number."""
    match = re.fullmatch(r"(?:(?P<times>\d+\.?\d*|\.\d+)x)|(?:(?P<percent>[+-]\d+\.?\d*) ?%)", amount)
    if match is None:
        return None
    factor = float(match["times"]) if match["times"] else 1 + float(match["percent"]) / 100
    if not 0.001 <= factor <= 1000:
        raise BadInput("expected a factor of 0.001 to 1000")
    return factor


def _rate(question: Question, amount: str, side: str) -> Question:
    if question.rate is None:
        raise BadInput("expected arrivals with a rate, which a scenario with these has not")
    factor = _factor(amount)
    try:
        rate = float(amount) if factor is None else factor * question.rate
    except ValueError:
        raise BadInput("expected a rate, as 30, 2x or +50%") from None
    if not 0 < rate < float("inf"):
        raise BadInput("expected a rate above 0")
    return question.at_rate(float(f"{rate:.12g}"))


def _lengths(question: Question, amount: str, side: str) -> Question:
    factor = _factor(amount)
    if factor is None:
        raise BadInput("expected a factor, as 2x or +50%")
    return question.with_lengths(factor, (side,))


def _hit_rate(question: Question, amount: str, side: str) -> Question:
    try:
        share = float(amount)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise BadInput("expected a share of prompt tokens, 0 to below 1")
    return question.with_hit_rate(share)


CHANGES: dict[str, tuple[Callable[[Question, str, str], Question], str]] = {
    "rate": (_rate, ""),
    "prompts": (_lengths, "prefill"),
    "answers": (_lengths, "decode"),
    "hit_rate": (_hit_rate, ""),
}
