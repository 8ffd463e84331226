"""A model on this machine, and engines around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from live.device import device_name, versions
from live.engine import Engine
from live.memory import keep_freed_memory
from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.linear import Rounding
from live.models.weights import load_weights, random_weights
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from workloads.errors import BadInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LivePlant:
    """One model, loaded once.

    Args:
        path: a Hugging Face directory, or with `random` weights a config.json.
        threads: of the CPU that one operation may use. quantise: fields of `Rounding`, for linear layers that are to be
            rounded; None for none.

    Raises:
        BadInput: a model that cannot be read, or a device that is not there.
    """

    def __init__(
        self, path: Path, *, random: bool, dtype: str, device: str, threads: int, seed: int,
        quantise: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if device == "cuda" and not torch.cuda.is_available():
            raise BadInput("expected a machine with a CUDA device", field="--backend", value=device)
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

    @property
    def vocabulary(self) -> int:
        """Token ids there are."""
        return self.decoder.config.shape.vocabulary

    def engine(self, config: EngineConfig, chunks: ChunkPolicy | None = None) -> Engine:
        """An engine with nothing in it."""
        return Engine(self.decoder, config, chunks)

    def describe(self) -> dict[str, Any]:
        """The device and the versions that ran."""
        return {"device": device_name(self.device), "dtype": self.dtype, "versions": versions()}
