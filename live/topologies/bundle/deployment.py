"""A bundle with its model: what each of its processes is started from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from live.backend import BackendLimits
from live.engine import Progress
from live.loaded_model import DTYPES, Models, ModelSource
from live.models.config import ModelConfig
from live.topologies.bundle.attention_worker import AttentionWorker
from live.topologies.bundle.coordinator import Coordinator
from live.topologies.bundle.ffn_worker import FFNWorker
from live.topologies.bundle.layout import BundleLayout, bundle_forms
from live.topologies.deployment import MakeRole
from live.topologies.transport import Forms, Transport
from schedulers.bundle_slots import REFILL_POLICIES


@dataclass(frozen=True)
class BundleDeployment:
    """A bundle with its model, as `live.topologies.deployment.Deployment`.

    Attributes:
        refill: name of the policy by which requests get slots (`REFILL_POLICIES`).
    """

    model: ModelSource
    layout: BundleLayout
    refill: str = "fcfs"

    @property
    def names(self) -> list[str]:
        """See `Deployment.names`."""
        return [self.layout.role(rank) for rank in range(self.layout.size)]

    @property
    def models(self) -> tuple[str, ...]:
        """See `Deployment.models`: a bundle serves one."""
        return ()

    @property
    def fingerprint(self) -> str:
        """See `Deployment.fingerprint`."""
        settings = self.config, self.layout, self.refill, self.model.dtype, self.model.random, self.model.seed
        return hashlib.sha256(repr(settings).encode()).hexdigest()

    @cached_property
    def config(self) -> ModelConfig:
        """See `Deployment.config`."""
        return self.model.config()

    @property
    def limits(self) -> BackendLimits:
        """See `Deployment.limits`."""
        layout, engine = self.layout, self.layout.engine
        parts = layout.attention_instances * layout.microbatches
        return BackendLimits(
            min(self.config.max_position_embeddings, engine.num_gpu_blocks * engine.block_size),
            parts * layout.batch_size,
            parts * engine.num_gpu_blocks,
            engine.block_size,
            engine.prefix_id_tokens,
        )

    def forms(self) -> Forms:
        """See `Deployment.forms`."""
        return bundle_forms(self.layout, self.config, DTYPES[self.model.dtype])

    def front(self, transport: Transport, on_progress: Callable[[Progress], None]) -> Coordinator:
        """See `Deployment.front`: the coordinator."""
        longest = self.limits.max_model_len
        return Coordinator(self.layout, longest, transport, on_progress, REFILL_POLICIES.select(self.refill))

    @property
    def device(self) -> str:
        """See `Deployment.device`."""
        return self.model.device

    def load(self, rank: int, models: Models) -> MakeRole:
        """See `Deployment.load`: an attention or an FFN worker."""
        graphs = self.device != "cpu"
        if rank in self.layout.attention_ranks:
            decoder = models.attention(self.model)
            return lambda transport: AttentionWorker(self.layout, decoder, transport, graphs=graphs).run()
        ffns = models.ffns(self.model)
        return lambda transport: FFNWorker(self.layout, ffns, transport, graphs=graphs).run()
