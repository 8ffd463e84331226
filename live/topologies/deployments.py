"""Bundles and pools with their models: what each of their processes is started from, and either in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Unpack

import torch

from live.loaded_model import DTYPES, Models, ModelSource
from live.models.decoder import Decoder
from live.models.weights import ffns_of, with_new_counters, without_ffns
from live.topologies.bundle.coordinator import COORDINATOR, BundleLayout, Coordinator
from live.topologies.bundle.workers import AttentionWorker, FFNWorker, zero_rows
from live.topologies.deployment import Deployment, MakeRole, OnProgress
from live.topologies.local import LocalTopology, NetworkOptions
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import FRONT, PoolsLayout
from live.topologies.pools.worker import EngineWorker
from live.topologies.transport import Transport
from schedulers.bundle_slots import REFILL_POLICIES, Refill, refill_fcfs
from schedulers.step_policies import ChunkPolicy


@dataclass(frozen=True)
class BundleDeployment(Deployment):
    """A bundle with its model. `refill` names the policy by which requests get slots (`REFILL_POLICIES`)."""

    layout: BundleLayout
    refill: str = "fcfs"

    def front(self, transport: Transport, on_progress: OnProgress) -> Coordinator:
        longest = self.limits.max_model_len
        return Coordinator(self.layout, longest, transport, on_progress, REFILL_POLICIES.select(self.refill))

    def load(self, rank: int, models: Models) -> MakeRole:
        graphs = self.model.device != "cpu"
        if rank in self.layout.attention_ranks:
            decoder = models.attention(self.model)
            return lambda transport: AttentionWorker(self.layout, decoder, transport, graphs=graphs).run()
        ffns, dtype, device = models.ffns(self.model), DTYPES[self.model.dtype], torch.device(self.model.device)
        captured = zero_rows(self.model.config(), dtype, device, 1) if graphs else None
        return lambda transport: FFNWorker(self.layout, ffns, transport, captured=captured).run()

    def _settings(self) -> object:
        return self.refill


class LocalBundle(LocalTopology):
    """A bundle in one process, with one copy of the weights. `network`: as of `LocalTopology`."""

    def __init__(
        self,
        layout: BundleLayout,
        decoder: Decoder,
        *,
        refill: Refill = refill_fcfs,
        graphs: bool = False,
        on_progress: OnProgress = lambda progress: None,
        **network: Unpack[NetworkOptions],
    ) -> None:
        config, weights = decoder.config, decoder.weights
        super().__init__(layout.forms(config, weights.norm.dtype), **network)
        transport, longest = self.network.transport, layout.limits(config).max_model_len
        self.coordinator = Coordinator(layout, longest, transport(COORDINATOR), on_progress, refill)
        attention_only = Decoder(config, without_ffns(weights))
        self.attention = [
            AttentionWorker(layout, attention_only.for_another_stream(), transport(rank), graphs=graphs)
            for rank in layout.attention_ranks
        ]
        captured = zero_rows(config, weights.norm.dtype, weights.norm.device, 1) if graphs else None
        ffns = [
            FFNWorker(layout, with_new_counters(ffns_of(weights)), transport(rank), captured=captured)
            for rank in layout.ffn_ranks
        ]
        self.start(self.coordinator, [*self.attention, *ffns])


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

    def load(self, rank: int, models: Models) -> MakeRole:
        module = self.layout.engines[rank - 1].module
        decoder = models.decoder(self.model if module is None else self.modules[module])
        chunks = self.chunks[rank - 1]() if self.chunks else None
        graphs = self.model.device != "cpu"
        return lambda transport: EngineWorker(self.layout, rank, decoder, transport, chunks, graphs=graphs).run()

    def _settings(self) -> object:
        return [(name, source.config(), source.random, source.seed) for name, source in sorted(self.modules.items())]


class LocalPools(LocalTopology):
    """A topology of pools in one process, with the decoder of each module by name; None: the shared one."""

    def __init__(
        self,
        layout: PoolsLayout,
        decoder_of: Callable[[str | None], Decoder],
        *,
        graphs: bool = False,
        on_progress: OnProgress = lambda progress: None,
        chunks: Callable[[], ChunkPolicy | None] = lambda: None,
        **network: Unpack[NetworkOptions],
    ) -> None:
        shared = decoder_of(None)
        super().__init__(layout.forms(shared.config, shared.weights.norm.dtype), **network)
        transport, longest = self.network.transport, layout.limits(shared.config).max_model_len
        self.frontend = Frontend(layout, longest, transport(FRONT), on_progress)
        self.workers = [
            EngineWorker(
                layout, rank, decoder_of(place.module).for_another_stream(), transport(rank), chunks(), graphs=graphs
            )
            for rank, place in zip(layout.ranks, layout.engines, strict=True)
        ]
        self.start(self.frontend, self.workers)
