"""The engines of a topology of pools, their ranks, and the forms of their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from live.backend import BackendLimits
from live.loaded_model import DTYPES
from live.models.config import ModelConfig
from live.topologies.transport import COMMON_FORMS, Form, Forms, Payload, request_payloads, token_payloads
from scenarios.engine import router_name
from scenarios.serving import ServingScenario
from scenarios.validation import EnginePool
from schedulers.engine_config import EngineConfig
from schedulers.routing import reads_caches
from schedulers.step_policies import ChunkPolicy

WORK, REPORT, SENT, BLOCKS, EVENTS, BEGUN, RESERVED = range(2, 9)
"""Kinds of messages.

WORK, front to engine: requests, ids to abort or release, and (request id, rank) of prompts whose KV is to be sent, as
    far as it is computed and as more is. A request for a decode engine without its first token: blocks are to be
    reserved for its prompt, which is being computed.
REPORT, engine to front: its rank, running requests, free KV blocks, preemptions, prompt tokens computed, and cached;
    new tokens.
SENT, engine to front: its rank, a request, and 1 if all of its KV is on its way, 0 if no more will be.
BLOCKS, prefill to decode: a request id, and whether more will come (`MORE`, `LAST`, `GIVEN_UP`); KV blocks.
EVENTS, engine to front: its rank; of each change of its prefix cache whether a block was cached, and its hash.
BEGUN, prefill engine to front: its rank, and a request whose prompt begins with the first of several chunks.
RESERVED, decode engine to front: its rank, a request, and 1 if it has reserved blocks for it, else 0.
"""

MORE, LAST, GIVEN_UP = 1, 0, -1
"""Further messages with blocks of the same prompt: some, none, and none because the prompt was given up."""

FRONT = 0
"""The front's rank."""

BLOCKS_AT_ONCE = 32
"""KV blocks of one message. The receiver copies one message while the next is on its way."""

REQUESTS_AT_ONCE, IDS_AT_ONCE, EVENTS_AT_ONCE = 16, 1024, 1024
"""Requests, ids and events of one message at most; more of them take several messages."""

Role = Literal["both", "prefill", "decode"]

NORMAL, PREFILL = -1, 0
"""The part of a request that an engine computes: all of it, or its prompt. A positive number is the rank that has
computed its prompt.
"""


@dataclass(frozen=True)
class EnginePlace:
    """One engine; `module` is the model whose weights it has, None for the shared decoder or the only model."""

    role: Role
    config: EngineConfig
    module: str | None = None


@dataclass(frozen=True)
class PoolsLayout:
    """The engines, by rank from 1, and the ranks that serve each model.

    `decode`: ranks on which a model's requests continue; empty where prefill engines do both. `kv_event_delay`: seconds
    beside the messages' time. `with_chunks`: KV blocks leave while later chunks are computed.
    """

    engines: tuple[EnginePlace, ...]
    prefill: Mapping[str, tuple[int, ...]]
    decode: Mapping[str, tuple[int, ...]]
    routing: str = "least_loaded"
    parameters: tuple[tuple[str, Any], ...] = ()
    kv_event_delay: float = 0.0
    with_chunks: bool = False

    @property
    def kv_events(self) -> bool:
        """True if engines report changes of their prefix caches to the front, because the router may look at them."""
        return reads_caches(self.routing)

    def senders(self, rank: int) -> tuple[int, ...]:
        """The ranks that send KV caches to a rank: the prefill engines of its models, if it is a decode engine."""
        models = [model for model, ranks in self.decode.items() if rank in ranks]
        return tuple(sorted({source for model in models for source in self.prefill[model]}))

    def receivers(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank sends KV caches to."""
        return tuple(receiver for receiver in self.ranks if rank in self.senders(receiver))

    @property
    def ranks(self) -> range:
        """Ranks of the engines."""
        return range(1, 1 + len(self.engines))

    @property
    def names(self) -> list[str]:
        counts: dict[str, int] = {}
        names = ["frontend 0"]
        for place in self.engines:
            role = "engine" if place.role == "both" else place.role
            number = counts[role] = counts.get(role, -1) + 1
            names.append(f"{role} {number}")
        return names

    def limits(self, config: ModelConfig) -> BackendLimits:
        return BackendLimits.of(config, [place.config for place in self.engines])

    def forms(self, config: ModelConfig, dtype: torch.dtype) -> Forms:
        shape, engines = config.shape, [place.config for place in self.engines]
        tokens = max(engine.num_gpu_blocks * engine.block_size for engine in engines)
        longest = min(config.max_position_embeddings, tokens)
        sequences = max(
            engine.max_num_seqs + (engine.one_shot.sequences if engine.one_shot else 0) for engine in engines
        )
        requests = request_payloads(REQUESTS_AT_ONCE, longest, longest // engines[0].prefix_id_tokens)
        ids, pairs = Payload(torch.int64, IDS_AT_ONCE), Payload(torch.int64, IDS_AT_ONCE, (2,))
        block = (2, shape.layers, engines[0].block_size, shape.kv_heads, shape.head_dim)
        return {
            **COMMON_FORMS,
            WORK: Form(0, (*requests, ids, pairs)),
            REPORT: Form(6, token_payloads(sequences)),
            SENT: Form(3),
            BEGUN: Form(2),
            RESERVED: Form(3),
            EVENTS: Form(1, (Payload(torch.int64, EVENTS_AT_ONCE, (2,)),)),
            BLOCKS: Form(2, (Payload(dtype, BLOCKS_AT_ONCE, block, on_device=True),)),
        }


def kv_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of KV cache of one token."""
    shape = config.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPES[dtype].itemsize


def pools_layout(
    spec: ServingScenario, pools: list[EnginePool]
) -> tuple[PoolsLayout, tuple[Callable[[], ChunkPolicy | None], ...]]:
    """The engines of a scenario, and what makes the chunk policy of each."""
    models = spec.workload.models.names
    engines: list[EnginePlace] = []
    chunks: list[Callable[[], ChunkPolicy | None]] = []
    ranks: dict[str, dict[str, tuple[int, ...]]] = {"prefill": {}, "decode": {}}
    for pool in pools:
        rank_of: dict[str, int] = {}
        has_modules = pool.spec.models == "each" and len(models) > 1
        side = ranks["decode" if pool.spec.role == "decode" else "prefill"]
        for model, names in pool.spec.engine_names(models).items():
            for name in names:
                if name not in rank_of:
                    engines.append(EnginePlace(pool.spec.role, pool.scheduler.config, model if has_modules else None))
                    chunks.append(pool.scheduler.chunk_policy)
                    rank_of[name] = len(engines)
            side[model] = side.get(model, ()) + tuple(rank_of[name] for name in names)
    routing, events = spec.system.routing, spec.system.kv_events
    parameters = () if isinstance(routing, str) else tuple(sorted(routing.parameters.items()))
    delay = 0.0 if events is None else events.delay
    link = spec.system.kv_link
    layout = PoolsLayout(
        tuple(engines), ranks["prefill"], ranks["decode"], router_name(routing), parameters, kv_event_delay=delay,
        with_chunks=link is not None and link.transfer == "with_chunks",
    )  # fmt: skip
    return layout, tuple(chunks)
