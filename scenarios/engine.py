"""Engines, pools of them, and the routers before them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict, late_section, late_sections
from latency_models.sources.registry import StepTimeSpec
from latency_models.step_time import StepTime
from scenarios import fields
from schedulers.engine_config import (
    INSTALLED_VLLM,
    MOST_UNSEEN_STEPS,
    CacheBlocksOn,
    EngineConfig,
    KVReservation,
    OneShotBudget,
    with_preset,
)
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import KVCache
from schedulers.model_slots import SlotsConfig
from schedulers.parallel_cores import PipelinedEngineCore
from schedulers.routing import ROUTERS, Draw, Router
from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES
from schedulers.speculation import SpeculativeEngineCore
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.stages import Stages
    from scenarios.memory import KVMemorySpec, KVOffloadingSpec, LoRASpec, WeightSwappingSpec
    from scenarios.overload import AdmissionControlSpec
    from scenarios.steps import ChunkingSpec, PipelineSpec, SpeculativeSpec
else:
    AdmissionControlSpec = late_section("scenarios.overload", "AdmissionControlSpec")
    ChunkingSpec, PipelineSpec, SpeculativeSpec = late_sections(
        "scenarios.steps", "ChunkingSpec", "PipelineSpec", "SpeculativeSpec"
    )
    KVMemorySpec, KVOffloadingSpec = late_sections("scenarios.memory", "KVMemorySpec", "KVOffloadingSpec")
    LoRASpec, WeightSwappingSpec = late_sections("scenarios.memory", "LoRASpec", "WeightSwappingSpec")


class SchedulingSpec(fields.PolicySpec):
    """A scheduling policy with parameters: service of a token and weights of tenants (fair)."""

    policy: Annotated[str, fields.registered(SCHEDULING_POLICIES)]
    prompt_weight: PositiveFloat | None = None
    output_weight: PositiveFloat | None = None
    weights: dict[str, PositiveFloat] | None = None


Scheduling = Annotated[str | SchedulingSpec, fields.name_or_section(SCHEDULING_POLICIES)]
"""The name of a scheduling policy, or a section with its name and parameters."""


ONE_STAGE = "expected 1: a live engine has all layers on one device"


BEYOND_VLLM = (
    "max_table_blocks", "cache_blocks_on", "in_batch_prefix_caching", "preemption_policy", "kv_reservation",
    "data_parallel_size", "pipeline_parallel_size", "chunking", "one_shot", "speculative_config", "kv_offloading",
    "lora_config", "weight_swapping", "admission_control", "enable_mixed_chunk", "max_prefill_tokens",
    "prefill_max_requests", "scheduler_recv_interval", "chunk_unit_size", "context_chunking_policy",
    "capacity_scheduler_policy", "batch_wait_timeout_iters",
)  # fmt: skip
"""Fields that `installed-vllm` must leave at their defaults: vLLM, or its scheduler alone, lacks them."""


class OneShotSpec(Strict):
    """Budgets of one-shot work a step (Prelude 3): prompt tokens, prompts, and bytes of activations (default: any)."""

    tokens: fields.StepTokens = 8192
    sequences: fields.Sequences = 256
    activation_bytes: PositiveFloat | None = None
    bytes_per_token: NonNegativeFloat = 0.0


@dataclasses.dataclass(frozen=True)
class SchedulerPlan:
    """The plan from which both backends build an engine's scheduler.

    `step_time`: the model whose table the chunk policy may use. `depth`: steps that may be under way at a time: 2 with
    async scheduling, one a stage of a pipeline, each of which has a batch of its own, else 1.
    """

    config: EngineConfig
    chunking: ChunkingSpec | None = None
    step_time: StepTime | None = None
    depth: int = 1
    speculation: SpeculativeSpec | None = None
    stages: Stages | None = None

    def chunk_policy(self) -> ChunkPolicy | None:
        """A new chunk policy: each engine has its own."""
        return self.chunking.build(self.step_time) if self.chunking else None

    def make_core(self, make_cache: type[KVCache] = KVCache) -> EngineCore:
        """A new scheduler; `BadInput` for vLLM's own, which only the simulator runs."""
        if self.config.scheduler == INSTALLED_VLLM:
            expected = "expected rules of a version: only the simulator runs vLLM's own scheduler"
            raise BadInput(expected, field="engine.scheduler", value=INSTALLED_VLLM)
        if self.stages is not None:
            return PipelinedEngineCore(self.config, len(self.stages.layers), self.chunk_policy(), make_cache)
        if self.speculation is None:
            return EngineCore(self.config, self.chunk_policy(), make_cache)
        drafts, max_tokens = self.speculation.policy(self.step_time), self.speculation.num_speculative_tokens
        return SpeculativeEngineCore(self.config, drafts, max_tokens, self.chunk_policy(), make_cache)


