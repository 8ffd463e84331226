"""Pools of engines with their models: what each of their processes is started from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from live.backend import BackendLimits
from live.engine import Progress
from live.loaded_model import DTYPES, Models, ModelSource
from live.models.config import ModelConfig
from live.topologies.deployment import MakeRole
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import PoolsLayout, pool_forms
from live.topologies.pools.worker import EngineWorker
from live.topologies.transport import Forms, Transport
from schedulers.chunking import ChunkPolicy


@dataclass(frozen=True)
class PoolsDeployment:
    """Pools of engines with their models, as `live.topologies.deployment.Deployment`.

    Attributes:
        model: the only model, or the decoder that all models share. modules: the models' own weights, by model.
        chunks: make each engine's chunk policy, by engine.
    """

    model: ModelSource
    layout: PoolsLayout
    modules: Mapping[str, ModelSource] = field(default_factory=dict)
    chunks: tuple[Callable[[], ChunkPolicy | None], ...] = ()

    @property
    def names(self) -> list[str]:
        """See `Deployment.names`."""
        return self.layout.names

    @property
    def models(self) -> tuple[str, ...]:
        """See `Deployment.models`."""
        return tuple(self.layout.prefill) if len(self.layout.prefill) > 1 else ()

    @property
    def fingerprint(self) -> str:
        """See `Deployment.fingerprint`."""
        modules = [(name, source.config(), source.random, source.seed) for name, source in sorted(self.modules.items())]
        settings = (
            self.config,
            self.layout,
            modules,
            self.model.dtype,
            self.model.random,
            self.model.seed,
            self.model.rounding,
        )
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @cached_property
    def config(self) -> ModelConfig:
        """See `Deployment.config`."""
        return self.model.config()

    @property
    def limits(self) -> BackendLimits:
        """See `Deployment.limits`."""
        configs = [place.config for place in self.layout.engines]
        tokens = min(config.num_gpu_blocks * config.block_size for config in configs)
        return BackendLimits(
            min(self.config.max_position_embeddings, tokens),
            sum(config.max_num_seqs for config in configs),
            sum(config.num_gpu_blocks for config in configs),
            configs[0].block_size,
            configs[0].prefix_id_tokens,
        )

    def forms(self) -> Forms:
        """See `Deployment.forms`."""
        return pool_forms(self.layout, self.config, DTYPES[self.model.dtype])

    def front(self, transport: Transport, on_progress: Callable[[Progress], None]) -> Frontend:
        """See `Deployment.front`."""
        return Frontend(self.layout, self.limits.max_model_len, transport, on_progress)

    @property
    def device(self) -> str:
        """See `Deployment.device`."""
        return self.model.device

    def load(self, rank: int, models: Models) -> MakeRole:
        """See `Deployment.load`: an engine with its model."""
        module = self.layout.engines[rank - 1].module
        source = self.model if module is None else self.modules[module]
        decoder = models.decoder(source)
        chunks = self.chunks[rank - 1]() if self.chunks else None
        graphs = self.device != "cpu"
        return lambda transport: EngineWorker(self.layout, rank, decoder, transport, chunks, graphs=graphs).run()
