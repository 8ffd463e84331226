"""A model on this machine and its engines. On a GPU, CUDA graphs are captured once for all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from live.clock import CLOCKS, Clock, ClockName
from live.device import device_name, versions
from live.engine import Engine
from live.loaded_model import LoadedModel
from live.validation.machine_speed import MachineSpeedReader, SpeedReadings
from live.validation.profiling import ProfilingLimits, ProfilingResult, profile
from live.validation.prompts import materialise
from live.validation.replay import ReplayResult, replay
from scenarios.validation import ProfilingSpec
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.request import Request


class LiveBackend(LoadedModel):
    """One model, loaded once.

    Args:
        path: a Hugging Face directory, or with `random` weights a config.json.
        threads: CPU threads of one operation.
        quantise: fields of `Rounding`, to round linear layers; None: no rounding.
        async_scheduling: engines schedule a step while the step before it still runs.
        clock: the clock of timed runs (`live.clock`).
        machine_speed_share: share of the time for reading the machine's speed between steps; None: it is not read.

    Raises:
        BadInput: a model that cannot be read or does not fit, a device that does not exist, or too many threads.
    """

    def __init__(
        self, path: Path, *, random: bool, dtype: str, device: str, threads: int, seed: int,
        quantise: Mapping[str, Any] | None = None, async_scheduling: bool = False,
        clock: ClockName = "wall", machine_speed_share: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            path, random=random, dtype=dtype, device=device, threads=threads, seed=seed, quantise=quantise,
            async_scheduling=async_scheduling,
        )  # fmt: skip
        assert clock == "wall" or (device == "cpu" and threads == 1), "CPU time is elapsed time on one thread only"
        self._clock = CLOCKS[clock]
        self._speed = MachineSpeedReader(self.decoder, machine_speed_share) if machine_speed_share else None

    def profile(self, config: EngineConfig, spec: ProfilingSpec, seed: int) -> ProfilingResult:
        """Time steps of random requests (`live.validation.profiling`). On a GPU the same steps run untimed first.

        Raises:
            ValueError: lengths that the engine refuses.
        """
        limits = ProfilingLimits(
            spec.max_prompt_tokens, spec.max_output_tokens, config.max_num_seqs, spec.rounds, spec.max_steps
        )
        if self.uses_graphs:
            profile(lambda: self.engine(config), limits, self.vocabulary, seed)
        return profile(lambda: self._settled(config), limits, self.vocabulary, seed, *self._timing())

    def warm_up(
        self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]
    ) -> bool:
        """Replay a workload to capture graphs of its steps. False, without a replay, where there are no graphs.

        Raises:
            ValueError: as `replay`.
        """
        if self.uses_graphs:
            self.replay(config, chunks, requests)
        return self.uses_graphs

    def replay(
        self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]
    ) -> ReplayResult:
        """Send each request, paired with its number of output tokens, to an empty engine at its arrival time.

        Raises:
            ValueError: a request that the engine refuses.
        """
        generations = [
            materialise(request, answer, self.vocabulary, config.prefix_id_tokens) for request, answer in requests
        ]
        return replay(self._settled(config, chunks), generations, *self._timing())

    def _settled(self, config: EngineConfig, chunks: ChunkPolicy | None = None) -> Engine:
        """An engine to be timed: it captures no more graphs, which would pause it."""
        engine = self.engine(config, chunks)
        engine.executor.freeze_graphs()
        return engine

    def _timing(self) -> tuple[Clock, SpeedReadings | None]:
        """A new clock, and readings of the machine's speed by it if they are wanted."""
        clock = self._clock()
        return clock, self._speed.during(clock) if self._speed else None

    @property
    def speed_probe_rows(self) -> Sequence[int]:
        """Rows of each speed probe; empty where the machine's speed is not read."""
        return self._speed.rows if self._speed else ()

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""
        return {"device": device_name(self.device), "dtype": self.dtype, "versions": versions()}
