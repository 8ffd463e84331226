"""Bundles and pools with their models: what each of their processes is started from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from live.loaded_model import DTYPES, Models, ModelSource
from live.topologies.bundle.coordinator import BundleLayout, Coordinator
from live.topologies.bundle.workers import AttentionWorker, FFNWorker, zero_rows
from live.topologies.deployment import Deployment, MakeWorker, OnProgress
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import PoolsLayout
from live.topologies.pools.worker import EngineWorker
from live.topologies.transport import Transport
from schedulers.bundle_slots import REFILL_POLICIES
from schedulers.step_policies import ChunkPolicy


@dataclass(frozen=True)
class BundleDeployment(Deployment):
    """A bundle with its model. `refill` names the policy by which requests get slots (`REFILL_POLICIES`)."""

    layout: BundleLayout
    refill: str = "fcfs"

    def front(self, transport: Transport, on_progress: OnProgress) -> Coordinator:
        longest = self.limits.max_model_len
        return Coordinator(self.layout, longest, transport, on_progress, REFILL_POLICIES.select(self.refill))

    def load(self, rank: int, models: Models) -> MakeWorker:
        if rank in self.layout.attention_ranks:
            decoder = models.attention(self.model)
            return lambda transport: AttentionWorker(self.layout, decoder, transport, graphs=self.uses_graphs)
        ffns, dtype, device = models.ffns(self.model), DTYPES[self.model.dtype], torch.device(self.device)
        captured = zero_rows(self.config, dtype, device, 1) if self.uses_graphs else None
        return lambda transport: FFNWorker(self.layout, ffns, transport, captured=captured)

    def _settings(self) -> object:
        return self.refill


@dataclass(frozen=True)
class PoolsDeployment(Deployment):
    """Pools of engines, with the models' own weights by model, and what makes each engine's chunk policy."""

    layout: PoolsLayout
    modules: Mapping[str, ModelSource] = field(default_factory=dict)
    chunks: tuple[Callable[[], ChunkPolicy | None], ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.layout.prefill) if len(self.layout.prefill) > 1 else ()

    def front(self, transport: Transport, on_progress: OnProgress) -> Frontend:
        return Frontend(self.layout, self.limits.max_model_len, transport, on_progress)

    def load(self, rank: int, models: Models) -> MakeWorker:
        module = self.layout.engines[rank - 1].module
        decoder = models.decoder(self.model if module is None else self.modules[module])
        chunks = self.chunks[rank - 1]() if self.chunks else None
        graphs = self.uses_graphs
        return lambda transport: EngineWorker(self.layout, rank, decoder, transport, chunks, graphs=graphs)

    def _settings(self) -> object:
        return [(name, source.config(), source.random, source.seed) for name, source in sorted(self.modules.items())]
