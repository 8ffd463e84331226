"""Settings of one engine: vLLM V1's names and defaults where vLLM has the setting, and the rules of other schedulers.

SGLang 0.5.9 `server_args.py`: prompts before decodes, chunks of 8,192 tokens (80 GB of memory), at most 16,384 prompt
tokens a step, pages of one token, and the overlap scheduler. TensorRT-LLM 1.3 `llmapi/llm_args.py`: blocks of 32
tokens, 8,192 tokens a step, whole prompts, no eviction of what runs, and the overlap scheduler. A scenario may state
other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from schedulers import fair_sharing  # noqa: F401  # which registers its policy
from schedulers.admission_control import AdmissionLimits
from schedulers.model_slots import SlotsConfig
from schedulers.prefill_policies import CAPACITY_POLICIES, CHUNKING_POLICIES, MAX_UTILIZATION
from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """Rules in which schedulers differ that are no settings of theirs.

    Attributes:
        reuse_unhashed_first: freed blocks that no prompt can find are allocated before all others.
        goes_on_behind_preempted: when the sequence whose turn it is preempts itself for its low priority, those behind
            it are scheduled all the same.
        lone_prompt_ignores_threshold: `long_prefill_token_threshold` does not hold for the only request.
        steps_back_for_idle: when a sequence is preempted before the one whose turn it is, that one keeps its turn even
            if the preempted one was not scheduled in this step; otherwise its turn passes.
        keeps_preempted_blocks: what a preempted sequence has computed beside its shared prompt can be found again.
        requeues_behind: a preempted sequence waits behind those that came meanwhile.
        merges_equal_blocks: of equal blocks that two sequences have computed, one is freed at once.
        full_until_smaller: a batch without room is full until it is smaller (`schedulers.prefill_policies.FullBatch`).
    """

    reuse_unhashed_first: bool = True
    goes_on_behind_preempted: bool = True
    lone_prompt_ignores_threshold: bool = True
    steps_back_for_idle: bool = True
    keeps_preempted_blocks: bool = True
    requeues_behind: bool = False
    merges_equal_blocks: bool = False
    full_until_smaller: bool = False


SCHEDULER_VERSIONS: Final = {
    "vllm-0.19": SchedulerRules(False, False, False, False),
    "vllm-0.32": SchedulerRules(goes_on_behind_preempted=False),
    "vllm-0.33": SchedulerRules(),
}
"""Versions whose decisions `EngineCore` repeats step by step (`tests/vllm_parity/`)."""

NULL_BLOCKS: Final = 1
"""Blocks in vLLM's own `num_gpu_blocks` that no request gets: its placeholder."""

INSTALLED_VLLM: Final = "installed-vllm"
"""In place of a version: the simulator runs the scheduler of the vLLM in its environment (`HostedCore`)."""

DEFAULT_SCHEDULER: Final = "vllm-0.33"

SCHEDULERS: Final = SCHEDULER_VERSIONS | {
    "sglang": SchedulerRules(
        keeps_preempted_blocks=False, requeues_behind=True, merges_equal_blocks=True, full_until_smaller=True
    ),
    "tensorrt-llm": SchedulerRules(),
}
"""All schedulers by name; `PRESETS` has the settings with which those other than vLLM's come."""


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "sglang": {
        "block_size": 1,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 2048,
        "max_prefill_tokens": 16384,
        "enable_mixed_chunk": False,
        "cache_blocks_on": "computed",
        "preemption_policy": "fewest_outputs",
        "capacity_scheduler_policy": "new_token_ratio",
        "async_scheduling": True,
    },
    "tensorrt-llm": {
        "block_size": 32,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 2048,
        "enable_chunked_prefill": False,
        "context_chunking_policy": "first_come_first_served",
        "cache_blocks_on": "computed",
        "in_batch_prefix_caching": True,
        "kv_reservation": "prompt",
        "capacity_scheduler_policy": "guaranteed_no_evict",
        "async_scheduling": True,
    },
}