class EngineSpec(Strict):
    """One engine; names and defaults are vLLM's. `schedulers.engine_config` explains fields of the scheduler.

    docs/reference/serving-scenario.md describes every field.
    """

    num_gpu_blocks: fields.KVBlocks | None = None
    kv_memory: KVMemorySpec | None = None
    block_size: fields.BlockTokens = 16
    max_num_batched_tokens: fields.StepTokens = 2048
    max_num_seqs: fields.Sequences = 128
    max_table_blocks: int = Field(default=0, ge=0)
    enable_prefix_caching: bool = True
    cache_blocks_on: CacheBlocksOn = "scheduled"
    in_batch_prefix_caching: bool = False
    scheduling_policy: Scheduling = "fcfs"
    preemption_policy: Annotated[str, fields.registered(PREEMPTION_POLICIES)] | None = None
    kv_reservation: KVReservation = "chunk"
    scheduler_reserve_full_isl: bool = True
    watermark: float = Field(default=0.0, ge=0.0, lt=1.0)
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    max_num_active_seqs: int = Field(default=0, ge=0)
    prefill_schedule_interval: int = Field(default=1, ge=1)
    enable_mixed_chunk: bool = True
    max_prefill_tokens: int = Field(default=0, ge=0)
    prefill_max_requests: int = Field(default=0, ge=0)
    scheduler_recv_interval: int = Field(default=1, ge=1, le=MOST_UNSEEN_STEPS)
    chunk_unit_size: int = Field(default=1, ge=1)
    context_chunking_policy: Literal["first_come_first_served", "equal_progress"] | None = None
    capacity_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict", "static_batch", "new_token_ratio"] = (
        "max_utilization"
    )
    schedule_conservativeness: NonNegativeFloat = 1.0
    attention_dp_timeout_iters: int = Field(default=0, ge=0)
    attention_dp_batching_wait_iters: int = Field(default=0, ge=0)
    batch_wait_timeout_iters: int = Field(default=0, ge=0)
    batch_wait_max_tokens_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    scheduler: Literal["vllm-0.19", "vllm-0.32", "vllm-0.33", "sglang", "tensorrt-llm", "installed-vllm"] = "vllm-0.33"
    data_parallel_size: fields.Engines = 1
    pipeline_parallel_size: fields.PipelineStages = 1
    pipeline: PipelineSpec | None = None
    async_scheduling: bool = False
    chunking: ChunkingSpec | None = None
    one_shot: OneShotSpec | None = None
    speculative_config: SpeculativeSpec | None = None
    kv_offloading: KVOffloadingSpec | None = None
    lora_config: LoRASpec | None = None
    weight_swapping: WeightSwappingSpec | None = None
    admission_control: AdmissionControlSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, stated: Any) -> Any:
        return with_preset(stated) if isinstance(stated, dict) else stated

    @model_validator(mode="after")
    def _features_agree(self) -> EngineSpec:
        slots = [name for name in ("lora_config", "weight_swapping") if getattr(self, name) is not None]
        name, ranks, stages = slots[0] if slots else "", self.data_parallel_size, self.pipeline_parallel_size
        drafts = self.speculative_config
        not_piped = {
            field: value if isinstance(value, int) else "a section"
            for field in ("async_scheduling", "speculative_config", "kv_offloading", "max_table_blocks")
            if (value := getattr(self, field))
        }
        shares_parts = self.context_chunking_policy and self.enable_chunked_prefill
        vllm_order = self.enable_mixed_chunk and not (shares_parts or self.batch_wait_timeout_iters)
        refusals = [
            (len(slots) > 1, "either lora_config or weight_swapping"),
            (self.kv_offloading and not self.enable_prefix_caching,
             "enable_prefix_caching true with kv_offloading, since prefixes are what tiers keep"),
            (not vllm_order and (drafts or stages > 1),
             "enable_mixed_chunk true and no context_chunking_policy or batch_wait_timeout_iters with "
             "speculative_config or stages"),
            (self.batch_wait_timeout_iters and ranks > 1,
             "batch_wait_timeout_iters 0 with data_parallel_size, whose ranks have attention_dp_timeout_iters"),
            (self.attention_dp_timeout_iters and ranks == 1,
             "attention_dp_timeout_iters 0 without data_parallel_size: there are no ranks to wait for"),
            (self.chunking and self.chunk_unit_size > 1, "chunk_unit_size 1 with chunking, which has a granularity"),
            (slots and ranks > 1, f"data_parallel_size 1 with {name}: ranks load models for themselves"),
            (slots and stages > 1, f"pipeline_parallel_size 1 with {name}: steps of several stages overlap"),
            (drafts and self.async_scheduling,
             "async_scheduling false with speculative_config: a step's outputs size the next"),
            (drafts and ranks > 1, "data_parallel_size 1 with speculative_config: ranks draft for themselves"),
            (stages == 1 and self.pipeline, "no pipeline with pipeline_parallel_size 1"),
            *(
                (stages > 1, f"no {field} with pipeline_parallel_size above 1, found {value}")
                for field, value in not_piped.items()
            ),
            (stages > 1 and ranks > 1, "data_parallel_size 1 with pipeline_parallel_size above 1"),
            (self.num_gpu_blocks is not None and self.kv_memory, "either num_gpu_blocks or kv_memory"),
        ]  # fmt: skip
        for is_refused, expected in refusals:
            if is_refused:
                raise ValueError(f"expected {expected}")
        return self

    @model_validator(mode="after")
    def _vllm_has_it(self) -> EngineSpec:
        if self.scheduler == INSTALLED_VLLM:
            for name in BEYOND_VLLM:
                if getattr(self, name) != EngineSpec.model_fields[name].default:
                    raise ValueError(f"expected no {name} with scheduler {INSTALLED_VLLM}")
            if self.scheduling_policy not in ("fcfs", "priority"):
                raise ValueError(f"expected scheduling_policy fcfs or priority with scheduler {INSTALLED_VLLM}")
        return self

    @property
    def needs_step_time(self) -> bool:
        """True if the scheduler depends on the step times: on a chunk policy's table, or for its memory."""
        speculates = self.speculative_config
        return (
            bool(self.chunking)
            or self.pipeline_parallel_size > 1
            or bool(speculates and speculates.drafts.policy == "goodput")
            or bool(self.weight_swapping)
            or (self.num_gpu_blocks is None and (self.kv_memory is None or self.kv_memory.memory is None))
        )

    def _slots(self, base: Path, step_time: StepTime | None) -> tuple[SlotsConfig | None, float]:
        """The slots of models, and the bytes of a device that they take beside one model's weights."""
        lora, swapping, memory = self.lora_config, self.weight_swapping, self.kv_memory
        computed = self.num_gpu_blocks is None
        if lora is not None:
            size = lora.bytes_of_adapter(memory, base, step_time) if computed else 0.0
            return lora.slots(), lora.max_loras * size
        if swapping is not None:
            slots = swapping.slots(memory, base, step_time)
            size = swapping.bytes_of_model(memory, base, step_time) if computed else 0.0
            return slots, (slots.slots - 1) * size
        return None, 0.0

    def with_models(self, step_time: StepTime, base: Path) -> StepTime:
        """Step times with those of adapters and loads, if the engine keeps models in slots."""
        if self.lora_config is not None:
            return self.lora_config.with_adapters(step_time, self.kv_memory, base)
        if self.weight_swapping is not None:
            return self.weight_swapping.with_loads(step_time, self.kv_memory, base)
        return step_time

    def build(
        self, base: Path, prefix_id_tokens: int | None = None, step_time: StepTime | None = None
    ) -> SchedulerPlan:
        """The plan of the engine's scheduler; `prefix_id_tokens`: prompt tokens of one prefix id, None: a block's."""
        blocks = self.num_gpu_blocks
        slots, reserved = self._slots(base, step_time)
        if blocks is None:
            from scenarios.memory import KVMemorySpec

            memory = self.kv_memory or KVMemorySpec()
            mtp = self.speculative_config is not None and self.speculative_config.method == "mtp"
            blocks = memory.blocks(self.block_size, base, step_time, self.max_num_seqs, reserved, mtp=mtp)
        of_scheduler = {field.name for field in dataclasses.fields(EngineConfig)} - {
            "num_gpu_blocks", "one_shot", "kv_offloading", "model_slots", "admission_control",
        }  # fmt: skip
        settings = {name: value for name, value in self if name in of_scheduler}
        settings["scheduling_policy"], settings["scheduling_parameters"] = fields.named(self.scheduling_policy)
        try:
            one_shot = OneShotBudget(**self.one_shot.model_dump(exclude_none=True)) if self.one_shot else None
            ids = prefix_id_tokens or self.block_size
            offloading = self.kv_offloading.build(ids) if self.kv_offloading else None
            config = EngineConfig(
                num_gpu_blocks=blocks, prefix_id_tokens=ids, one_shot=one_shot, kv_offloading=offloading,
                admission_control=self.admission_control.build() if self.admission_control else None,
                model_slots=slots, **settings,
            )  # fmt: skip
        except ValueError as error:
            raise BadInput(str(error), field="engine") from None
        stages = None
        if self.pipeline_parallel_size > 1:
            from scenarios.steps import PipelineSpec

            section = self.pipeline or PipelineSpec()
            if section.layers is not None and self.num_gpu_blocks is None:
                expected = "expected num_gpu_blocks beside it: the memory of step times is that of vLLM's own division"
                raise BadInput(expected, field="engine.pipeline.layers", value=section.layers)
            stages = section.build(self.pipeline_parallel_size, step_time)
        depth = 2 if self.async_scheduling else self.pipeline_parallel_size
        plan = SchedulerPlan(config, self.chunking, step_time, depth, self.speculative_config, stages)
        plan.chunk_policy()  # whose parameters may be refused
        if self.speculative_config is not None:
            self.speculative_config.policy(step_time)
        return plan


