"""The link between the roles of a topology, in simulation and in direct execution."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageLink:
    """The link between any two roles; every pair has one of its own in each direction.

    Attributes:
        latency: seconds of a message of any size. bandwidth: bytes per second.
        overhead: CPU seconds that sending takes the sender and receiving the receiver (o of LogP). In direct execution
            they are added to what both really do.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    overhead: float = 0.0

    def seconds(self, size: int) -> float:
        """Time of a message of this many bytes."""
        return self.latency + size / self.bandwidth
