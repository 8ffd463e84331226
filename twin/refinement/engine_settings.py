"""Settings of a real engine from the `meta.json` of a run: what vLLM was started with, by a scenario's field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedulers.vllm_versions import NULL_BLOCKS

ENGINE = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "num_gpu_blocks": "num_gpu_blocks",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "enable_prefix_caching": "enable_prefix_caching",
    "async_scheduling": "async_scheduling",
    "scheduling_policy": "scheduling_policy",
    "data_parallel_size": "data_parallel_size",
}
"""Fields of `engine` by vLLM's names. vLLM's `num_gpu_blocks` counts its placeholder block."""

STEP_TIME = {
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel",
    "enable_expert_parallel": "expert_parallel",
}
"""Fields of `step_time` by vLLM's names, for sources that have them."""

SECTIONS = ("engine_kwargs", "engine_args", "engine_effective", "cache_config")
"""Objects of `meta.json` that may hold them, beside the document itself; later ones count."""


def engine_settings(meta: Mapping[str, Any], document: Mapping[str, Any], step_time_fields: set[str]) -> dict[str, Any]:
    """Settings of a scenario, by dotted field, that `meta.json` has and `document` lacks or says otherwise."""
    settings: dict[str, Any] = {}
    for section in (meta, *(meta.get(name) or {} for name in SECTIONS)):
        if not isinstance(section, Mapping):
            continue
        for name, field in ENGINE.items():
            if _plain(section.get(name)):
                settings[f"engine.{field}"] = section[name]
                if field == "num_gpu_blocks" and isinstance(section[name], int):
                    settings["engine.num_gpu_blocks"] -= NULL_BLOCKS
        for name, field in STEP_TIME.items():
            if field in step_time_fields and _plain(section.get(name)):
                settings[f"step_time.{field}"] = section[name]
        share = section.get("gpu_memory_utilization")
        if isinstance(share, int | float) and isinstance((document.get("engine") or {}).get("kv_memory"), Mapping):
            settings["engine.kv_memory.gpu_memory_utilization"] = float(share)
    if "engine.num_gpu_blocks" in settings:
        settings.pop("engine.kv_memory.gpu_memory_utilization", None)
    defaults: dict[str, Any] = {
        "engine.data_parallel_size": 1,
        "step_time.data_parallel": 1,
        "step_time.expert_parallel": False,
    }
    defaults |= {"step_time.tensor_parallel": 1, "step_time.pipeline_parallel": 1, "engine.scheduling_policy": "fcfs"}
    return {field: value for field, value in settings.items() if _stated(document, field, defaults.get(field)) != value}


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str) and value != ""


def _stated(document: Mapping[str, Any], field: str, default: Any) -> Any:
    value: Any = document
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return default if value is None else value
