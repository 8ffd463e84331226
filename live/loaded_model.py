"""A model loaded on a device, and engines that run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from live.block_pool import BlockPool
from live.device import check_memory, device_name, keep_freed_memory, use_huge_pages, use_threads, versions
from live.engine import Engine
from live.executor import Executor, LoRAExecutor
from live.generation import GREEDY, make_generation
from live.graphs.executor import GraphExecutor, pad_steps
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.linear import Group, Rounding
from live.models.lora import Adapter
from live.models.tensor_parallel import config_of_rank, layer_of_rank
from live.models.weights import (
    FFN,
    Weights,
    ffns_of,
    load_ffns,
    load_weights,
    model_bytes,
    random_weights,
    without_ffns,
)
from scenarios.engine import SchedulerPlan
from schedulers.engine_config import EngineConfig
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput

MEASURED_BLOCK = 16
"""Block size of the KV cache of a measured step; it does not matter."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelSource:
    """The origin of a model (a directory, or with `random` weights a config.json) and the device that runs it.

    `rounding`: of the linear layers of a whole model; None: they stay as they are. `attention_backend`: of a `Decoder`;
    None: its default.
    """

    path: Path
    random: bool
    dtype: str
    device: str
    threads: int
    seed: int = 0
    rounding: Rounding | None = None
    attention_backend: str | None = None

    def config(self) -> ModelConfig:
        """The model's config, without its weights; `BadInput` if it cannot be read."""
        return read_config(self.path)

    def load(self) -> Decoder:
        """The whole model. Raises as `LoadedModel`."""
        config, dtype = self._prepare(self.rounding)
        decoder = Decoder(config, self._weights(config, dtype, self.rounding))
        decoder.attention_backend = self.attention_backend or decoder.attention_backend
        return decoder

    def load_part(self, group: Group) -> tuple[ModelConfig, Weights]:
        """One rank's part of the whole model; the LM head is rank 0's. Raises as `LoadedModel`."""
        whole, dtype = self._prepare(self.rounding, group.size)
        keep, with_head = partial(layer_of_rank, shape=whole.shape, group=group), not group.rank
        if self.random:
            weights = random_weights(whole, dtype, self.device, self.seed, self.rounding, keep)
        else:
            weights = load_weights(self.path, whole, dtype, self.device, self.rounding, with_head=with_head, keep=keep)
        return config_of_rank(whole, group.size), weights

    def load_attention(self) -> Decoder:
        """The decoder of a process that computes no FFN. Raises as `LoadedModel`."""
        config, dtype = self._prepare()
        if self.random:
            return Decoder(config, without_ffns(self._weights(config, dtype)))
        return Decoder(config, load_weights(self.path, config, dtype, self.device, with_ffn=False))

    def load_ffns(self) -> list[FFN]:
        """The FFNs of all layers. Raises as `LoadedModel`."""
        config, dtype = self._prepare()
        return (
            ffns_of(self._weights(config, dtype)) if self.random else load_ffns(self.path, config, dtype, self.device)
        )

    def _weights(self, config: ModelConfig, dtype: torch.dtype, rounding: Rounding | None = None) -> Weights:
        if self.random:
            return random_weights(config, dtype, self.device, self.seed, rounding)
        return load_weights(self.path, config, dtype, self.device, rounding)

    def _prepare(self, rounding: Rounding | None = None, ranks: int = 1) -> tuple[ModelConfig, torch.dtype]:
        """Set up the device, and check that it is there and has the memory for one of several ranks."""
        device_name(self.device)
        use_threads(self.threads)
        if self.device == "cpu":
            keep_freed_memory()
            use_huge_pages()
        config, dtype = self.config(), DTYPES[self.dtype]
        part = config_of_rank(config, ranks)
        check_memory(model_bytes(part, dtype, rounding), f"weights in {self.dtype}", self.device, file=self.path)
        return config, dtype


@dataclass(frozen=True)
class LoadedSource(ModelSource):
    """A model that has been loaded, as the origin of further workers' models."""

    decoder: Decoder = field(kw_only=True)

    @classmethod
    def of(cls, decoder: Decoder) -> LoadedSource:
        norm = decoder.weights.norm
        (dtype,) = (name for name, dtype in DTYPES.items() if dtype == norm.dtype)
        return cls(Path(), True, dtype, norm.device.type, 1, decoder=decoder)

    def config(self) -> ModelConfig:
        return self.decoder.config

    def load(self) -> Decoder:
        return self.decoder


class Models:
    """Loads the parts of models that workers compute with: here for one worker, no more than it needs."""

    def decoder(self, source: ModelSource) -> Decoder:
        return source.load()

    def attention(self, source: ModelSource) -> Decoder:
        """A model without FFNs."""
        return source.load_attention()

    def ffns(self, source: ModelSource) -> list[FFN]:
        """The FFNs of all layers."""
        return source.load_ffns()