NOT_OVERLAPPED: Final = ("speculative_config", "pipeline_parallel_size")
"""Settings with which steps are not scheduled ahead."""


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stated settings of an engine, and those with which its scheduler comes."""
    preset = dict(PRESETS.get(str(settings.get("scheduler")), {}))
    if not preset:
        return dict(settings)
    if any(name in settings for name in NOT_OVERLAPPED):
        del preset["async_scheduling"]
    merged = preset | dict(settings)
    return {"chunk_unit_size": merged["block_size"]} | merged


KVReservation = Literal["chunk", "prompt", "max_tokens"]
"""Blocks allocated at admission: for the first chunk, for the prompt, or for the prompt and `max_tokens` of output."""

MOST_UNSEEN_STEPS = 1000
"""Steps of decodes that a step of prompts counts as where `scheduler_recv_interval` counts."""

CacheBlocksOn = Literal["scheduled", "computed"]
"""When a prompt block enters the prefix cache: when its step is scheduled (vLLM), or when it is computed (Prelude)."""


@dataclass(frozen=True, slots=True)
class OneShotBudget:
    """Limits of one-shot work in a step (Prelude 3). One-shot work holds no decode slot, and no cache after the step.

    `tokens`, `sequences`: prompt tokens and prompts. `activation_bytes`: temporary memory, of which each prompt token
    takes `bytes_per_token`. Raises ValueError for limits under which no prompt could ever run.
    """

    tokens: int = 8192
    sequences: int = 256
    activation_bytes: float = float("inf")
    bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"one_shot.{name}: expected at least 1, found {getattr(self, name)}")
        if self.bytes_per_token < 0:
            raise ValueError(f"one_shot.bytes_per_token: expected 0 or more, found {self.bytes_per_token}")
        if self.max_step_tokens() < 1:
            raise ValueError(
                f"one_shot.activation_bytes: expected room for a token, which takes bytes_per_token "
                f"({self.bytes_per_token:g}), found {self.activation_bytes:g}"
            )

    def max_step_tokens(self) -> int:
        """Prompt tokens a step."""
        if not self.bytes_per_token:
            return self.tokens
        return int(min(self.tokens, self.activation_bytes // self.bytes_per_token))


WritePolicy = Literal["write_through", "write_back"]
"""When a block is copied to the first tier: when it is computed, or when the device evicts it (SGLang's terms)."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One tier below the device: its name, its capacity in ids of prefixes, and its eviction policy."""

    name: str
    capacity: int
    eviction: str = "lru"

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"kv_offloading.{self.name}.capacity: expected room for a prefix id, found none")


@dataclass(frozen=True, slots=True)
class KVOffloading:
    """Tiers below the device's KV cache, nearest first (`schedulers.kv_tiers`).

    `attention_tokens`: context at which a token costs twice as much as without any, for cost-aware eviction.
    """

    tiers: tuple[TierConfig, ...]
    write_policy: WritePolicy = "write_through"
    attention_tokens: float = 32768.0


