"""What a validation asks of a live plant. `live.validation.plant` is one; the twin knows it by these words alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latency_models.engine_steps import Step
from schedulers.batches import Batch
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.request import Request


class PlayedRun(Protocol):
    """What became of a workload. Times are seconds since its start."""

    @property
    def spans(self) -> Sequence[tuple[Batch, float, float]]:
        """Every step: its batch, its begin and its end."""

    @property
    def late(self) -> Sequence[float]:
        """Seconds by which requests reached the engine after their time."""

    def columns(self) -> Mapping[str, NDArray[np.float64]]:
        """One entry a request: arrival, first_token, last_token, output_tokens; and the `gaps` between tokens."""


class Plant(Protocol):
    """A model on a machine."""

    def probe(
        self,
        config: EngineConfig,
        *,
        rounds: int,
        steps: int,
        prompt: int,
        answer: int,
        seed: int,
        advance: Callable[[str], None],
    ) -> list[list[Step]]:
        """Timed steps of so many rounds, of random sizes up to so many tokens; `advance` is told of each round."""

    def play(
        self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]
    ) -> PlayedRun:
        """Send requests, each with the length of its answer, at their times to an engine with nothing in it."""

    def describe(self) -> dict[str, Any]:
        """device, dtype and versions."""
