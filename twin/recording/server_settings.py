"""A live server's own account of itself: engine, version, model, device and settings, by vLLM's names.

vLLM says most at `/server_info`, which it has in development mode (`VLLM_SERVER_DEV_MODE=1`); its metrics page has the
KV cache's settings. SGLang says all at `/server_info`, which earlier versions call `/get_server_info`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from latency_models.io.files import builtin_name
from schedulers.engine_config import NULL_BLOCKS
from twin.recording.scrapes import RUNNING, WAITING, Scrape
from twin.recording.upstream import Upstream, cache_settings, model_cards
from workloads.errors import BadInput

Engine = Literal["vLLM", "SGLang", "serving-twin"]

OWNERS: dict[str, Engine] = {"sglang": "SGLang", "serving-twin": "serving-twin"}
"""Engines by what `/v1/models` says of the owner; others have vLLM's pages."""

SGLANG = {
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "kv_cache_dtype": "cache_dtype",
    "quantization": "quantization",
}
"""vLLM's names of SGLang's settings."""

SECTIONS = ("model_config", "cache_config", "parallel_config", "scheduler_config")
"""Sections of vLLM's configuration whose fields are settings here."""


SECONDS = 60.0
"""Time limit for a page: vLLM collects its environment when `/server_info` is asked for, by programs that it runs."""


@dataclass(frozen=True)
class LiveServer:
    """What a server says of itself; "" where it does not publish `device` or `gpu` (by its name in the catalogue).

    `model`: its name for clients. `weights`: a repository or folder. `settings`: of the engine, by vLLM's names.
    """

    engine: Engine
    version: str
    model: str
    weights: str
    max_model_len: int | None
    device: str = ""
    gpu: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    page: Scrape | None = None

    @property
    def busy(self) -> int:
        """Requests that run or wait, by the metrics page."""
        return 0 if self.page is None else round(sum(self.page.values.get(name, 0.0) for name in (RUNNING, WAITING)))


def read_server(server: Upstream, headers: dict[str, str], model: str | None = None) -> LiveServer:
    """Ask a server for its models, settings and metrics; `BadInput` without it or without one model to take."""
    card = _card(server, headers, model)
    try:
        page = Scrape.of(Path("/metrics"), time.time(), server.get("/metrics", headers))
    except OSError:
        page = None
    engine = OWNERS.get(str(card.get("owned_by")), "vLLM")
    if engine == "SGLang":
        info = _json(server, "/server_info", headers) or _json(server, "/get_server_info", headers)
        return _sglang(card, info, page)
    info = _json(server, "/server_info?config_format=json", headers)
    config = info.get("vllm_config")
    settings = {} if page is None else dict(cache_settings(page.text))
    device = ""
    if isinstance(config, dict):
        settings = {key: value for name in SECTIONS for key, value in (config.get(name) or {}).items()}
        settings["scheduling_policy"] = settings.get("policy")
        device = str((config.get("device_config") or {}).get("device", ""))
    return LiveServer(
        engine,
        version=str(_json(server, "/version", headers).get("version", "")),
        model=str(card["id"]),
        weights=str(card.get("root") or card["id"]),
        max_model_len=card.get("max_model_len"),
        device=device,
        gpu=gpu_name(str((info.get("system_env") or {}).get("nvidia_gpu_models") or "")),
        settings={name: value for name, value in settings.items() if value is not None},
        page=page,
    )


def _sglang(card: Mapping[str, Any], info: Mapping[str, Any], page: Scrape | None) -> LiveServer:
    settings = {name: info[theirs] for theirs, name in SGLANG.items() if info.get(theirs) is not None}
    states = info.get("internal_states") or [{}]
    if (running := states[0].get("effective_max_running_requests_per_dp")) is not None:
        settings["max_num_seqs"] = running
    if (tokens := info.get("max_total_num_tokens")) is not None:
        settings["num_gpu_blocks"] = tokens // settings.get("block_size", 1) + NULL_BLOCKS
    settings |= {
        "enable_prefix_caching": not info.get("disable_radix_cache", False),
        "async_scheduling": not info.get("disable_overlap_schedule", False),
        "enable_expert_parallel": info.get("ep_size", 1) > 1,
    }
    return LiveServer(
        "SGLang", str(info.get("version", "")), str(card["id"]), str(info.get("model_path") or card["id"]),
        card.get("max_model_len") or info.get("context_length"), str(info.get("device") or ""), "", settings, page,
    )  # fmt: skip


def gpu_name(text: str) -> str:
    """The device of the hardware catalogue that a driver's name has in it (`NVIDIA H100 80GB HBM3`); "" for none."""
    words = re.findall(r"\b[a-z]+\d+[a-z]*\b", text.lower())
    return next((name for word in words if (name := builtin_name("hardware", word))), "")


def _card(server: Upstream, headers: dict[str, str], model: str | None) -> Mapping[str, Any]:
    """The entry of `/v1/models` of a model."""
    cards = model_cards(server, headers, "URL")
    bases = [card for card in cards if not card.get("parent")]  # others are its adapters
    if model is None and len(bases) == 1:
        return bases[0]
    names = [card["id"] for card in cards]
    if (model or "") not in names and (model or len(names) != 1):
        offered = ", ".join(names) or "none: the server offers none"
        raise BadInput(f"expected one of {offered}", field="--model", value=model)
    return cards[names.index(model) if model else 0]


def _json(server: Upstream, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """A JSON object of the server; empty where it has no such page."""
    try:
        document = json.loads(server.get(path, headers, SECONDS))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
