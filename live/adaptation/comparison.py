"""SUN and the variants that it is compared with, on one operation that the base model has not seen.

                    prefill module              decode module
    base            base                        base
    full            fine-tuned                  the same weights (full fine-tuning)
    naive           fine-tuned                  base (naive sharing, figure 2)
    sun             tuned for the decode module base (Table 1)
    sun_attention   the same, attention only    base
    sun_low_rank    the same, of low rank       base
    full_rtn4       fine-tuned, 4 bits          the same weights, 4 bits (Table 2, with RTN in place of AWQ)
    sun_rtn4        of sun                      base in 4 bits (Table 3, SUN+AWQ-d)
    qsun4           of sun, tuned again for it  base in 4 bits (Table 2)

and the last three with 3 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from live.adaptation.decomposition import Modules
from live.adaptation.directories import read_model
from live.adaptation.forward import ForwardPass
from live.adaptation.quantisation import rounded
from live.adaptation.recipes import Lesson, Trained, train_whole, tune_prefill
from live.adaptation.runs import train_base
from live.adaptation.sizes import SIZES
from live.adaptation.tasks import BASE_OPERATIONS, NEW_OPERATIONS
from live.adaptation.training import curve
from live.adaptation.tuning import Scope
from live.models.linear import Rounding
from live.models.weights import Weights

Row = dict[str, Any]

TASKS = tuple(NEW_OPERATIONS)

BITS = (4, 3)

LOW_RANK = 8


@dataclass(frozen=True)
class BaseJob:
    """A base model to train: into `directory`, which a later job may find finished or half done."""

    size: str
    seed: int
    directory: Path

    def run(self) -> Row:
        """Train it, write it, and measure it on its own operations."""
        torch.set_num_threads(1)
        size = SIZES[self.size]
        trained, forward = train_base(self.directory, size, "llama", self.seed)
        modules = Modules(forward, trained.weights, trained.weights)
        return {
            "kind": "base",
            "seed": self.seed,
            "exact_match": {
                name: Lesson((name,), size.digits, self.seed).exact_match(modules, size.prompts)
                for name in BASE_OPERATIONS
            },
            "parameters": trained.trained_parameters,
            "losses": curve(trained.losses),
        }


@dataclass(frozen=True)
class TaskJob:
    """A task to adapt a finished base model to, in every way that is compared."""

    size: str
    seed: int
    task: str
    base: Path

    def run(self) -> Row:
        """Train and measure all variants."""
        torch.set_num_threads(1)
        config, weights = read_model(self.base)
        lesson = Lesson((self.task,), SIZES[self.size].digits, self.seed)
        return {
            "kind": "task",
            "seed": self.seed,
            "task": self.task,
            "variants": {row.pop("variant"): row for row in _variants(ForwardPass(config), weights, lesson, self.size)},
        }


def _variants(forward: ForwardPass, base: Weights, lesson: Lesson, size: str) -> Iterator[Row]:
    """Every variant with its exact match; where it was trained, with its loss curve."""
    sizes, config = SIZES[size], forward.config

    def row(variant: str, prefill: Weights, decode: Weights, trained: Trained | None = None) -> Row:
        row = {"variant": variant, "exact_match": lesson.exact_match(Modules(forward, prefill, decode), sizes.prompts)}
        if trained:
            row |= {"losses": curve(trained.losses), "trained_parameters": trained.trained_parameters}
        return row

    def tuned(start: Weights, decode: Weights, scope: Scope = "all") -> Trained:
        return tune_prefill(forward, start, decode, lesson, sizes.adaptation, scope=scope, rank=LOW_RANK)

    yield row("base", base, base)
    full = train_whole(forward, base, lesson, sizes.adaptation)
    yield row("full", full.weights, full.weights, full)
    yield row("naive", full.weights, base)
    sun = tuned(base, base)
    yield row("sun", sun.weights, base, sun)
    for scope in ("attention", "low_rank"):
        part = tuned(base, base, scope)
        yield row(f"sun_{scope}", part.weights, base, part)
    for bits in BITS:
        rounding = Rounding(bits)
        whole, decode = rounded(config, full.weights, rounding), rounded(config, base, rounding)
        yield row(f"full_rtn{bits}", whole, whole)
        yield row(f"sun_rtn{bits}", sun.weights, decode)
        again = tuned(sun.weights, decode)
        yield row(f"qsun{bits}", again.weights, decode, again)
