"""Constructs vLLM's scheduler and its requests from the twin's own settings.

The class needs few of vLLM's settings, and none of a model's but its length limit. A whole `VllmConfig` inspects the
model's code in another process, which takes 40 s; here its sections keep their defaults, and its checks are not run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from schedulers.engine_config import EngineConfig

STOP_TOKEN = 1
"""The token that ends an answer before its limit."""

MAX_MODEL_LEN = 1 << 24
"""More tokens than any request has: lengths are limited by the workload."""


def vllm_version() -> str:
    """The version of the installed vLLM."""
    return str(import_module("vllm").__version__)


def make_scheduler(config: EngineConfig, async_scheduling: bool) -> Any:
    """A scheduler of the installed vLLM with an engine's settings."""
    core = "vllm.v1.core.sched.async_scheduler" if async_scheduling else "vllm.v1.core.sched.scheduler"
    scheduler = getattr(import_module(core), "AsyncScheduler" if async_scheduling else "Scheduler")
    grammars = SimpleNamespace(accept_tokens=_accept, should_advance=_refuse, grammar_bitmask=None)
    return scheduler(_vllm_config(config, async_scheduling), _kv_cache_config(config), grammars, config.block_size)


def make_request(
    request_id: int,
    prompt: list[int],
    max_tokens: int,
    *,
    arrival: float,
    priority: int,
    hash_blocks: Callable[[Any], list[Any]] | None,
) -> Any:
    """A request of the installed vLLM. `hash_blocks`: see `block_hasher`."""
    params = import_module("vllm.sampling_params").SamplingParams(
        max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN], ignore_eos=True
    )
    return import_module("vllm.v1.request").Request(
        request_id=str(request_id),
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival,
        priority=priority,
        block_hasher=hash_blocks,
    )


@cache
def block_hasher(block_size: int) -> Callable[[Any], list[Any]]:
    """Names the content of a request's full blocks, as vLLM's prefix cache wants it."""
    utils = import_module("vllm.v1.core.kv_cache_utils")
    sha256 = import_module("vllm.utils.hashing").sha256
    utils.init_none_hash(sha256)
    hasher: Callable[[Any], list[Any]] = utils.get_request_block_hasher(block_size, sha256)
    return hasher


def _vllm_config(config: EngineConfig, async_scheduling: bool) -> Any:
    """The sections of vLLM's settings that its scheduler reads."""
    settings = import_module("vllm.config")
    vllm_config = _default_config()
    limits: dict[str, Any] = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_seqs": config.max_num_seqs,
        "policy": "priority" if config.scheduling_policy == "priority" else "fcfs",
        "scheduler_reserve_full_isl": config.scheduler_reserve_full_isl,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "watermark": config.watermark,
        "max_num_active_seqs": config.max_num_active_seqs or None,
        "prefill_schedule_interval": config.prefill_schedule_interval,
    }
    names = {field.name for field in dataclasses.fields(settings.SchedulerConfig)}
    scheduler_config = settings.SchedulerConfig(max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False)
    for name in names & limits.keys():  # set one by one: an older version lacks some
        setattr(scheduler_config, name, limits[name])
    scheduler_config.async_scheduling = async_scheduling
    vllm_config.scheduler_config = scheduler_config
    vllm_config.cache_config = settings.CacheConfig(
        block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    vllm_config.cache_config.num_gpu_blocks = config.num_gpu_blocks + 1
    return vllm_config


def _default_config() -> Any:
    """A `VllmConfig` whose sections have their defaults, made without its checks of model and device."""
    kind = import_module("vllm.config").VllmConfig
    vllm_config = object.__new__(kind)
    for field in dataclasses.fields(kind):
        default: Any = field.default
        factory: Any = field.default_factory
        if hasattr(default, "get_default"):  # pydantic's
            try:
                default = default.get_default(call_default_factory=True)
            except RuntimeError:  # the device's section looks for one
                default = None
        elif default is dataclasses.MISSING:
            default = None if factory is dataclasses.MISSING else factory()
        object.__setattr__(vllm_config, field.name, default)
    vllm_config.model_config = SimpleNamespace(
        max_model_len=MAX_MODEL_LEN, runner_type="generate", is_encoder_decoder=False, is_diffusion=False,
        is_multimodal_model=False, supports_multimodal_inputs=False, multimodal_config=None, uses_mrope=False,
        is_hybrid=False, is_moe=False, return_sampling_mask=False, enable_return_routed_experts=False,
        hf_config=SimpleNamespace(),
    )  # fmt: skip
    return vllm_config


def _kv_cache_config(config: EngineConfig) -> Any:
    """The blocks of one group of layers with full attention, and vLLM's placeholder block besides."""
    interface = import_module("vllm.v1.kv_cache_interface")
    dtype = import_module("torch").float16
    spec = interface.FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=1, dtype=dtype)
    group = interface.KVCacheGroupSpec(["layer"], spec)
    return interface.KVCacheConfig(num_blocks=config.num_gpu_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[group])


def _accept(*_: Any) -> bool:
    """Accept tokens: no request has a grammar."""
    return True


def _refuse(*_: Any) -> bool:
    """Advance no grammar."""
    return False
