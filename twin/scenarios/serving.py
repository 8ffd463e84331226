"""Scenario files of serving systems: `kind: serving`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.ec_tables import EcTables
from latency_models.models import load_model
from latency_models.step_time import StepTime
from latency_models.strict import Strict, checked
from schedulers.chunking import ChunkPolicy, SloChunks, StaticChunks
from schedulers.engine_config import EngineConfig, OneShotBudget, Reserve, Share
from twin.scenarios.overrides import Settings, apply
from twin.scenarios.serving_workload import ServingWorkloadSpec
from twin.scenarios.step_time import StepTimeSpec
from workloads.errors import BadInput

Routing = Literal["least_loaded", "power_of_two", "round_robin"]


class KVMemorySpec(Strict):
    """KV blocks from memory: what `utilization` of a device's `memory` leaves beside weights and activations, bytes.

    `model` names a model file; weights and cache are spread over `tensor_parallel` devices.
    """

    memory: PositiveFloat
    utilization: float = Field(default=0.9, gt=0, le=1)
    model: str
    tensor_parallel: PositiveInt = 1
    weight_bytes: PositiveFloat = 2.0
    cache_bytes: PositiveFloat = 2.0
    activations: NonNegativeFloat = 0.0

    def blocks(self, block_tokens: int, base: Path) -> int:
        """How many blocks fit.

        Raises:
            BadInput: none do.
        """
        model = load_model(self.model, base)
        weights = model.parameters * self.weight_bytes / self.tensor_parallel
        free = self.memory * self.utilization - weights - self.activations
        block = model.kv_bytes(self.cache_bytes) * model.layers * block_tokens / self.tensor_parallel
        if free < block:
            expected = f"expected more than weights and activations take ({weights + self.activations:.3g} bytes)"
            raise BadInput(expected, field="engine.kv_memory.memory", value=self.memory)
        return int(free // block)


class StaticChunksSpec(Strict):
    """At most `tokens` rows a step, decodes included; or prompt tokens `beside` however many decodes."""

    policy: Literal["static"]
    tokens: PositiveInt
    beside: bool = False

    def build(self, step_time: StepTime) -> ChunkPolicy:
        """The policy."""
        return StaticChunks(self.tokens, self.beside)


class SloChunksSpec(Strict):
    """SPEAR 4.3: the largest chunk c with T(d) + T(c) ≤ `goal` seconds, `smallest` ≤ c ≤ `largest`, in `step`s.

    T is the table `seconds` over `tokens`, or without one the step-time model's own, where it has one (ec_tables).
    """

    policy: Literal["slo"]
    goal: PositiveFloat
    smallest: PositiveInt = 16
    largest: PositiveInt = 2048
    step: PositiveInt = 1
    tokens: list[PositiveInt] | None = None
    seconds: list[PositiveFloat] | None = None

    def build(self, step_time: StepTime) -> ChunkPolicy:
        """The policy.

        Raises:
            BadInput: a table or limits that make none, or no table.
        """
        tokens, seconds = self.tokens, self.seconds
        if tokens is None and seconds is None and isinstance(step_time, EcTables):
            tokens, seconds = step_time.chunk_table()
        if tokens is None or seconds is None:
            expected = "expected tokens and seconds, a latency table, unless step_time.source is ec_tables"
            raise BadInput(expected, field="engine.chunking")
        try:
            return SloChunks(tokens, seconds, self.goal, self.smallest, self.largest, self.step)
        except ValueError as error:
            raise BadInput(str(error), field="engine.chunking") from None


class OneShotSpec(Strict):
    """Budgets of one-shot work a step (Prelude 3): prompt tokens, prompts, and bytes of activations (default: any)."""

    tokens: PositiveInt = 8192
    sequences: PositiveInt = 256
    activation_bytes: PositiveFloat | None = None
    bytes_per_token: NonNegativeFloat = 0.0


class EngineSpec(Strict):
    """One engine; names and defaults are vLLM's. What is not said here: `schedulers.engine_config`.

    Attributes:
        kv_blocks, kv_memory: KV memory, as a number of blocks or from bytes; one of the two.
        data_parallel: ranks that step together, each with these settings and memory of its own: replicas of the
            attention of a mixture of experts whose experts are spread over all of them. 1: none.
        async_scheduling: decide a step while the one before still runs.
        chunking: a chunk policy beside the token budget. one_shot: budgets of the one-shot class; without, one-shot
            requests go down the decode-shaped path.
    """

    kv_blocks: PositiveInt | None = None
    kv_memory: KVMemorySpec | None = None
    block_tokens: PositiveInt = 16
    max_num_batched_tokens: PositiveInt = 2048
    max_num_seqs: PositiveInt = 128
    max_table_blocks: int = Field(default=0, ge=0)
    prefix_caching: bool = True
    share: Share = "scheduled"
    lead_cold_prefixes: bool = False
    order: Literal["fcfs", "priority", "shortest_prompt"] = "fcfs"
    reserve: Reserve = "chunk"
    data_parallel: PositiveInt = 1
    async_scheduling: bool = False
    chunking: Annotated[StaticChunksSpec | SloChunksSpec, Field(discriminator="policy")] | None = None
    one_shot: OneShotSpec | None = None

    @model_validator(mode="after")
    def _one_memory(self) -> EngineSpec:
        if (self.kv_blocks is None) == (self.kv_memory is None):
            raise ValueError("expected either kv_blocks or kv_memory")
        return self

    def build(self, base: Path, prefix_id_tokens: int | None) -> EngineConfig:
        """The scheduler's settings; relative paths start from `base`.

        Raises:
            BadInput: settings that contradict each other.
        """
        blocks = self.kv_blocks
        if blocks is None:
            assert self.kv_memory is not None
            blocks = self.kv_memory.blocks(self.block_tokens, base)
        shared = self.model_dump(
            exclude={"kv_blocks", "kv_memory", "data_parallel", "async_scheduling", "chunking", "one_shot"}
        )
        try:
            one_shot = OneShotBudget(**self.one_shot.model_dump(exclude_none=True)) if self.one_shot else None
            return EngineConfig(
                kv_blocks=blocks, prefix_id_tokens=prefix_id_tokens or self.block_tokens, one_shot=one_shot, **shared
            )
        except ValueError as error:
            raise BadInput(str(error), field="engine") from None


class LinkSpec(Strict):
    """What a KV cache crosses between prefill and decode: bytes/s, seconds, bytes of cache a token.

    `shared`: one link for all prefill engines, rather than one each.
    """

    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    bytes_per_token: NonNegativeFloat
    shared: bool = False


class ColocatedSpec(Strict):
    """Engines that prefill and decode. With several models, `replicas` engines for each."""

    layout: Literal["colocated"] = "colocated"
    replicas: PositiveInt = 1
    routing: Routing = "least_loaded"


class DisaggregatedSpec(Strict):
    """Prefill engines for each model, decode engines for each (`isolated`) or for all together (`shared`; SUN 3.2.3).

    Attributes:
        prefill_replicas: prefill engines of each model. decode_replicas: decode engines of each model when isolated, of
            all together when shared. decode_step_time: another latency model for decode engines (quantised weights).
    """

    layout: Literal["disaggregated"]
    prefill_replicas: PositiveInt = 1
    decode: Literal["isolated", "shared"] = "isolated"
    decode_replicas: PositiveInt = 1
    routing: Routing = "least_loaded"
    link: LinkSpec
    decode_step_time: StepTimeSpec | None = None


class FailureSpec(Strict):
    """An engine is down from `at` for `duration` seconds; what it had goes on elsewhere."""

    engine: str
    at: NonNegativeFloat
    duration: PositiveFloat


class MeasureSpec(Strict):
    """What is measured.

    Attributes:
        start: when a request's TTFT and E2E begin: `submitted` by the client, or `queued` by the engine (vLLM's
            `queued_ts`: an engine notices arrivals between steps).
        after, before: only requests that end between these times count, seconds. Default: all.
        slo: goals in seconds for goodput: a request counts when it meets all that are given.
    """

    start: Literal["submitted", "queued"] = "submitted"
    after: NonNegativeFloat = 0.0
    before: PositiveFloat | None = None
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)


class MeasuredSpec(Strict):
    """A real run to set beside the prediction: JSON lines with times of each request. Nothing is fitted to it."""

    requests: str
    timeseries: str | None = None


class ServingScenario(Strict):
    """A serving system and what arrives.

    Attributes:
        step_time: where durations of steps come from. system: engines, and how requests get to them.
        measure: what is measured. measured: a real run to compare with.
        fast_forward: pass over steps in which nothing changes; the same records, sooner.
        detail: keep every step and request for the report, the trace and `requests.parquet`.
    """

    schema_: Literal["twin.scenario/1"] = Field(alias="schema")
    kind: Literal["serving"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    seed: int = Field(default=0, ge=0)
    workload: ServingWorkloadSpec
    engine: EngineSpec
    step_time: StepTimeSpec
    system: Annotated[ColocatedSpec | DisaggregatedSpec, Field(discriminator="layout")] = ColocatedSpec()
    failures: list[FailureSpec] = Field(default_factory=list)
    measure: MeasureSpec = MeasureSpec()
    measured: MeasuredSpec | None = None
    fast_forward: bool = True
    detail: bool = True


def check_scenario(document: dict[str, Any], settings: Settings, path: Path) -> ServingScenario:
    """The document with `settings` applied, checked.

    Raises:
        BadInput: naming the file, the field, the value and what was expected.
    """
    return checked(ServingScenario, apply(document, settings), path)
