"""The link between the roles of a topology, in simulation and in direct execution."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageLink:
    """The link between any two roles, one in each direction: seconds of a message, bytes per second.

    `overhead`: CPU seconds of sender and receiver (o of LogP), added in direct execution to what both really do.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0

    def seconds(self, size: int) -> float:
        """Time of a message of this many bytes."""
        return self.latency + size / self.bandwidth
