"""The engines of a topology of pools, as a scenario describes them."""

from __future__ import annotations

from collections.abc import Callable

from live.loaded_model import DTYPES
from live.models.config import ModelConfig
from live.topologies.pools.layout import EnginePlace, PoolsLayout
from scenarios.live_engines import EnginePool
from scenarios.pools import router_name
from scenarios.serving import ServingScenario
from schedulers.chunking import ChunkPolicy


def kv_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of KV cache of one token."""
    shape = config.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPES[dtype].itemsize


def pools_layout(
    spec: ServingScenario, pools: list[EnginePool]
) -> tuple[PoolsLayout, tuple[Callable[[], ChunkPolicy | None], ...]]:
    """The engines of a scenario, and what makes the chunk policy of each."""
    models = spec.model_names
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
