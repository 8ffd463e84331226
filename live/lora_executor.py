"""Runs batches whose sequences have LoRA adapters of one base model."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch

from live.block_pool import BlockPool
from live.executor import Executor
from live.models.decoder import Decoder, Inputs
from live.models.lora import ActiveAdapters, Adapter, AdapterSlots, adapted
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence


class LoRAExecutor(Executor):
    """An executor that computes the adapters of a batch beside the base model.

    Those that the scheduler has put into slots are copied to the device when their first step is launched. Rows are
    grouped by adapter, or with `fixed` computed by `AdapterSlots`, as captured steps ask for; then `slot_of` has the
    number of each loaded adapter's slot, and `slots` nothing.
    """

    def __init__(
        self, decoder: Decoder, pool: BlockPool, config: EngineConfig, adapters: Many[Adapter], *, fixed: bool = False
    ) -> None:
        self._active = ActiveAdapters()
        super().__init__(adapted(decoder, self._active), pool, config)
        assert config.model_slots is not None, "adapters have slots"
        self.slots: dict[str, Adapter] = {}
        self._base = config.model_slots.base
        self._in_host = {adapter.name: adapter for adapter in adapters}
        self._grouped = -1  # version of the decodes that the active adapters are of; -1: of a step with prompts
        self._numbers = list(range(config.model_slots.slots))  # of free slots
        self.slot_of: dict[str, int] = {}
        if fixed:
            self._active.slots = AdapterSlots(adapters, len(self._numbers), decoder.weights.norm)
            self.forward = self._forward_with_slots

    def step_inputs(self, batch: Batch) -> Inputs:
        """See `Executor.step_inputs`; the batch's adapters are active from now on."""
        inputs = super().step_inputs(batch)
        for load in batch.loads:
            self._load(load.model, load.replaces)
        decodes, fixed = self.input_batch, self._active.slots
        if fixed is None and not batch.chunks and self._grouped == decodes.version:
            return inputs
        rows = [*decodes.sequences]
        for chunk in batch.chunks:
            rows += [chunk.sequence] * chunk.tokens
        if fixed is not None:
            numbers = [self.slot_of.get(sequence.request.model, -1) for sequence in rows]
            return replace(inputs, adapters=torch.tensor(numbers, dtype=torch.int64))
        self._active.groups = self._groups(rows)
        self._grouped = -1 if batch.chunks else decodes.version
        return inputs

    def _load(self, model: str, replaces: str) -> None:
        adapter = self._in_host[model]
        if self._active.slots is None:
            self.slots.pop(replaces, None)
            self.slots[model] = adapter.to(self.device)
            return
        if replaces in self.slot_of:
            self._numbers.append(self.slot_of.pop(replaces))
        slot = self.slot_of[model] = self._numbers.pop()
        self._active.slots.write(slot, adapter)

    def _forward_with_slots(self, inputs: Inputs) -> torch.Tensor:
        assert self._active.slots is not None
        assert inputs.adapters is not None
        self._active.slots.choose(inputs.adapters)
        return self.decoder.forward(inputs, self.cache)

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
