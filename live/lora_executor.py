"""Runs batches whose sequences have LoRA adapters of one base model."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

import torch

from live.block_pool import BlockPool
from live.executor import Executor
from live.models.decoder import Decoder, Inputs
from live.models.lora import ActiveAdapters, Adapter, adapted
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence


class LoRAExecutor(Executor):
    """An executor that computes the adapters of a batch beside the base model, kernel by kernel.

    Those that the scheduler has put into slots are copied to the device when their first step is launched.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig, adapters: Iterable[Adapter]) -> None:
        self._active = ActiveAdapters()
        super().__init__(adapted(decoder, self._active), pool, config)
        assert config.model_slots is not None, "adapters have slots"
        self.slots: dict[str, Adapter] = {}
        self._base = config.model_slots.base
        self._in_host = {adapter.name: adapter for adapter in adapters}
        self._grouped = -1  # version of the decodes that the active adapters are of; -1: of a step with prompts

    def step_inputs(self, batch: Batch) -> Inputs:
        """See `Executor.step_inputs`; the batch's adapters are active from now on."""
        inputs = super().step_inputs(batch)
        for load in batch.loads:
            self.slots.pop(load.replaces, None)
            self.slots[load.model] = self._in_host[load.model].to(self.device)
        decodes = self.input_batch
        if batch.chunks or self._grouped != decodes.version:
            rows = [*decodes.sequences]
            for chunk in batch.chunks:
                rows += [chunk.sequence] * chunk.tokens
            self._active.groups = self._groups(rows)
            self._grouped = -1 if batch.chunks else decodes.version
        return inputs

    def _groups(self, rows: Many[Sequence]) -> list[tuple[Adapter, slice | torch.Tensor]]:
        by_model: dict[str, list[int]] = {}
        for row, sequence in enumerate(rows):
            if sequence.request.model != self._base:
                by_model.setdefault(sequence.request.model, []).append(row)
        groups: list[tuple[Adapter, slice | torch.Tensor]] = []
        for model, model_rows in by_model.items():
            neighbours = model_rows[-1] - model_rows[0] + 1 == len(model_rows)
            index = (
                slice(model_rows[0], model_rows[-1] + 1) if neighbours else torch.tensor(model_rows, device=self.device)
            )
            groups.append((self.slots[model], index))
        return groups
