"""A bundle with its model: what each of its processes is started from, and a bundle in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from live.loaded_model import DTYPES, Models
from live.models.decoder import Decoder
from live.models.weights import ffns_of, with_new_counters, without_ffns
from live.topologies.bundle.coordinator import COORDINATOR, BundleLayout, Coordinator
from live.topologies.bundle.workers import AttentionWorker, FFNWorker, zero_rows
from live.topologies.deployment import Deployment, MakeRole, OnProgress
from live.topologies.local import Handover, LocalNetwork, LocalTopology, PackedMessages, Timekeeper
from live.topologies.transport import Transport
from schedulers.bundle_slots import REFILL_POLICIES, Refill, refill_fcfs


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
    """A bundle in one process, with one copy of the weights. `packed`: messages are packed as between processes."""

    def __init__(
        self,
        layout: BundleLayout,
        decoder: Decoder,
        *,
        refill: Refill = refill_fcfs,
        timekeeper: Timekeeper | None = None,
        packed: bool = False,
        handover: Handover | None = None,
        graphs: bool = False,
        on_progress: OnProgress = lambda progress: None,
    ) -> None:
        config, weights = decoder.config, decoder.weights
        forms = layout.forms(config, weights.norm.dtype)
        network = LocalNetwork(forms, timekeeper, PackedMessages(forms) if packed else handover)
        transport, longest = network.transport, layout.limits(config).max_model_len
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
        roles = [*(worker.run() for worker in self.attention), *(worker.run() for worker in ffns)]
        super().__init__(network, self.coordinator, roles)
