"""A bundle with its model: what each of its processes is started from."""

from __future__ import annotations

from dataclasses import dataclass

from live.loaded_model import Models
from live.topologies.bundle.attention_worker import AttentionWorker
from live.topologies.bundle.coordinator import Coordinator
from live.topologies.bundle.ffn_worker import FFNWorker
from live.topologies.bundle.layout import BundleLayout
from live.topologies.deployment import Deployment, MakeRole, OnProgress
from live.topologies.transport import Transport
from schedulers.bundle_slots import REFILL_POLICIES


@dataclass(frozen=True)
class BundleDeployment(Deployment):
    """A bundle with its model.

    Attributes:
        refill: name of the policy by which requests get slots (`REFILL_POLICIES`).
    """

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
        ffns = models.ffns(self.model)
        return lambda transport: FFNWorker(self.layout, ffns, transport, graphs=graphs).run()

    def _settings(self) -> object:
        return self.refill
