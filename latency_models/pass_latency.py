"""Latencies of a microbatch's pass through a bundle, as plain numbers for simulation and theory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassLatency:
    """Latencies of one pass attention → A→F → FFN → F→A, each a line α·x + β in the calibration's time unit (eq. 2-4).

    `communication` is the round trip; half of it goes each way.
    """

    attention: tuple[float, float]
    ffn: tuple[float, float]
    communication: tuple[float, float]
