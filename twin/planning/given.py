"""Deployments that files state, as candidates of a plan: scenarios, and answers of AIConfigurator.

`aiconfigurator cli default --save-dir DIR` leaves `best_config_topn.csv`, the best first, in a folder for each mode: in
0.12 `DIR/OWNER/MODEL_SYSTEM_…/agg` and `…/disagg`, earlier `DIR/MODEL…/agg`. A row is one replica: `tp`, `pp`, `dp`,
`moe_tp`, `moe_ep` of a worker, its batch `bs` of each attention rank, and of prefill and decode workers the same with
`(p)` and `(d)` before them. There are as many replicas as bear the question's rate at the row's `seq/s`. The first row
is taken whose experts are split or spread, not both, which step times do not know.

Only the choice is taken over. Its latencies are simulated with the question's own step times where `plan.engines` has
an engine of the same GPUs and tensor parallelism, else with those of data sheets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from os.path import relpath
from pathlib import Path
from typing import Any, Literal

from latency_models.io.files import Columns, builtin_name, builtin_names, is_path, read_columns
from scenarios.engine import DeviceSpec, EngineSpec, PoolSpec, router_name
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

    `document`: of the file, whose own workload does not matter.
    """
    names = ("engine", "step_time", "system", "plugins")
    deployment = {key: value for key, value in document.items() if key in names}
    scenario = check_scenario({**question.document, **deployment}, {}, path)
    check_fixed(scenario.system.autoscaling, "a plan is about a fixed number of engines", path)
    pools = scenario.pools
    if [pool.role for pool in pools] not in (["both"], ["prefill", "decode"]):
        expected = "expected one pool of engines, or one of the role prefill and one of the role decode"
        raise BadInput(expected, field="system.pools", value=[pool.role for pool in pools], file=path)
    even = [pool.models == "each" or (pool.models == "all" and pool.role == "decode") for pool in pools]
    if scenario.workload.models.count > 1 and not all(even):
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

    `goals`: in place of those of the document, unless there are none.
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

    `base`: the folder that relative paths in it start from. `folder`: the one that they will start from; None: they
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


BEST = "best_config_topn.csv"
DEPTHS = ("", "*/", "*/*/", "*/*/*/")
"""Folders in which it may be."""

SYSTEMS = {"rtx_pro_6000_server": "rtx-pro-6000"}
"""Hardware files of systems whose names are others."""

WEIGHTS = {
    "bfloat16": "bf16", "float16": "bf16", "fp8": "fp8", "fp8_static": "fp8", "fp8_block": "fp8", "fp8_ootb": "fp8",
    "int8_wo": "int8", "nvfp4": "fp4", "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4",
}  # fmt: skip
"""Formats of weights by AIConfigurator's names."""

MEMORY = ("num_gpu_blocks", "kv_memory")
STAGES = ("pipeline_parallel_size", "pipeline", "async_scheduling")
"""Fields of `engine` that are those of an engine of the plan, not of the answer."""

CACHES = {"bfloat16": "bf16", "float16": "bf16", "fp8": "fp8"}


def is_answer(path: Path) -> bool:
    """True for a table or a folder, which scenario files are not."""
    return path.suffix == ".csv" or path.is_dir()


def candidates_of_answer(path: Path, question: Question) -> list[Candidate]:
    """The best deployment of a table, or those of the tables in a folder that `--save-dir` named."""
    files = [path] if path.is_file() else sorted(file for depth in DEPTHS for file in path.glob(depth + BEST))
    if not files:
        raise BadInput(
            f"expected agg/{BEST} or disagg/{BEST} in it, as aiconfigurator --save-dir leaves them", file=path
        )
    return [_candidate(file, path.stem, question) for file in files]


def _candidate(file: Path, name: str, question: Question) -> Candidate:
    """The deployment of the first row that can be used, the best."""
    table = read_columns(file)
    if not len(table):
        raise BadInput("expected a row: AIConfigurator found no deployment", file=file)
    apart = "(p)tp" in table.names
    rows = [Row(table, index) for index in range(len(table))]
    prefixes = ("(p)", "(d)") if apart else ("",)
    row = next((row for row in rows if not any(row.mixes_experts(prefix) for prefix in prefixes)), None)
    if row is None:
        raise rows[0].fault("expected experts that are split or spread, not both", f"{prefixes[0]}moe_ep")
    # Replicas that bear the question's rate, as AIConfigurator counts them; 1 where there is no rate.
    replicas = 1 if question.rate is None else math.ceil(question.rate / row.number("seq/s") - 1e-9)
    roles = (("(p)", "prefill"), ("(d)", "decode")) if apart else (("", "both"),)
    pools = [_pool(row, prefix, role, replicas, question) for prefix, role in roles]
    system: Document = {"layout": "pools", "pools": pools}
    if apart:
        if question.spec.link is None:
            expected = "expected a link from prefill to decode engines, since this answer has both"
            raise BadInput(expected, field="plan.link", file=question.path)
        system["link"] = question.spec.link.model_dump(mode="json")
    document = {"engine": pools[0]["engine"], "step_time": pools[0]["step_time"], "system": system}
    return given_candidate(document, file, question, f"{name} ({'disagg' if apart else 'agg'} of AIConfigurator)")