RouterName = Annotated[str, fields.registered(ROUTERS)]


class RouterSpec(fields.PolicySpec):
    """A router with parameters, which docs/reference/serving-scenario.md describes."""

    policy: RouterName
    weight: NonNegativeFloat | None = None
    load_factor: Annotated[float, Field(ge=1)] | None = None
    virtual_nodes: fields.VirtualNodes | None = None
    max_sessions: PositiveInt | None = None


Routing = Annotated[str | RouterSpec, fields.name_or_section(ROUTERS, lambda size: 0)]
"""The name of a router, or a section with its name and parameters."""


class KVEventsSpec(Strict):
    """Routers know of prefix caches by events, which take `delay` seconds (vLLM's `kv_events_config`)."""

    delay: NonNegativeFloat = 0.0


def make_router(routing: str | RouterSpec, draw: Draw) -> Router:
    return fields.make_policy(ROUTERS, *fields.named(routing), draw, field="system.routing")


def router_name(routing: str | RouterSpec) -> str:
    """The name of a router that is given with or without parameters."""
    return fields.named(routing)[0]


Role = Literal["both", "prefill", "decode"]
Serves = Literal["each", "all"]


class DeviceSpec(Strict):
    """The devices of one engine of a pool: the price of each per hour, in any currency, and its power, watts."""

    type: str
    count: PositiveInt = 1
    price_per_hour: NonNegativeFloat | None = None
    power_limit: PositiveFloat | None = None
    idle_power: NonNegativeFloat | None = None


