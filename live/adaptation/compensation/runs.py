"""Quantisation, diagnosis and compensation of one model directory: the parts of `twin adapt`.

A directory that `quantise` or `compensate` writes is a model that the live engine loads, with `compensation.json`: what
was done, and the measures on held-out text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from live.adaptation.compensation.calibrating import CalibrationSettings, calibrate, calibration_text
from live.adaptation.compensation.measures import Evaluation, by_quartile, recovered
from live.adaptation.compensation.selection import (
    DEFAULT_RULE,
    LLAMA_2_7B,
    Placement,
    Rule,
    Size,
    affordable_rank,
    damage,
    deployment_costs,
    select,
    share_of,
    total_bytes,
)
from live.adaptation.directories import copy_text_files, read_model
from live.adaptation.forward import ForwardPass
from live.adaptation.quantisers.checkpoint import write_compensators, write_quantised
from live.adaptation.quantisers.grid import Precision
from live.adaptation.quantisers.models import Method, QuantisedModel, quantise_model
from live.adaptation.text.language_model import read_tokenizer, self_sampled
from live.adaptation.training import TrainingSettings
from live.adaptation.weights import module_sizes
from reports.run_directory import write_text
from workloads.errors import BadInput

SCHEMA = "twin.compensation/1"
RECORD = "compensation.json"

Document = dict[str, Any]

Where: TypeAlias = Literal["cka", "all"]


@dataclass(frozen=True)
class Job:
    """A model to quantise, and its texts: `sources` of `read_corpus`, and self-sampled sequences of `window` tokens."""

    model: Path
    method: Method
    precision: Precision
    sources: Path | None = None
    sequences: int = 192
    window: int = 128
    windows: int = 128
    seed: int = 0

    @cached_property
    def loaded(self) -> Loaded:
        """The model quantised, with its texts; computed once."""
        config, weights = read_model(self.model)
        if config.quantisation is not None:
            raise BadInput("expected dense weights", field="quantization_config", file=self.model)
        forward = ForwardPass(config)
        evaluation = Evaluation.on_held_out(self.model, forward, weights, self.sources, self.window, self.windows)
        first = read_tokenizer(self.model).encode("\n", add_special_tokens=False).ids[-1]
        sampled = self_sampled(forward, weights, first, self.sequences, evaluation.tokens.shape[1], self.seed)
        return Loaded(
            forward, quantise_model(forward, weights, self.method, self.precision, sampled), sampled, evaluation
        )

    def describe(self) -> Document:
        fields = asdict(self) | {"model": str(self.model), "sources": str(self.sources) if self.sources else None}
        return {"schema": SCHEMA, **fields}


@dataclass(frozen=True)
class Loaded:
    """A quantised model with calibration and evaluation text."""

    forward: ForwardPass
    model: QuantisedModel
    sampled: torch.Tensor
    evaluation: Evaluation

    @cached_property
    def sizes(self) -> dict[str, Size]:
        return module_sizes(self.forward.config, self.model.reference)

    def measures(self) -> Document:
        reference = self.evaluation.measure(self.model.reference)
        return {
            "full": reference.summary(),
            "quantised": {**self.evaluation.measure(self.model.weights()).summary(), "bytes": self.model.nbytes},
        }


@dataclass(frozen=True)
class Budget:
    """The budget, half the bytes of compensators of `full_rank` on all modules, and the rule of their placement."""

    full_rank: int = 8
    rule: Rule = DEFAULT_RULE
    tables: Path | None = None


def quantise(job: Job, directory: Path) -> Document:
    loaded = job.loaded
    write_quantised(directory, loaded.forward.config, loaded.model)
    return _written(job, directory, loaded.measures())


def diagnose(job: Job, budget: Budget) -> Document:
    """The damage of every module, and the placement that follows: `damage`, `modules`, `rank`, `entropy`."""
    damages, placement = _placed(job.loaded, budget)
    return {**job.describe(), **job.loaded.measures(), "damage": damages, **_placement(job.loaded, placement)}


def compensate(
    job: Job,
    directory: Path,
    budget: Budget,
    where: Where,
    settings: CalibrationSettings,
    advance: Callable[[str], None] = lambda text: None,
) -> Document:
    """Quantise a model, train compensators (on Algorithm 1's modules or all), and write a directory to be loaded."""
    loaded = job.loaded
    write_quantised(directory, loaded.forward.config, loaded.model)
    damages, placement = _placed(loaded, budget)
    if where == "all":
        placement = replace(placement, modules=tuple(loaded.sizes), rank=budget.full_rank)
    text = calibration_text(loaded.forward, loaded.model.reference, loaded.sampled)
    calibrated = calibrate(
        loaded.forward, loaded.model, placement.modules, placement.rank, text, settings, seed=job.seed, advance=advance
    )
    write_compensators(directory, calibrated.stored(), placement.rank)
    measure = loaded.evaluation.measure
    compensated, quantised = measure(calibrated.stored_weights()), measure(loaded.model.weights())
    measures = loaded.measures()
    full = measures["full"]["perplexity"]
    document = measures | {
        "compensated": compensated.summary(),
        "recovered": recovered(full, quantised.perplexity, compensated.perplexity),
        "quartiles": by_quartile(quantised, compensated),
        "damage": damages,
        **_placement(loaded, placement),
        "settings": asdict(settings),
        "losses": calibrated.losses,
    }
    return _written(job, directory, document)


def settings_of(factors: int, gate: int, batch_size: int = 4) -> CalibrationSettings:
    """The two phases with given numbers of steps."""
    return CalibrationSettings(
        TrainingSettings(steps=factors, batch_size=batch_size, learning_rate=2e-3),
        TrainingSettings(steps=gate, batch_size=batch_size, learning_rate=1e-2),
    )


def _placed(loaded: Loaded, budget: Budget) -> tuple[dict[str, float], Placement]:
    damages = damage(loaded.forward, loaded.model, loaded.sampled)
    limit = total_bytes(loaded.sizes.values(), budget.full_rank) // 2
    placement = select(damages, deployment_costs(damages, budget.tables), loaded.sizes, limit, budget.rule)
    if affordable_rank([loaded.sizes[name] for name in placement.modules], limit) == 0:
        raise BadInput("expected more: no compensator fits the budget", field="full_rank", value=budget.full_rank)
    return damages, placement


def _placement(loaded: Loaded, placement: Placement) -> Document:
    config, model = loaded.forward.config, loaded.model
    size = total_bytes([loaded.sizes[name] for name in placement.modules], placement.rank)
    layers = config.shape.layers
    return {
        "modules": list(placement.modules),
        "rank": placement.rank,
        "entropy": placement.entropy,
        "bytes": size,
        "share": size / model.nbytes,
        "share_llama_2_7b": share_of(LLAMA_2_7B, placement.modules, layers, placement.rank, model.precision.bits),
    }


def _written(job: Job, directory: Path, document: Document) -> Document:
    copy_text_files(job.model, directory)
    document = job.describe() | document
    write_text(directory / RECORD, json.dumps(document, indent=1) + "\n")
    return document
