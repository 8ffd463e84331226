"""A model on this machine, and engines around it: on a GPU with graphs, which are captured once for all engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from live.block_pool import BlockPool
from live.device import device_name, versions
from live.engine import Engine
from live.graphs.executor import GraphExecutor
from live.memory import keep_freed_memory
from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.weights import load_weights, random_weights
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.errors import BadInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LivePlant:
    """One model, loaded once.

    Args:
        path: a Hugging Face directory, or with `random` weights a config.json.
        threads: of the CPU that one operation may use.

    Raises:
        BadInput: a model that cannot be read, or a device that is not there.
    """

    def __init__(self, path: Path, *, random: bool, dtype: str, device: str, threads: int, seed: int) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise BadInput("expected a machine with a CUDA device", field="--backend", value=device)
        torch.set_num_threads(threads)
        if device == "cpu":
            keep_freed_memory()
        config = read_config(path)
        kind = DTYPES[dtype]
        weights = random_weights(config, kind, device, seed) if random else load_weights(path, config, kind, device)
        self.decoder = Decoder(config, weights)
        self.device, self.dtype, self.threads = device, dtype, threads
        self._kept: dict[EngineConfig, GraphExecutor] = {}

    @property
    def vocabulary(self) -> int:
        """Token ids there are."""
        return self.decoder.config.shape.vocabulary

    def engine(self, config: EngineConfig, chunks: ChunkPolicy | None = None, *, ahead: bool = False) -> Engine:
        """An engine with nothing in it; on a GPU there is one of the same settings at a time.

        `ahead`: it decides a step while the one before still runs.
        """
        depth = 2 if ahead else 1
        if self.device == "cpu":
            return Engine(self.decoder, config, chunks, depth=depth)
        return Engine(self.decoder, config, chunks, make_executor=self.graphs, depth=depth)

    def graphs(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> GraphExecutor:
        """An executor whose decode steps are captured, kept for the next engine of the same settings."""
        kept = self._kept.get(config)
        if kept is not None:
            return kept.renewed(pool)
        made = self._kept[config] = GraphExecutor(decoder, pool, config)
        made.warm(made.buckets.decoding())
        return made

    def describe(self) -> dict[str, Any]:
        """The device and the versions that ran."""
        return {"device": device_name(self.device), "dtype": self.dtype, "versions": versions()}