class SharedModels(Models):
    """Models for several workers in one process, each loaded once; workers get their own counters of kernels."""

    def __init__(self) -> None:
        self._decoders: dict[ModelSource, Decoder] = {}

    def decoder(self, source: ModelSource) -> Decoder:
        decoder = self._decoders.get(source)
        if decoder is None:
            decoder = self._decoders[source] = source.load()
        return decoder.for_another_stream()

    def attention(self, source: ModelSource) -> Decoder:
        decoder = self.decoder(source)
        return Decoder(decoder.config, without_ffns(decoder.weights))

    def ffns(self, source: ModelSource) -> list[FFN]:
        return ffns_of(self.decoder(source).weights)


class ModelRanks(Protocol):
    """The processes that compute a model together (`live.topologies.tensor_parallel`), of which this is the first."""

    @property
    def decoder(self) -> Decoder:
        """This process's part, which runs each step on all ranks."""

    def refuse(self, config: EngineConfig) -> None:
        """Raise BadInput for settings that ranks do not have."""

    def on_failure(self, action: Callable[[str], None]) -> None:
        """Let something be called, from any thread, with the reason when a rank has failed."""

    def close(self) -> None:
        """End the other processes."""


class LoadedModel:
    """One model, loaded once; on a GPU its CUDA graphs are captured once for all engines of the same settings.

    `async_scheduling`: engines schedule a step while the one before still runs. `start_ranks`: starts the processes of
    a tensor-parallel model. Raises `BadInput` for a model that cannot be read or does not fit, a missing device, or too
    many threads.
    """

    def __init__(
        self, source: ModelSource, *, async_scheduling: bool = False,
        start_ranks: Callable[[ModelSource], ModelRanks] | None = None,
    ) -> None:  # fmt: skip
        self.ranks = None if start_ranks is None else start_ranks(source)
        self.decoder = source.load() if self.ranks is None else self.ranks.decoder
        self.device = source.device
        self.dtype = source.dtype
        self.uses_graphs = source.device != "cpu" and self.ranks is None
        self._depth = 2 if async_scheduling else 1
        self._executors: dict[EngineConfig, GraphExecutor] = {}

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.decoder.config.shape.vocabulary

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""
        return {"device": device_name(self.device), "dtype": self.dtype, "versions": versions()}

    def peak_step_bytes(self, sequences: int, tokens: int) -> int:
        """Bytes on a GPU that the largest step takes at its peak, beyond weights and KV cache, as measured."""
        count = min(sequences, tokens)
        prompt = [0] * (tokens // count)
        config = EngineConfig(
            num_gpu_blocks=count * (len(prompt) // MEASURED_BLOCK + 1), block_size=MEASURED_BLOCK, max_num_seqs=count,
            max_num_batched_tokens=tokens, enable_prefix_caching=False,
        )  # fmt: skip
        engine = Engine(self.decoder, config)
        generates = self.decoder.weights.head is not None
        for i in range(count):
            task = "generate" if generates else "embed"
            engine.submit(make_generation(i, prompt, int(generates), sampling_params=GREEDY, task=task))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        while engine.step() is not None:
            pass
        peak = int(torch.cuda.max_memory_allocated() - allocated)
        del engine
        torch.cuda.empty_cache()
        return peak

    def engine(self, config: EngineConfig, chunks: ChunkPolicy | None = None) -> Engine:
        """An engine without requests. On a GPU, only the latest engine of the same settings may be used."""
        make = self._graph_executor if self.uses_graphs else Executor
        return Engine(self.decoder, config, chunks, make_executor=make, depth=self._depth)

    def planned_engine(self, scheduler: SchedulerPlan) -> Engine:
        """An engine with the scheduler of a plan; `BadInput` for what the live engine does not have."""
        if self.ranks is not None:
            self.ranks.refuse(scheduler.config)
        spec = scheduler.speculation
        if spec is None:
            return self.engine(scheduler.config, scheduler.chunk_policy())
        if spec.method != "ngram":
            expected = "expected ngram: the live engine has no draft model"
            raise BadInput(expected, field="engine.speculative_config.method", value=spec.method)
        from live.speculation import SpeculativeEngine

        shortest, longest = spec.prompt_lookup_min, spec.prompt_lookup_max
        engine = SpeculativeEngine(self.decoder, scheduler.config, scheduler.make_core, shortest, longest)
        return self._padded(engine, scheduler.config)

    def lora_engine(self, config: EngineConfig, adapters: Sequence[Adapter]) -> Engine:
        """An engine whose requests may name one of several adapters."""
        make = partial(LoRAExecutor, adapters=adapters, fixed=self.uses_graphs)
        return self._padded(Engine(self.decoder, config, make_executor=make), config)

    def _padded(self, engine: Engine, config: EngineConfig) -> Engine:
        if self.uses_graphs:
            pad_steps(engine.executor, config)
        return engine

    def close(self) -> None:
        """End the other ranks."""
        if self.ranks is not None:
            self.ranks.close()

    def _graph_executor(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> GraphExecutor:
        """An executor with captured decode steps, reused by the next engine of the same settings."""
        executor = self._executors.get(config)
        if executor is not None:
            return executor.reset(pool)
        executor = self._executors[config] = GraphExecutor(decoder, pool, config)
        executor.capture_ahead()
        return executor
