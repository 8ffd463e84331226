"""A model loaded on a device, and engines that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from live.block_pool import BlockPool
from live.device import device_name, use_threads
from live.engine import Engine
from live.executor import Executor
from live.graphs.executor import GraphExecutor
from live.memory import check_memory, keep_freed_memory, use_huge_pages
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.linear import Rounding
from live.models.weights import FFN, ffns_of, load_ffns, load_weights, model_bytes, random_weights, without_ffns
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSource:
    """The origin of a model and the device that runs it, as `LoadedModel` takes them.

    Attributes:
        path: a Hugging Face directory, or with `random` weights a config.json. seed: of random weights.
    """

    path: Path
    random: bool
    dtype: str
    device: str
    threads: int
    seed: int = 0

    def config(self) -> ModelConfig:
        """The model's config; reads no weights.

        Raises:
            BadInput: a config that cannot be read.
        """
        return read_config(self.path)

    def load_attention(self) -> Decoder:
        """The decoder of a process that computes no FFN. Raises as `LoadedModel`."""
        config, dtype = self._prepare()
        if self.random:
            return Decoder(config, without_ffns(random_weights(config, dtype, self.device, self.seed)))
        return Decoder(config, load_weights(self.path, config, dtype, self.device, with_ffn=False))

    def load_ffns(self) -> list[FFN]:
        """The FFNs of all layers. Raises as `LoadedModel`."""
        config, dtype = self._prepare()
        if self.random:
            return ffns_of(random_weights(config, dtype, self.device, self.seed))
        return load_ffns(self.path, config, dtype, self.device)

    def _prepare(self) -> tuple[ModelConfig, torch.dtype]:
        device_name(self.device)
        use_threads(self.threads)
        if self.device == "cpu":
            keep_freed_memory()
            use_huge_pages()
        config, dtype = self.config(), DTYPES[self.dtype]
        check_memory(model_bytes(config, dtype), f"weights in {self.dtype}", self.device, file=self.path)
        return config, dtype


class LoadedModel:
    """One model, loaded once; on a GPU its CUDA graphs are captured once for all engines of the same settings.

    Args:
        path: a Hugging Face directory, or with `random` weights a config.json. seed: of random weights.
        threads: CPU threads that one operation may use.
        quantise: fields of `Rounding`, to round linear layers; None for none.
        async_scheduling: engines schedule a step while the one before still runs.

    Attributes:
        decoder: the model. device, dtype: by name. uses_graphs: whether engines replay CUDA graphs.

    Raises:
        BadInput: a model that cannot be read or does not fit, a missing device, or too many threads.
    """

    def __init__(
        self,
        path: Path,
        *,
        random: bool,
        dtype: str,
        device: str,
        threads: int,
        seed: int = 0,
        quantise: Mapping[str, Any] | None = None,
        async_scheduling: bool = False,
    ) -> None:
        device_name(device)
        use_threads(threads)
        if device == "cpu":
            keep_freed_memory()
            use_huge_pages()
        config = read_config(path)
        torch_dtype = DTYPES[dtype]
        rounding = None if quantise is None else Rounding(**quantise)
        check_memory(model_bytes(config, torch_dtype, rounding), f"weights in {dtype}", device, file=path)
        if random:
            weights = random_weights(config, torch_dtype, device, seed, rounding)
        else:
            weights = load_weights(path, config, torch_dtype, device, rounding)
        self.decoder = Decoder(config, weights)
        self.device, self.dtype = device, dtype
        self.uses_graphs = device != "cpu"
        self._depth = 2 if async_scheduling else 1
        self._executors: dict[EngineConfig, GraphExecutor] = {}

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.decoder.config.shape.vocabulary

    def engine(self, config: EngineConfig, chunks: ChunkPolicy | None = None) -> Engine:
        """An engine without requests. On a GPU, only the latest engine of the same settings may be used."""
        make = self._graph_executor if self.uses_graphs else Executor
        return Engine(self.decoder, config, chunks, make_executor=make, depth=self._depth)

    def _graph_executor(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> GraphExecutor:
        """An executor with captured decode steps, reused by the next engine of the same settings."""
        executor = self._executors.get(config)
        if executor is not None:
            return executor.reset(pool)
        executor = self._executors[config] = GraphExecutor(decoder, pool, config)
        if decoder.weights.head is not None:
            executor.warm_up(executor.capture_sizes.decode_shapes())
        return executor
