"""Engines that all run in this process, one at a time."""

from __future__ import annotations

from collections.abc import Callable

from live.models.decoder import Decoder
from live.topologies.deployment import OnProgress
from live.topologies.local import Handover, LocalNetwork, LocalTopology, PackedMessages, Timekeeper
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import FRONT, PoolsLayout
from live.topologies.pools.worker import EngineWorker
from schedulers.chunking import ChunkPolicy


class LocalPools(LocalTopology):
    """A topology of pools in one process.

    Args:
        decoder_of: the decoder of each module, by the name of its model; None: the shared one.
        timekeeper: gives the engines their clocks; the clock on the wall by default.
        packed: messages are packed as between processes. handover: otherwise, see `LocalNetwork`.
        graphs: see `EngineWorker`. on_progress: called with what each step of an engine has changed.
        chunks: makes each engine's chunk policy.

    Attributes:
        frontend: takes requests. workers: the engines.
    """

    def __init__(
        self,
        layout: PoolsLayout,
        decoder_of: Callable[[str | None], Decoder],
        *,
        timekeeper: Timekeeper | None = None,
        packed: bool = False,
        handover: Handover | None = None,
        graphs: bool = False,
        on_progress: OnProgress = lambda progress: None,
        chunks: Callable[[], ChunkPolicy | None] = lambda: None,
    ) -> None:
        shared = decoder_of(None)
        forms = layout.forms(shared.config, shared.weights.norm.dtype)
        network = LocalNetwork(forms, timekeeper, PackedMessages(forms) if packed else handover)
        transport, longest = network.transport, layout.limits(shared.config).max_model_len
        self.frontend = Frontend(layout, longest, transport(FRONT), on_progress)
        self.workers = [
            EngineWorker(layout, rank, decoder_of(place.module), transport(rank), chunks(), graphs=graphs)
            for rank, place in zip(layout.ranks, layout.engines, strict=True)
        ]
        super().__init__(network, self.frontend, [worker.run() for worker in self.workers])
