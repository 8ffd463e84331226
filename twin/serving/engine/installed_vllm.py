"""The installed vLLM's own scheduler in a simulated engine (`engine.scheduler: installed-vllm`).

The class needs few of vLLM's settings, and none of a model's but its length limit. A whole `VllmConfig` inspects the
model's code in another process, which takes 40 s; here its sections keep their defaults, and its checks are not run.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from schedulers.engine_config import INSTALLED_VLLM, NULL_BLOCKS, EngineConfig
from schedulers.hosted_core import HostedCore, ScheduledRequest
from workloads.errors import BadInput, missing_extra
from workloads.request import Request

STOP_TOKEN = 1
"""The token that ends an answer before its limit."""

SHARED_TOKENS = 10
"""The first token id of shared prefixes; other tokens are negative."""

MAX_MODEL_LEN = 1 << 24
"""More tokens than any request has: lengths are limited by the workload."""


class InstalledScheduler:
    """`schedulers.engine_core.HostedScheduler` by vLLM's `Scheduler`, or its `AsyncScheduler`.

    Tokens are invented: those of a prefix id are the same in all requests, others in none.
    """

    def __init__(self, config: EngineConfig, async_scheduling: bool) -> None:
        core = "vllm.v1.core.sched.async_scheduler" if async_scheduling else "vllm.v1.core.sched.scheduler"
        kind = getattr(import_module(core), "AsyncScheduler" if async_scheduling else "Scheduler")
        grammars = SimpleNamespace(accept_tokens=lambda *_: True, should_advance=lambda *_: False, grammar_bitmask=None)
        settings, blocks = _vllm_config(config, async_scheduling), _kv_cache_config(config)
        self.scheduler: Any = kind(settings, blocks, grammars, config.block_size)
        self._hash_blocks = block_hasher(config.block_size) if config.enable_prefix_caching else None
        self._id_tokens = config.prefix_id_tokens
        self._prefixes: dict[str, tuple[int, ...]] = {}
        self._num_added = 0
        self._in_flight = deque[tuple[list[str], Any]]()  # requests that get a token, and vLLM's output
        self._make_output = import_module("vllm.v1.outputs").ModelRunnerOutput
        self._aborted = import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED

    def add(self, request: Request, max_tokens: int) -> None:
        self._num_added += 1
        self.scheduler.add_request(self._request(request, max_tokens))
        self._prefixes[str(request.id)] = request.prefix_blocks

    def schedule(self) -> tuple[list[int], list[ScheduledRequest]]:
        output, requests = self.scheduler.schedule(), self.scheduler.requests
        tokens = output.num_scheduled_tokens
        if tokens:
            self._in_flight.append(([id for id in tokens if not requests[id].is_prefill_chunk], output))
        computed = ((id, count, requests[id].num_computed_tokens - count) for id, count in tokens.items())
        scheduled = [ScheduledRequest(int(id), count, before) for id, count, before in computed]
        return sorted(int(id) for id in output.preempted_req_ids or ()), scheduled

    def end_step(self, stopped: set[int]) -> None:
        sampled, output = self._in_flight.popleft()
        requests, ids = self.scheduler.requests, list(output.num_scheduled_tokens)
        tokens: dict[str, list[int]] = {id: [] for id in ids}
        for id in sampled:
            if id in requests:
                position = requests[id].num_tokens
                tokens[id] = [STOP_TOKEN] if int(id) in stopped else self._tokens(int(id), position, position + 1)
        indices = {id: index for index, id in enumerate(ids)}
        sampled_tokens = [tokens[id] for id in ids]
        result = self._make_output(req_ids=ids, req_id_to_index=indices, sampled_token_ids=sampled_tokens)
        self.scheduler.update_from_output(output, result)
        for id in sampled:
            if id not in requests:
                self._prefixes.pop(id, None)

    def abort(self, request_id: int) -> None:
        self.scheduler.finish_requests(str(request_id), self._aborted)
        self._prefixes.pop(str(request_id))

    def cached_prefix_tokens(self, request: Request) -> int:
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(self._request(request, 1))[1])

    def num_free_blocks(self) -> int:
        """Blocks that requests can have."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.scheduler.requests)

    def _request(self, request: Request, max_tokens: int) -> Any:
        return import_module("vllm.v1.request").Request(
            request_id=str(request.id),
            prompt_token_ids=self._tokens(request.id, 0, request.prompt_tokens, request.prefix_blocks),
            sampling_params=import_module("vllm.sampling_params").SamplingParams(
                max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN], ignore_eos=True
            ),
            pooling_params=None,
            arrival_time=(request.arrival, self._num_added),  # vLLM compares them; its own clock knows no equal ones
            priority=request.priority,
            block_hasher=self._hash_blocks,
        )

    def _tokens(self, number: int, first: int, end: int, ids: tuple[int, ...] | None = None) -> list[int]:
        """Token ids of a request at the positions from `first` to before `end`."""
        ids, size = self._prefixes[str(number)] if ids is None else ids, self._id_tokens
        named = len(ids) * size
        shared = [SHARED_TOKENS + ids[at // size] * size + at % size for at in range(first, min(end, named))]
        return shared + [-(number << 32) - at - 2 for at in range(max(first, named), end)]


def installed_core(config: EngineConfig, async_scheduling: bool) -> HostedCore:
    """An engine's scheduler that is the installed vLLM's; `BadInput` if there is none."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        vllm_version()
    except ImportError as error:
        raise missing_extra("vllm", error, field="engine.scheduler", value=INSTALLED_VLLM) from None
    return HostedCore(config, InstalledScheduler(config, async_scheduling))


def vllm_version() -> str:
    return str(import_module("vllm").__version__)


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
    for name, value in limits.items():  # set one by one: an older version lacks some
        if name in names:
            setattr(scheduler_config, name, value)
        elif value not in (None, 0, 1):  # what means off
            expected = f"expected a setting that vLLM {vllm_version()} has"
            raise BadInput(expected, field=f"engine.{name}", value=value)
    scheduler_config.async_scheduling = async_scheduling
    vllm_config.scheduler_config = scheduler_config
    vllm_config.cache_config = settings.CacheConfig(
        block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    vllm_config.cache_config.num_gpu_blocks = config.num_gpu_blocks + NULL_BLOCKS
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
    return interface.KVCacheConfig(
        num_blocks=config.num_gpu_blocks + NULL_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]
    )
