"""Pipeline stages and their layers, the lines of a bundle's pass, and links between stages and roles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

TENSORS_SENT = 2
"""Tensors of the hidden size that a stage sends for each token: hidden states and the residual, as vLLM does."""


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as vLLM divides them (`get_pp_indices` in vllm/distributed/utils.py).

    Of those that remain, the last stage, with the output head, gets none; others one each, from the last but one back.
    """
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    return counts


@dataclass(frozen=True)
class StageLink:
    """The link from one stage to the next: seconds, bytes/s, and bytes of the activations of a token."""

    latency: float
    bandwidth: float
    bytes_per_token: float

    def seconds(self, tokens: int) -> float:
        """Seconds of the message of a batch of `tokens` rows."""
        return self.latency + tokens * self.bytes_per_token / self.bandwidth


@dataclass(frozen=True)
class Stages:
    """The pipeline of one engine: layers of each stage, and the link between; None: the step times know it."""

    layers: tuple[int, ...]
    link: StageLink | None = None

    @property
    def shares(self) -> list[float]:
        """The share of the layers that each stage has; of a single stage exactly 1."""
        total = sum(self.layers)
        return [layers / total for layers in self.layers]


def split(seconds: float, shares: Sequence[float]) -> list[float]:
    """Seconds of each stage, of a duration that all layers have alike."""
    return [share * seconds for share in shares]


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


@dataclass(frozen=True, slots=True)
class PassLatency:
    """Latencies of one pass attention → A→F → FFN → F→A, each a line α·x + β in the calibration's time unit (eq. 2-4).

    `communication` is the round trip; half of it goes each way.
    """

    attention: tuple[float, float]
    ffn: tuple[float, float]
    communication: tuple[float, float]
