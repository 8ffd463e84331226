"""All workers of a topology in the server's process, one at a time: for one GPU, and for machines with few cores.

On a GPU each role has a CUDA stream (`live.topologies.streams`), so that their kernels overlap. On a CPU the workers
take turns, and nothing overlaps.
"""

from __future__ import annotations

import threading

import torch

from live.loaded_model import SharedModels
from live.memory import freeze_loaded_objects
from live.topologies.deployment import Deployment
from live.topologies.local import LocalNetwork
from live.topologies.streams import RoleStreams
from live.topologies.transport import Role, Transport, TransportError


class InProcessWorkers:
    """The workers of a topology in this process, which share weights, and the means to drive the front's role."""

    def __init__(self, deployment: Deployment) -> None:
        self._ranks = range(1, len(deployment.names))
        streams = RoleStreams() if deployment.device != "cpu" else None
        self._network = LocalNetwork(deployment.forms(), streams, streams)
        self._transport = self._network.transport(0)
        models = SharedModels()
        make = {rank: deployment.load(rank, models) for rank in self._ranks}
        with torch.inference_mode():
            self._roles = {rank: make[rank](self._network.transport(rank)) for rank in self._ranks}
        self._woken = threading.Event()
        self._disconnected = False
        freeze_loaded_objects()

    @property
    def transport(self) -> Transport:
        return self._transport

    def run(self, role: Role) -> None:
        self._network.start({0: role, **self._roles})
        while not self._disconnected:
            self._network.run()
            if self._network.ended:
                return
            self._woken.wait()
            self._woken.clear()
            self._network.wake(0)

    def wake(self) -> None:
        self._woken.set()

    def fail(self, reason: str) -> TransportError:
        return TransportError(reason)

    def disconnect(self) -> None:
        self._disconnected = True
        self._woken.set()

    def close(self) -> None:
        """Nothing: the workers end with the role that drives them."""
