"""A bundle on this machine, run by direct execution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.stages import MessageLink
from live.loaded_model import LoadedModel
from live.topologies.bundle.layout import BundleLayout
from live.topologies.bundle.measure import BundleRun, MeasuredBundle, run_in_turns
from live.topologies.direct_time import DirectTime
from live.validation.backend import model_source
from scenarios.validation import BundleValidationScenario
from schedulers.bundle_slots import REFILL_POLICIES
from schedulers.engine_config import EngineConfig

Integers = NDArray[np.int64]


class LiveBundle:
    """Bundles of the model of a scenario, loaded once, on the CPU."""

    def __init__(self, scenario: BundleValidationScenario, base: Path) -> None:
        self._model = LoadedModel(model_source(scenario.model, base, scenario.seed))
        self._system = scenario.system
        self._link: MessageLink = self._system.link.build()

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self._model.decoder.config.shape.layers

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's row, on its way to the FFN and back."""
        return self._model.decoder.config.shape.hidden * self._model.decoder.weights.norm.dtype.itemsize

    def run_in_turns(self, instances: int, loads: Sequence[tuple[Integers, Integers, int]]) -> list[BundleRun]:
        """Run bundles with `instances` attention instances each in turns of milliseconds, until the first is over."""
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
        return self._model.describe()