LEAST: Final = {
    "num_gpu_blocks": 1, "block_size": 1, "max_num_batched_tokens": 1, "max_num_seqs": 1, "prefix_id_tokens": 1,
    "long_prefill_token_threshold": 0, "max_num_active_seqs": 0, "prefill_schedule_interval": 1,
    "max_prefill_tokens": 0, "prefill_max_requests": 0, "chunk_unit_size": 1, "schedule_conservativeness": 0,
    "attention_dp_timeout_iters": 0, "attention_dp_batching_wait_iters": 0, "scheduler_recv_interval": 1,
    "batch_wait_timeout_iters": 0,
}  # fmt: skip
"""The least values of settings."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. docs/reference/serving-scenario.md describes those that a scenario has.

    Attributes:
        prefix_id_tokens: prompt tokens that one id of a request's `prefix_blocks` stands for, a multiple of
            `block_size`.
        preemption_policy: None: lowest_priority under the scheduling policy priority, else newest.
        context_chunking_policy: None: prompts in order, of which none is admitted without tokens.
        scheduler: the scheduler whose further rules hold (`SCHEDULERS`).
        one_shot: limits of one-shot work; None runs one-shot requests like all others.
        model_slots: room for the models of an engine that cannot hold all that it serves; None: no limit.
        scheduling_parameters: of the scheduling policy, by name.

    Raises:
        ValueError: settings that contradict each other.
    """

    num_gpu_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_table_blocks: int = 0
    enable_prefix_caching: bool = True
    prefix_id_tokens: int = 16
    cache_blocks_on: CacheBlocksOn = "scheduled"
    in_batch_prefix_caching: bool = False
    scheduling_policy: str = "fcfs"
    preemption_policy: str | None = None
    kv_reservation: KVReservation = "chunk"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_active_seqs: int = 0
    prefill_schedule_interval: int = 1
    enable_mixed_chunk: bool = True
    max_prefill_tokens: int = 0
    prefill_max_requests: int = 0
    scheduler_recv_interval: int = 1
    chunk_unit_size: int = 1
    context_chunking_policy: str | None = None
    capacity_scheduler_policy: str = MAX_UTILIZATION
    schedule_conservativeness: float = 1.0
    attention_dp_timeout_iters: int = 0
    attention_dp_batching_wait_iters: int = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    scheduler: str = DEFAULT_SCHEDULER
    one_shot: OneShotBudget | None = None
    kv_offloading: KVOffloading | None = None
    model_slots: SlotsConfig | None = None
    scheduling_parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    admission_control: AdmissionLimits | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, found {getattr(self, name)}")
        allowed = {
            "scheduling_policy": tuple(SCHEDULING_POLICIES),
            "preemption_policy": (*PREEMPTION_POLICIES, None),
            "cache_blocks_on": get_args(CacheBlocksOn),
            "kv_reservation": get_args(KVReservation),
            "scheduler": (*SCHEDULERS, INSTALLED_VLLM),
            "capacity_scheduler_policy": CAPACITY_POLICIES,
            "context_chunking_policy": (*CHUNKING_POLICIES, None),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                expected = ", ".join(choice for choice in choices if choice)
                raise ValueError(f"{name}: expected one of {expected}, found {getattr(self, name)!r}")
        for is_refused, name, expected in (*self._limits(), *self._contradictions()):
            if is_refused:
                raise ValueError(f"{name}: expected {expected}, found {getattr(self, name)}")
        self._check_sections()

    def _limits(self) -> tuple[tuple[bool, str, str], ...]:
        """Checks of ranges: whether a setting is outside, its name, and the expected values."""
        return (
            (self.max_table_blocks < 0, "max_table_blocks", "0 (no limit) or more"),
            (self.scheduler_recv_interval > MOST_UNSEEN_STEPS, "scheduler_recv_interval",
             f"at most {MOST_UNSEEN_STEPS}"),
            (not 0.0 <= self.batch_wait_max_tokens_ratio <= 1.0, "batch_wait_max_tokens_ratio", "a share from 0 to 1"),
            (not 0.0 <= self.watermark < 1.0, "watermark", "a share of at least 0 and below 1"),
            (self.chunk_unit_size > self.max_num_batched_tokens, "chunk_unit_size",
             f"at most max_num_batched_tokens ({self.max_num_batched_tokens})"),
        )  # fmt: skip

    def _contradictions(self) -> tuple[tuple[bool, str, str], ...]:
        """Checks of pairs: whether a setting contradicts another one, its name, and the expected values."""
        ordered = self.enable_mixed_chunk and not self.shares_tokens
        return (
            (self.prefill_schedule_interval > 1 and not ordered, "prefill_schedule_interval",
             "1 with enable_mixed_chunk false, a context_chunking_policy or batch_wait_timeout_iters"),
            (self.batch_wait_timeout_iters > 0 and not self.enable_mixed_chunk, "batch_wait_timeout_iters",
             "0 with enable_mixed_chunk false: prompts run alone"),
            (self.max_num_seqs > self.max_num_batched_tokens and self.enable_mixed_chunk, "max_num_batched_tokens",
             f"at least max_num_seqs ({self.max_num_seqs}), since every running sequence gets a token a step"),
            (self.prefix_id_tokens % self.block_size > 0, "prefix_id_tokens",
             f"a multiple of block_size ({self.block_size})"),
        )  # fmt: skip

    def _check_sections(self) -> None:
        if self.kv_offloading is not None and not self.enable_prefix_caching:
            raise ValueError("kv_offloading: expected enable_prefix_caching, since prefixes are what tiers keep")
        if self.shares_tokens and self.one_shot is not None:
            raise ValueError(
                "one_shot: expected none with a context_chunking_policy, which shares tokens among prompts, or with "
                "batch_wait_timeout_iters"
            )
        if self.model_slots is not None and self.one_shot is not None:
            raise ValueError("one_shot: expected none, since one-shot work would run beside the models in slots")
        if self.in_batch_prefix_caching and self.cache_blocks_on != "computed":
            raise ValueError(
                f"in_batch_prefix_caching: expected cache_blocks_on computed, where two requests of a step can miss "
                f"the same prefix, found {self.cache_blocks_on}"
            )

    @property
    def rules(self) -> SchedulerRules:
        """The rules of the scheduler that are no settings."""
        return SCHEDULERS.get(self.scheduler, SchedulerRules())

    @property
    def shares_tokens(self) -> bool:
        """True if prompts are admitted first, and all that are admitted then share the tokens of a step."""
        shares_parts = self.context_chunking_policy is not None and self.enable_chunked_prefill
        return shares_parts or self.batch_wait_timeout_iters > 0