class LinkSpec(Strict):
    """The link that KV caches cross between prefill and decode: bytes/s, seconds, bytes of cache a token.

    `shared`: one link for all prefill engines. `transfer`: a cache leaves when its prompt has been computed, or with
    each chunk, into blocks that the decode engine reserves when the first begins.
    """

    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    bytes_per_token: NonNegativeFloat
    shared: bool = False
    transfer: Literal["after_prefill", "with_chunks"] = "after_prefill"


class PoolSpec(Strict):
    """Engines that are alike; docs/reference/serving-scenario.md describes every field."""

    name: fields.Name
    role: Role = "both"
    replicas: fields.Engines = 1
    models: Serves | Annotated[list[str], Field(min_length=1)] = "each"
    engine: EngineSpec
    step_time: StepTimeSpec
    device: DeviceSpec | None = None
    speed: PositiveFloat | None = None
    engines_per_device: PositiveInt = 1

    def engine_names(self, models: list[str]) -> dict[str, list[str]]:
        """Names of the engines that serve each of the scenario's `models`, for those that it serves."""

        def numbered(prefix: str) -> list[str]:
            return [f"{prefix}{self.name}-{i}" for i in range(self.replicas)]

        if self.models == "each" and len(models) > 1:
            return {model: numbered(f"{model}/") for model in models}
        served = self.models if isinstance(self.models, list) else models
        return dict.fromkeys(served, numbered(""))

    def num_engines(self, models: int) -> int:
        """Number of engines in a scenario of `models` models."""
        return self.replicas * (models if self.models == "each" else 1)


def fill_pools(document: Any) -> Any:
    """Fill a document's pools: missing settings are the scenario's; KV memory in either form replaces both."""
    system = document.get("system") if isinstance(document, dict) else None
    if not isinstance(system, dict) or not isinstance(pools := system.get("pools"), list):
        return document
    common = {name: document[name] for name in ("engine", "step_time") if name in document}
    filled = [_filled(pool, common) if isinstance(pool, dict) else pool for pool in pools]
    return {**document, "system": {**system, "pools": filled}}


def _filled(pool: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    filled = {**common, **pool}
    settings, inherited = pool.get("engine"), common.get("engine")
    if isinstance(settings, dict) and isinstance(inherited, dict):
        memory = {"num_gpu_blocks", "kv_memory"}
        dropped = memory if memory & {name for name, value in settings.items() if value is not None} else set()
        filled["engine"] = {name: value for name, value in inherited.items() if name not in dropped} | settings
    return filled
