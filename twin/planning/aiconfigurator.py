"""The answer of AIConfigurator to the same question, as candidates of a plan.

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
from pathlib import Path
from typing import Any, Literal

from latency_models.io.files import Columns, builtin_name, builtin_names, read_columns
from scenarios.engine import EngineSpec
from scenarios.planning import EngineKindSpec
from twin.planning.given import given_candidate
from twin.planning.question import Question
from twin.planning.space import Candidate
from workloads.errors import BadInput

Document = dict[str, Any]

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
    replicas = _replicas(row, question)
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
        for candidate in (SYSTEMS.get(text, text), text.rpartition("/")[2]):  # the latter of a local path
            if builtin_name(kind, candidate) is not None:
                return candidate if kind == "models" else str(builtin_name(kind, candidate))
        expected = f"expected one of {', '.join(builtin_names(kind))}, or an engine of as many GPUs in plan.engines"
        raise self.fault(expected, name)

    def mixes_experts(self, prefix: str) -> bool:
        """True if each expert is split over some devices, and the experts are spread over several such groups."""
        return min(self.integer(f"{prefix}{name}", 1) for name in ("moe_tp", "moe_ep")) > 1

    def fault(self, expected: str, name: str) -> BadInput:
        """The error about a column of this row."""
        return self.table.fault(expected, self.index, name)


def _replicas(row: Row, question: Question) -> int:
    """Replicas that bear the question's rate, as AIConfigurator counts them; 1 where there is no rate."""
    return 1 if question.rate is None else math.ceil(question.rate / row.number("seq/s") - 1e-9)


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
    kinds_alike = [
        kind
        for kind in kinds
        if kind.device.count == gpus
        and not kind.is_bundle
        and int((kind.step_time or {}).get("tensor_parallel", gpus)) == tensor_parallel
    ]
    return kinds_alike[0] if len(kinds_alike) == 1 else None
