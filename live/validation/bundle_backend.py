"""A bundle on this machine, run by direct execution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.message_link import MessageLink
from live.device import device_name, versions
from live.loaded_model import LoadedModel
from live.topologies.bundle.layout import BundleLayout
from live.topologies.bundle.measure import BundleRun, MeasuredBundle, run_in_turns
from live.topologies.direct_time import DirectTime
from scenarios.validation import BundleSystemSpec, LiveModelSpec
from schedulers.bundle_slots import REFILL_POLICIES
from schedulers.engine_config import EngineConfig

Integers = NDArray[np.int64]


def load_model(spec: LiveModelSpec, base: Path, seed: int) -> LoadedModel:
    """The model of a scenario, on the CPU; relative paths start from `base`.

    Raises:
        BadInput: as `LoadedModel`.
    """
    return LoadedModel(
        base / spec.path, random=spec.weights == "random", dtype=spec.dtype, device="cpu", threads=spec.threads,
        seed=seed, quantise=spec.quantise.model_dump() if spec.quantise else None,
    )  # fmt: skip


class LiveBundle:
    """Bundles of one model, loaded once.

    Args:
        link: between any two roles.
    """

    def __init__(self, model: LoadedModel, system: BundleSystemSpec) -> None:
        self._model, self._system = model, system
        self._link: MessageLink = system.link.build()

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self._model.decoder.config.shape.layers

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's row, on its way to the FFN and back."""
        return self._model.decoder.config.shape.hidden * self._model.decoder.weights.norm.dtype.itemsize

    def run_in_turns(self, instances: int, loads: Sequence[tuple[Integers, Integers, int]]) -> list[BundleRun]:
        """Run bundles with so many attention instances in turns of some milliseconds, until the first is over.

        Args:
            loads: of each bundle, prompt and output tokens of its prefilled requests, and how many are to complete.

        Raises:
            ValueError: a request that is too long for the model.
        """
        return run_in_turns([self._bundle(instances, *load) for load in loads])

    def _bundle(self, instances: int, prefill: Integers, decode: Integers, completions: int) -> MeasuredBundle:
        system = self._system
        blocks = system.batch_size * (int((prefill + decode).max()) // system.block_size + 2)
        config = EngineConfig(
            num_gpu_blocks=blocks, block_size=system.block_size, prefix_id_tokens=system.block_size,
            max_num_seqs=system.batch_size, max_num_batched_tokens=system.batch_size,
        )  # fmt: skip
        return MeasuredBundle(
            BundleLayout(instances, 1, system.microbatches, config), self._model.decoder, prefill, decode, completions,
            time=DirectTime(self._link), refill=REFILL_POLICIES.select(system.refill), prefilled=True,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""
        return {"device": device_name(self._model.device), "dtype": self._model.dtype, "versions": versions()}