class Row:
    """One row of a table; errors name file, line and column."""

    def __init__(self, table: Columns, index: int) -> None:
        self.table = table
        self.index = index

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; tables may write it as 8.0."""
        if name not in self.table.names and default is not None:
            return default
        value = self.number(name)
        if value != int(value):
            raise self.fault("expected a whole number", name)
        return int(value)

    def number(self, name: str) -> float:
        """A number above 0."""
        return self.table.numbers(name, above=0)[self.index]

    def one_of(self, name: str, formats: Mapping[str, str], default: str) -> str:
        """The format that a name stands for; the default where the table lacks the column or says nothing."""
        text = self.table.text(name)[self.index] if name in self.table.names else ""
        if not text:
            return default
        if text not in formats:
            raise self.fault(f"expected one of {', '.join(formats)}", name)
        return formats[text]

    def builtin(self, name: str, kind: Literal["hardware", "models"]) -> str:
        """The name of a built-in model or device."""
        text = self.table.text(name)[self.index]
        for alias in (SYSTEMS.get(text, text), text.rpartition("/")[2]):  # the latter of a local path
            if builtin_name(kind, alias) is not None:
                return alias if kind == "models" else str(builtin_name(kind, alias))
        expected = f"expected one of {', '.join(builtin_names(kind))}, or an engine of as many GPUs in plan.engines"
        raise self.fault(expected, name)

    def mixes_experts(self, prefix: str) -> bool:
        """True if each expert is split over some devices, and the experts are spread over several such groups."""
        return min(self.integer(f"{prefix}{name}", 1) for name in ("moe_tp", "moe_ep")) > 1

    def fault(self, expected: str, name: str) -> BadInput:
        """The error about a column of this row."""
        return self.table.fault(expected, self.index, name)


def _pool(row: Row, prefix: str, role: str, replicas: int, question: Question) -> Document:
    """The workers of one role."""
    tp, pp, dp = (row.integer(f"{prefix}{name}", 1) for name in ("tp", "pp", "dp"))
    spread = row.integer(f"{prefix}moe_ep", 1)
    batch, workers = row.integer(f"{prefix}bs"), row.integer(f"{prefix}workers", 1)
    engine = dict(question.document.get("engine") or {})
    engine |= {"max_num_seqs": batch} | ({"data_parallel_size": dp} if dp > 1 else {})
    if role == "prefill":
        engine["max_num_batched_tokens"] = batch * row.integer(f"{prefix}isl", row.integer("isl"))
    elif role == "both" and "ctx_tokens" in row.table.names:
        engine["max_num_batched_tokens"] = row.integer("ctx_tokens") + batch
    else:
        usual = int(EngineSpec.model_fields["max_num_batched_tokens"].default)
        engine["max_num_batched_tokens"] = max(engine.get("max_num_batched_tokens", usual), batch)
    kind = _same_engine(question.spec.engines, tp, tp * pp * dp)
    if kind is not None:
        memory = {key: value for key, value in kind.engine.items() if key in MEMORY}
        engine = ({key: value for key, value in engine.items() if key not in MEMORY} if memory else engine) | memory
        engine |= {key: value for key, value in kind.engine.items() if key in STAGES}
        step_time = dict(kind.step_time or question.document["step_time"])
        device = kind.device.model_dump(exclude_none=True)
    else:
        hardware = row.builtin(f"{prefix}system", "hardware")
        weights = row.one_of(f"{prefix}gemm", WEIGHTS, "bf16")
        step_time = {
            "source": "roofline", "model": row.builtin("model", "models"), "hardware": hardware,
            "tensor_parallel": tp, "pipeline_parallel": pp, "data_parallel": dp, "expert_parallel": spread > 1,
            "weights": weights, "experts": row.one_of(f"{prefix}moe", WEIGHTS, weights),
            "cache": row.one_of(f"{prefix}kvcache", CACHES, "bf16"),
        }  # fmt: skip
        device = {"type": hardware, "count": tp * pp * dp}
        engine = {key: value for key, value in engine.items() if key not in MEMORY}  # that of the data sheet
        engine |= {"pipeline_parallel_size": pp, "async_scheduling": False} if pp > 1 else {}
    device |= {"price_per_hour": price} if (price := question.spec.prices.get(device["type"])) is not None else {}
    name = "engine" if role == "both" else role
    count = workers * replicas
    return {"name": name, "role": role, "replicas": count, "engine": engine, "step_time": step_time, "device": device}


def _same_engine(kinds: list[EngineKindSpec], tensor_parallel: int, gpus: int) -> EngineKindSpec | None:
    """The kind of engine with as many GPUs and this tensor parallelism, where there is exactly one."""
    sizes = [(kind.device.count, int((kind.step_time or {}).get("tensor_parallel", gpus))) for kind in kinds]
    alike = [
        kind for kind, size in zip(kinds, sizes, strict=True) if size == (gpus, tensor_parallel) and not kind.is_bundle
    ]
    return alike[0] if len(alike) == 1 else None
