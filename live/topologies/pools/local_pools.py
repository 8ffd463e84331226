"""Engines that all run in this process, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from live.engine import Progress
from live.generation import Generation
from live.models.decoder import Decoder
from live.topologies.local import Handover, LocalNetwork, PackedMessages, Timekeeper
from live.topologies.pools.frontend import Frontend
from live.topologies.pools.layout import FRONT, PoolsLayout, pool_forms
from live.topologies.pools.worker import EngineWorker
from live.topologies.transport import Role
from schedulers.chunking import ChunkPolicy


class LocalPools:
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
        on_progress: Callable[[Progress], None] = lambda progress: None,
        chunks: Callable[[], ChunkPolicy | None] = lambda: None,
    ) -> None:
        shared = decoder_of(None)
        config = shared.config
        tokens = min(place.config.num_gpu_blocks * place.config.block_size for place in layout.engines)
        dtype: torch.dtype = shared.weights.norm.dtype
        forms = pool_forms(layout, config, dtype)
        self.network = LocalNetwork(forms, timekeeper, PackedMessages(forms) if packed else handover)
        transport = self.network.transport
        longest = min(config.max_position_embeddings, tokens)
        self.frontend = Frontend(layout, longest, transport(FRONT), on_progress)
        self.workers = [
            EngineWorker(layout, rank, decoder_of(place.module), transport(rank), chunks(), graphs=graphs)
            for rank, place in zip(layout.ranks, layout.engines, strict=True)
        ]
        roles: list[Role] = [self.frontend.run(), *(worker.run() for worker in self.workers)]
        self.network.start(dict(enumerate(roles)))

    def submit(self, generation: Generation) -> None:
        """Queue a request. Raises as `Frontend.check`."""
        self.frontend.submit(generation)

    def run(self) -> None:
        """Run until all requests are finished."""
        self.network.wake(FRONT)
        self.network.run()

    def stop(self) -> None:
        """Abort all requests and end the workers; again it changes nothing."""
        self.frontend.stop()
        self.run()
