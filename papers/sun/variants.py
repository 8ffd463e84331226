"""SUN and the variants that it is compared with, on one task that the base model has not seen.

                    prefill module              decode module
    base            base                        base
    full            fine-tuned                  the same weights (full fine-tuning)
    naive           fine-tuned                  base (naive sharing, figure 2)
    sun             tuned for the decode module base (Table 1)
    sun_attention   the same, attention only    base
    sun_low_rank    the same, of low rank       base
    full_awq4       fine-tuned, 4 bits          the same weights, 4 bits (Table 2)
    sun_awq4        of sun                      base in 4 bits (Table 3, SUN+AWQ-d)
    qsun_awq4       of sun, tuned again for it  base in 4 bits (Table 2)

and the last three with other quantisers and with 3 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.quantisers.grid import Precision
from live.adaptation.quantisers.models import Method, quantise_model
from live.adaptation.recipes import Teacher, Trained, train_whole, tune_prefill
from live.adaptation.training import TrainingSettings, curve
from live.adaptation.weights import Scope
from live.models.weights import Weights

Row = dict[str, Any]

LOW_RANK = 8

GROUP = 128
"""Inputs that share a scale in a decode module of few bits, as in the paper."""


class Task(Teacher, Protocol):
    """A task that variants are trained for and measured on."""

    def measure(self, modules: Modules, prompts: int) -> Mapping[str, float]:
        """Measures by name, such as exact_match, of prompts that no training draws."""

    def sequences(self, count: int) -> torch.Tensor:
        """Prompts with their answers, as a quantiser's calibration takes them, (count, n) int64."""


@dataclass(frozen=True)
class Comparison:
    """A base model that is adapted to a task in every way that is compared.

    `calibration`: sequences for quantisers, (sequences, n) int64. `retuning`: QSUN's, from where SUN's ended. `scopes`:
    parts of the prefill module that are tuned alone.
    """

    forward: ForwardPass
    base: Weights
    task: Task
    calibration: torch.Tensor
    adaptation: TrainingSettings
    retuning: TrainingSettings
    quantised: tuple[tuple[Method, int], ...]
    scopes: tuple[Scope, ...]
    prompts: int

    def variants(self) -> dict[str, Row]:
        """Every variant with its measures; where it was trained, with its loss curve."""
        return dict(self._variants())

    def _variants(self) -> Iterator[tuple[str, Row]]:
        base = self.base
        yield "base", self._row(base, base)
        full = train_whole(self.forward, base, self.task, self.adaptation)
        yield "full", self._row(full.weights, full.weights, full)
        yield "naive", self._row(full.weights, base)
        sun = self._tuned(base, base, self.adaptation)
        yield "sun", self._row(sun.weights, base, sun)
        for scope in self.scopes:
            part = self._tuned(base, base, self.adaptation, scope)
            yield f"sun_{scope}", self._row(part.weights, base, part)
        for method, bits in self.quantised:
            quantised = self._quantised(full.weights, method, bits, self.task.sequences(len(self.calibration)))
            decode = self._quantised(base, method, bits, self.calibration)
            yield f"full_{method}{bits}", self._row(quantised, quantised)
            yield f"sun_{method}{bits}", self._row(sun.weights, decode)
            again = self._tuned(sun.weights, decode, self.retuning)
            yield f"qsun_{method}{bits}", self._row(again.weights, decode, again)

    def _row(self, prefill: Weights, decode: Weights, trained: Trained | None = None) -> Row:
        row: Row = dict(self.task.measure(Modules(self.forward, prefill, decode), self.prompts))
        if trained:
            row |= {"losses": curve(trained.losses), "trained_parameters": trained.trained_parameters}
        return row

    def _tuned(self, start: Weights, decode: Weights, settings: TrainingSettings, scope: Scope = "all") -> Trained:
        return tune_prefill(self.forward, start, decode, self.task, settings, scope=scope, rank=LOW_RANK)

    def _quantised(self, weights: Weights, method: Method, bits: int, sequences: torch.Tensor) -> Weights:
        """All linear layers in few bits, unpacked to dense tensors once and not in every step of a training."""
        return quantise_model(self.forward, weights, method, Precision(bits, GROUP), sequences).weights()
