"""A model on this machine, and engines around it: on a GPU with graphs, which are captured once for all engines."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from live.block_pool import BlockPool
from live.device import device_name, versions
from live.engine import Engine
from live.executor import Executor
from live.graphs.executor import GraphExecutor
from live.memory import keep_freed_memory
from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.linear import Rounding
from live.models.weights import load_weights, random_weights
from live.validation.pace import SIZES, PacedClock, Yardstick
from live.validation.play import Played, play
from live.validation.probe import Probed, Reach, probe
from live.validation.prompts import materialise
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.request import Request

WARM = 5
"""Readings of a yardstick that do not count, since the first ones pay for memory and code that others find there."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LivePlant:
    """One model, loaded once.

    Args:
        path: a Hugging Face directory, or with `random` weights a config.json.
        threads: of the CPU that one operation may use. quantise: fields of `Rounding`, for linear layers that are to be
            rounded; None for none.
        ahead: engines decide a step while the one before still runs.
        pace_share: of all time, that goes to reading the machine's pace between steps. A GPU is taken to hold still.

    Raises:
        BadInput: a model that cannot be read, or a device that is not there.
    """

    def __init__(
        self, path: Path, *, random: bool, dtype: str, device: str, threads: int, seed: int,
        quantise: Mapping[str, Any] | None = None, ahead: bool = False, pace_share: float = 0.0,
    ) -> None:  # fmt: skip
        device_name(device)
        torch.set_num_threads(threads)
        if device == "cpu":
            keep_freed_memory()
        config = read_config(path)
        kind = DTYPES[dtype]
        rounding = None if quantise is None else Rounding(**quantise)
        if random:
            weights = random_weights(config, kind, device, seed, rounding)
        else:
            weights = load_weights(path, config, kind, device, rounding)
        self.decoder = Decoder(config, weights)
        self.device, self.dtype, self.threads = device, dtype, threads
        self._depth, self._pace_share = 2 if ahead else 1, pace_share if device == "cpu" else 0.0
        self._has_graphs = device != "cpu"
        self._kept: dict[EngineConfig, GraphExecutor] = {}

    @property
    def vocabulary(self) -> int:
        """Token ids there are."""
        return self.decoder.config.shape.vocabulary

    def engine(self, config: EngineConfig, chunks: ChunkPolicy | None = None) -> Engine:
        """An engine with nothing in it; on a GPU there is one of the same settings at a time."""
        make = self.graphs if self._has_graphs else Executor
        return Engine(self.decoder, config, chunks, make_executor=make, depth=self._depth)

    def graphs(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> GraphExecutor:
        """An executor whose decode steps are captured, kept for the next engine of the same settings."""
        kept = self._kept.get(config)
        if kept is not None:
            return kept.renewed(pool)
        made = self._kept[config] = GraphExecutor(decoder, pool, config)
        if decoder.weights.head is not None:
            made.warm(made.buckets.decoding())
        return made

    def probe(
        self,
        config: EngineConfig,
        *,
        rounds: int,
        steps: int,
        prompt: int,
        answer: int,
        seed: int,
    ) -> Probed:
        """Timed steps, as `live.validation.probe` makes them; on a GPU after the same steps have run untimed.

        Raises:
            ValueError: sizes that the engine refuses.
        """
        reach = Reach(prompt, answer, config.max_num_seqs, rounds, steps)
        if self._has_graphs:
            probe(lambda: self.engine(config), reach, self.vocabulary, seed)
        return probe(lambda: self._settled(config), reach, self.vocabulary, seed, self.clock)

    def warm_up(
        self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]
    ) -> bool:
        """Play a workload for the shapes of its steps alone, where there are graphs; whether it was.

        Raises:
            ValueError: as `play`.
        """
        if self._has_graphs:
            self.play(config, chunks, requests)
        return self._has_graphs

    def play(self, config: EngineConfig, chunks: ChunkPolicy | None, requests: Sequence[tuple[Request, int]]) -> Played:
        """Send requests, each with the length of its answer, at their times to an engine with nothing in it.

        Raises:
            ValueError: a request that the engine refuses.
        """
        generations = [
            materialise(request, answer, self.vocabulary, config.block_tokens, config.prefix_id_tokens)
            for request, answer in requests
        ]
        return play(self._settled(config, chunks), generations, self.clock)

    def _settled(self, config: EngineConfig, chunks: ChunkPolicy | None = None) -> Engine:
        """An engine that is to be timed: it makes no graphs on its way, which would be pauses."""
        engine = self.engine(config, chunks)
        engine.executor.settle()
        return engine

    def clock(self) -> PacedClock:
        """A new one, which gives the plant's share of the time to the yardstick."""
        if not self._pace_share:
            return PacedClock()
        return PacedClock(self.yardstick, self._pace_share, self.yardsticks)

    @functools.cached_property
    def yardstick(self) -> Yardstick:
        """Warm."""
        made = Yardstick(self.decoder)
        for rows in [*self.yardsticks] * WARM:
            made(rows)
        return made

    @property
    def yardsticks(self) -> Sequence[int]:
        """Rows of those by which the pace is read; none where it is not."""
        return SIZES if self._pace_share else ()

    def describe(self) -> dict[str, Any]:
        """The device and the versions that ran."""
        return {"device": device_name(self.device), "dtype": self.dtype, "versions": versions()}
