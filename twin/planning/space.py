"""The space of a plan: families of candidates, which differ in the sizes of their pools alone, and their documents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from scenarios.engine import fill_pools
from scenarios.fields import SWEEP_POINTS
from scenarios.planning import EngineKindSpec, Layout, PlanSpec
from scenarios.reading import apply
from twin.planning.question import Document, Question
from workloads.errors import BadInput

MOST_CANDIDATES = 100_000
"""Candidates of one plan."""


@dataclass(frozen=True)
class Given:
    """A deployment that a file states.

    `name`: for people. `sections`: `engine`, `step_time`, and `system` as a list of pools.
    """

    name: str
    sections: Document


@dataclass(frozen=True)
class Family:
    """Candidates that differ in the sizes of their pools alone.

    `kinds`: the engines of the one pool, or of the prefill and the decode pool. `settings`: fields of `engine` that the
    plan varies. `shared`: one decode pool serves all models. `given`: the deployment, where a file states it.
    """

    layout: Layout
    kinds: tuple[EngineKindSpec, ...]
    settings: tuple[tuple[str, Any], ...]
    routing: str
    shared: bool = False
    models: int = 1
    given: Given | None = None

    @property
    def name(self) -> str:
        """A name that no other family has."""
        if self.given is not None:
            return f"given {self.given.name}"
        parts = ["+".join(kind.name for kind in self.kinds)]
        parts += [f"{key}={value}" for key, value in self.settings]
        parts += [self.routing, *(["shared"] if self.shared else [])]
        return f"{self.layout} {' '.join(parts)}"

    @property
    def parallelism(self) -> str:
        """The kinds of engines in words."""
        if self.given is not None:
            return f"given: {self.given.name}"
        return " P + ".join(kind.name for kind in self.kinds) + (" D" if len(self.kinds) > 1 else "")

    def engines(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Engines of each pool in all: of each model, unless a decode pool is shared."""
        return tuple(size * (1 if self.shared and pool == 1 else self.models) for pool, size in enumerate(sizes))


@dataclass(frozen=True)
class Candidate:
    """One deployment.

    `sizes`: engines of each pool (of each model, where these have engines of their own). `gpus`: devices in all.
    `cost`: price per hour; None where a device has none.
    """

    family: Family
    sizes: tuple[int, ...]
    gpus: int
    cost: float | None

    @property
    def name(self) -> str:
        """A name that no other candidate has."""
        return f"{self.family.name} {'+'.join(map(str, self.sizes))}"

    @property
    def complexity(self) -> tuple[int, int, int]:
        """Small for few pools, then for none whose only engine takes the others down, then for small engines."""
        single = sum(count == 1 for count in self.family.engines(self.sizes)) if len(self.sizes) > 1 else 0
        return len(self.sizes), single, max((kind.device.count for kind in self.family.kinds), default=0)

    @property
    def devices(self) -> str:
        """The devices in words: `10 = 3×2 P + 2×2 D`, and with an AFD bundle `16 = 2×2 P + (8A+1×4F) D`."""
        kinds, engines = self.family.kinds, self.family.engines(self.sizes)
        roles = ("",) if len(kinds) == 1 else (" P", " D")
        parts = [
            f"{count}×{instances_of(kind) or kind.device.count}{role}" if count > 1 or not kind.is_bundle
            else f"{instances_of(kind)}{role}"
            for count, kind, role in zip(engines, kinds, roles, strict=True)
        ]  # fmt: skip
        return f"{self.gpus} = {' + '.join(parts)}"

    def within(self, other: Candidate) -> bool:
        """True for a candidate of the same family none of whose pools is larger than the other's."""
        pairs = zip(self.sizes, other.sizes, strict=True)
        return self.family is other.family and all(size <= limit for size, limit in pairs)


def instances_of(kind: EngineKindSpec) -> str:
    """The instances of an AFD bundle and the GPUs of those that have several; "" for other engines."""
    if not kind.is_bundle:
        return ""
    section = kind.step_time or {}
    attention, ffn, gpus = (int(section.get(key, 1)) for key in ("attention_instances", "ffn_instances", "ffn_gpus"))
    return f"({attention}A+{ffn}{f'×{gpus}' if gpus > 1 else ''}F)"


def families(question: Question) -> list[Family]:
    """Every combination of layout, kinds of engines, varied settings and router."""
    spec = question.spec
    models = int((question.document["workload"].get("models") or {}).get("count", 1))
    settings = [tuple(zip(spec.vary, values, strict=True)) for values in itertools.product(*spec.vary.values())]
    combinations = []
    for layout in spec.layouts:
        for kinds in _kinds(spec, layout):
            shares = [how == "shared" for how in spec.decode] if layout != "colocated" and models > 1 else [False]
            combinations += [
                Family(layout, kinds, values, routing, shared, models)
                for values, routing, shared in itertools.product(settings, spec.routing, shares)
            ]
    if len(combinations) > SWEEP_POINTS.maximum:
        number = len(combinations)
        raise BadInput(SWEEP_POINTS.expectation(number), field="plan.vary", value=number, file=question.path)
    return combinations


