"""A bundle whose workers all run in this process, one at a time."""

from __future__ import annotations

from collections.abc import Callable

from live.engine import Progress
from live.generation import Generation
from live.models.decoder import Decoder
from live.models.weights import ffns_of, without_ffns
from live.topologies.bundle.attention_worker import AttentionWorker
from live.topologies.bundle.coordinator import Coordinator
from live.topologies.bundle.ffn_worker import FFNWorker
from live.topologies.bundle.layout import COORDINATOR, BundleLayout, bundle_forms
from live.topologies.local import Handover, LocalNetwork, PackedMessages, Timekeeper
from live.topologies.transport import Role
from schedulers.bundle_slots import Refill, refill_fcfs


class LocalBundle:
    """A bundle in one process; its workers share one copy of the weights.

    Args:
        decoder: a whole model. timekeeper: gives the workers their clocks; the clock on the wall by default.
        packed: messages are packed as between processes. handover: otherwise, see `LocalNetwork`.
        graphs: see the workers. on_progress: called with what each step of a microbatch has changed.

    Attributes:
        coordinator: takes requests. attention: the attention workers.
    """

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
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        config, weights = decoder.config, decoder.weights
        longest = min(config.max_position_embeddings, layout.engine.num_gpu_blocks * layout.engine.block_size)
        forms = bundle_forms(layout, config, weights.norm.dtype)
        self.network = LocalNetwork(forms, timekeeper, PackedMessages(forms) if packed else handover)
        transport = self.network.transport
        self.coordinator = Coordinator(layout, longest, transport(COORDINATOR), on_progress, refill)
        attention_only = Decoder(config, without_ffns(weights))
        self.attention = [
            AttentionWorker(layout, attention_only, transport(rank), graphs=graphs) for rank in layout.attention_ranks
        ]
        ffns = [FFNWorker(layout, ffns_of(weights), transport(rank), graphs=graphs) for rank in layout.ffn_ranks]
        roles: list[Role] = [self.coordinator.run(), *(each.run() for each in self.attention), *(f.run() for f in ffns)]
        self.network.start(dict(enumerate(roles)))

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises as `Coordinator.check`."""
        self.coordinator.submit(generation)

    def run(self) -> None:
        """Run until all requests are finished."""
        self.network.wake(COORDINATOR)
        self.network.run()

    def stop(self) -> None:
        """Abort all requests and end the workers; again it changes nothing."""
        self.coordinator.stop()
        self.run()
