"""A deployment that is given, by a scenario file, in place of one that the plan makes."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import relpath
from pathlib import Path
from typing import Any

from latency_models.io.files import is_path
from scenarios.engine import DeviceSpec, PoolSpec, router_name
from scenarios.overload import check_fixed
from scenarios.planning import EngineKindSpec, Layout
from scenarios.serving import ServingScenario, check_scenario
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, Family, Given, candidate
from workloads.errors import BadInput

UNKNOWN = DeviceSpec(type="device")
"""The device of an engine whose pool does not state one."""

FILES = frozenset({"path", "tables", "acceptance_profile", "efficiency"})
"""Fields that hold a file."""

NAMES_OR_FILES = frozenset({"model", "hardware", "calibration", "cost", "link"})
"""Fields that hold a built-in name or a file."""


def given_candidate(document: Document, path: Path, question: Question, name: str) -> Candidate:
    """The deployment of a scenario's sections `engine`, `step_time` and `system`, as a candidate of its own family.

    Args:
        document: of the file, whose own workload does not matter.
    """
    names = ("engine", "step_time", "system", "plugins")
    deployment = {key: value for key, value in document.items() if key in names}
    scenario = check_scenario({**question.document, **deployment}, {}, path)
    check_fixed(scenario.system.autoscaling, "a plan is about a fixed number of engines", path)
    pools = scenario.pools
    if [pool.role for pool in pools] not in (["both"], ["prefill", "decode"]):
        expected = "expected one pool of engines, or one of the role prefill and one of the role decode"
        raise BadInput(expected, field="system.pools", value=[pool.role for pool in pools], file=path)
    if scenario.workload.models.count > 1 and not all(_serves_evenly(pool) for pool in pools):
        raise BadInput("expected each, or all for a decode pool", field="system.pools.models", file=path)
    sections = _sections(scenario, path)
    kinds = tuple(EngineKindSpec(name=pool.name, device=pool.device or UNKNOWN) for pool in pools)
    layout: Layout = "colocated" if len(pools) == 1 else "disaggregated"
    shared = len(pools) == 2 and pools[1].models == "all"
    routing = router_name(scenario.system.routing)
    settings = tuple((field, _setting(pools, field)) for field in question.spec.vary)
    family = Family(layout, kinds, settings, routing, shared, scenario.workload.models.count, Given(name, sections))
    return candidate(question.spec, family, tuple(pool.replicas for pool in pools))


def plan_of_given(document: Document, goals: Mapping[str, float | str]) -> Document:
    """A document whose section `plan` has no space of candidates, for a question about its own deployment alone.

    Args:
        goals: in place of those of the document, unless there are none.
    """
    section = dict(document.get("plan") or {}) | ({"goals": dict(goals)} if goals else {})
    return {**document, "plan": {key: value for key, value in section.items() if key not in _OF_A_SPACE}}


_OF_A_SPACE = ("engines", "layouts", "vary", "routing", "limits", "objective", "decode", "link")


def _setting(pools: list[PoolSpec], field: str) -> object:
    """The value of a field of `engine` that the plan varies, for its column of the table; text where pools differ."""
    values: list[object] = []
    for pool in pools:
        value: object = pool.engine.model_dump(mode="json")
        for name in field.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        values.append(value)
    return values[0] if values.count(values[0]) == len(values) else " + ".join(map(str, values))


def _serves_evenly(pool: PoolSpec) -> bool:
    return pool.models == "each" or (pool.models == "all" and pool.role == "decode")


def _sections(scenario: ServingScenario, path: Path) -> Document:
    """The sections of a scenario whose system is a list of pools, with absolute paths."""
    pools = [pool.model_dump(mode="json", exclude_unset=True) for pool in scenario.pools]
    routing = scenario.system.model_dump(mode="json", include={"routing", "kv_events"}, exclude_unset=True)
    system: Document = {"layout": "pools", **routing, "pools": pools}
    if scenario.system.kv_link is not None:
        system["link"] = scenario.system.kv_link.model_dump(mode="json")
    sections = {"engine": pools[0]["engine"], "step_time": pools[0]["step_time"], "system": system}
    absolutes: Document = moved(sections, path.parent)
    return absolutes


def moved(value: Any, base: Path, folder: Path | None = None, key: str = "") -> Any:
    """A document for another folder.

    Args:
        base: the folder that relative paths in it start from. folder: the one that they will start from; None: they
            become absolute.
    """
    if isinstance(value, dict):
        return {name: moved(field, base, folder, name) for name, field in value.items()}
    if isinstance(value, list):
        return [moved(item, base, folder, key) for item in value]
    if not isinstance(value, str):
        return value
    if key in FILES or (key in NAMES_OR_FILES and is_path(value)) or (key == "plugins" and value.endswith(".py")):
        path = (base / value).absolute()
        if folder is None:
            return str(path)
        text = relpath(path, folder.absolute())
        return text if "/" in text or is_path(text) else f"./{text}"
    return value
