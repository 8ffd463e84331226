"""What a validation asks of a live plant. `live.validation.plant` is one; the twin knows it by these words alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latency_models.engine_steps import Step
from latency_models.yardsticks import Reading
from schedulers.batches import Batch
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.request import Request


class Paced(Protocol):
    """Something that was timed while the machine's pace was read. Times are seconds since its start."""

    @property
    def readings(self) -> Sequence[Reading]:
        """When the pace was read, by how many rows, and what they took, seconds; the clock stood still meanwhile."""


class ProbedRounds(Paced, Protocol):
    """What probing gave."""

    @property
    def rounds(self) -> Sequence[Sequence[tuple[float, Step]]]:
        """Steps of each round, in order, with the times at which they began."""


class PlayedRun(Paced, Protocol):
    """What became of a workload."""

    @property
    def spans(self) -> Sequence[tuple[Batch, float, float]]:
        """Every step: its batch, its begin and its end."""

    @property
    def token_times(self) -> Sequence[Sequence[float]]:
        """When each token of each request came."""

    def columns(self) -> Mapping[str, NDArray[np.float64]]:
        """One entry a request: arrival, noticed (the engine took it in), first_token, last_token, output_tokens."""


class Plant(Protocol):
    """A model on a machine."""

    @property
    def yardsticks(self) -> Sequence[int]:
        """Rows of those by which it reads the pace; none: it does not."""

    def probe(
        self,
        config: EngineConfig,
        *,
        rounds: int,
        steps: int,
        prompt: int,
        answer: int,
        seed: int,
    ) -> ProbedRounds:
        """Timed steps of so many rounds, of random sizes up to so many tokens."""

    def warm_up(
        self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]
    ) -> bool:
        """Pay for whatever such work costs but once, before it is timed; False if there is nothing of the kind."""

    def play(
        self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]
    ) -> PlayedRun:
        """Send requests, each with the length of its answer, at their times to an engine with nothing in it."""

    def describe(self) -> dict[str, Any]:
        """device, dtype and versions."""