def _kinds(spec: PlanSpec, layout: Layout) -> Iterator[tuple[EngineKindSpec, ...]]:
    if layout == "colocated":
        yield from ((kind,) for kind in spec.engines if "both" in kind.roles and not kind.is_bundle)
        return
    prefill = [kind for kind in spec.engines if "prefill" in kind.roles and not kind.is_bundle]
    decode = [kind for kind in spec.engines if "decode" in kind.roles and kind.is_bundle == (layout == "afd")]
    yield from itertools.product(prefill, decode)


def candidate(spec: PlanSpec, family: Family, sizes: tuple[int, ...]) -> Candidate:
    """The candidate of a family with pools of these sizes."""
    engines = zip(family.kinds, family.engines(sizes), strict=True)
    devices = [(spec.price(kind.device), count * kind.device.count) for kind, count in engines]
    costs = [price * count for price, count in devices if price is not None]
    cost = sum(costs) if len(costs) == len(devices) else None
    return Candidate(family, sizes, sum(count for _, count in devices), cost)


def candidates(question: Question, family: Family, largest_pools: tuple[int, ...]) -> list[Candidate]:
    """The candidates of a family that are within the plan's limits.

    `largest_pools`: engines of each. Without a limit of the plan's own, larger pools are not tried.
    """
    spec, limits = question.spec, question.spec.limits
    ranges = []
    for pool, kind in enumerate(family.kinds):
        per_engine = kind.device.count * family.engines((1,) * len(family.kinds))[pool]
        gpus = math.inf if limits.gpus is None else limits.gpus // per_engine
        maximum = min(largest_pools[pool], math.inf if limits.engines is None else limits.engines, gpus)
        ranges.append(range(1, int(maximum) + 1))
    if math.prod(map(len, ranges)) > MOST_CANDIDATES:
        expected = f"expected limits that leave at most {MOST_CANDIDATES:,} candidates"
        raise BadInput(expected, field="plan.limits", file=question.path)
    members = (candidate(spec, family, sizes) for sizes in itertools.product(*ranges))
    return [
        member
        for member in members
        if (limits.gpus is None or member.gpus <= limits.gpus)
        and (limits.kw is None or _kilowatts(member) <= limits.kw)
        and (limits.cost_per_hour is None or member.cost is None or member.cost <= limits.cost_per_hour)
    ]


def _kilowatts(deployment: Candidate) -> float:
    """The power of all devices at their limits."""
    engines = deployment.family.engines(deployment.sizes)
    kinds = zip(deployment.family.kinds, engines, strict=True)
    return sum(count * kind.device.count * (kind.device.power_limit or 0.0) for kind, count in kinds) / 1e3


def without_prefix_cache(question: Question, deployment: Candidate) -> Candidate:
    """The same deployment whose engines keep no prefixes."""
    family, off = deployment.family, {"enable_prefix_caching": False, "in_batch_prefix_caching": False}
    if family.given is None:
        settings = tuple({**dict(family.settings), **off}.items())
        return replace(deployment, family=replace(family, settings=settings))
    sections, system = family.given.sections, family.given.sections["system"]
    pools = [pool | {"engine": pool["engine"] | off} for pool in system["pools"]]
    changed = Given(f"{family.given.name} without prefix cache", {**sections, "system": system | {"pools": pools}})
    return replace(deployment, family=replace(family, given=changed))


def document(question: Question, family: Family, sizes: tuple[int, ...]) -> Document:
    """The scenario of a candidate: the question's, with the pools of the candidate. The workload is unchanged."""
    base, spec = question.document, question.spec
    if family.given is not None:
        system = family.given.sections["system"]
        pools = [pool | {"replicas": size} for pool, size in zip(system["pools"], sizes, strict=True)]
        return {**base, **family.given.sections, "system": system | {"pools": pools}}
    pools = [_pool(question, family, pool, size) for pool, size in enumerate(sizes)]
    system = {"layout": "pools", "routing": family.routing, "pools": pools}
    if family.layout != "colocated":
        assert spec.link is not None
        system["link"] = spec.link.model_dump(mode="json")
    first = pools[0]
    return {**base, "engine": first["engine"], "step_time": first["step_time"], "system": system}


def _pool(question: Question, family: Family, index: int, size: int) -> Document:
    kind, apart = family.kinds[index], family.layout != "colocated"
    common = {name: question.document[name] for name in ("engine", "step_time") if name in question.document}
    section: Document = {"engine": dict(kind.engine)} | ({"step_time": kind.step_time} if kind.step_time else {})
    (filled,) = fill_pools({**common, "system": {"pools": [section]}})["system"]["pools"]
    role = ("prefill", "decode")[index] if apart else "both"
    if "step_time" not in filled:
        raise BadInput("expected step times, of the engine or of the scenario", field=f"plan.engines.{kind.name}")
    settings = {f"engine.{key}": value for key, value in family.settings}
    device = kind.device.model_dump() | {"price_per_hour": question.spec.price(kind.device)}
    return {
        "name": role if apart else "engine",
        "role": role,
        "replicas": size,
        "models": "all" if family.shared and index == 1 else "each",
        "engine": apply({"engine": filled["engine"]}, settings)["engine"],
        "step_time": filled["step_time"],
        "device": {name: value for name, value in device.items() if value is not None},
    }
