"""Pools of engines with their models: what each of their processes is started from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from live.loaded_model import Models, ModelSource
from live.topologies.deployment import Deployment, MakeRole, OnProgress
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import PoolsLayout
from live.topologies.pools.worker import EngineWorker
from live.topologies.transport import Transport
from schedulers.chunking import ChunkPolicy


@dataclass(frozen=True)
class PoolsDeployment(Deployment):
    """Pools of engines with their models.

    Attributes:
        modules: the models' own weights, by model. chunks: make each engine's chunk policy, by engine.
    """

    layout: PoolsLayout
    modules: Mapping[str, ModelSource] = field(default_factory=dict)
    chunks: tuple[Callable[[], ChunkPolicy | None], ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.layout.prefill) if len(self.layout.prefill) > 1 else ()

    def front(self, transport: Transport, on_progress: OnProgress) -> Frontend:
        return Frontend(self.layout, self.limits.max_model_len, transport, on_progress)

    def load(self, rank: int, models: Models) -> MakeRole:
        module = self.layout.engines[rank - 1].module
        decoder = models.decoder(self.model if module is None else self.modules[module])
        chunks = self.chunks[rank - 1]() if self.chunks else None
        graphs = self.model.device != "cpu"
        return lambda transport: EngineWorker(self.layout, rank, decoder, transport, chunks, graphs=graphs).run()

    def _settings(self) -> object:
        return [(name, source.config(), source.random, source.seed) for name, source in sorted(self.modules.items())]
