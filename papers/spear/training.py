"""`twin reproduce spear --quality`: language models, and quantised models that are compensated in several ways.

All but `all` have the same budget of bytes:

spear       Algorithm 1's modules, two phases (Table 1)
random      as many modules, drawn at random (Table 4)
uniform     all modules, at the rank that the budget allows (Table 18)
all         all modules, at twice the budget (Table 4)
gate_off    spear's modules with γ at 1, at the rank that the gate's bytes allow (5.4.2)
corpus      spear calibrated on the training text (Table 17)
svd         all modules, a static term: SVD of the error (LQER, Table 2)
whitened    all modules, a static term with the least error of the output (QERA and EoRA, Table 2)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from live.adaptation.compensation import CompensatedModel, Evaluation, TokenMeasures, by_quartile, recovered
from live.adaptation.compensators import (
    Calibrated,
    CalibrationSettings,
    CalibrationText,
    calibrate,
    calibration_text,
    compensated,
    initial_gate,
    svd_factors,
    whitened_factors,
)
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.language_model import TEXT_SIZES, TextSize, self_sampled, train_text_model
from live.adaptation.placement import DEFAULT_RULE, Placement, Rule
from live.adaptation.quantisers import Method, Precision, quantise_model
from live.adaptation.training import curve
from live.adaptation.weights import read_model
from papers.common import Recipe, Study, language_model_row, study_sizes
from papers.spear.quality import summarise
from reports.run_directory import replacing


@dataclass(frozen=True)
class Cell:
    """A quantised model, and the ways in which it is compensated."""

    method: Method
    precision: Precision
    variants: tuple[str, ...] = ("spear",)

    @property
    def name(self) -> str:
        grain = "pc" if self.precision.group == -1 else f"g{self.precision.group}"
        return f"{self.method}-{self.precision.bits}-{grain}"


@dataclass(frozen=True)
class StudySize:
    """A study of compensation on one model, with the windows and sequences that each part takes.

    `full_rank`: of compensators on all modules; half their bytes are the budget of everything else.
    """

    text: TextSize
    windows: int
    sequences: int
    rounded: int
    diagnosed: int
    full_rank: int
    calibration: CalibrationSettings
    cells: tuple[Cell, ...]
    rule: Rule = DEFAULT_RULE


STUDY_SIZES = study_sizes(StudySize, "spear", text=TEXT_SIZES)


@dataclass(frozen=True)
class Compensation:
    """A quantised model of a study that is compensated in several ways.

    `texts`: `sampled` and `corpus` to calibrate with, each (sequences, n) int64. `full`, `quantised`: measures.
    """

    subject: CompensatedModel
    size: StudySize
    texts: dict[str, torch.Tensor]
    evaluation: Evaluation
    placement: Placement
    full: TokenMeasures
    quantised: TokenMeasures
    seed: int

    def variant(self, name: str) -> Row:
        if name in ("svd", "whitened"):
            return self._static(name)
        rank = self.size.full_rank if name == "all" else None
        text = self._text("corpus") if name == "corpus" else self._sampled
        return self._trained(self._placed(name), rank, text, gated=name != "gate_off", closely=name == "spear")

    def _placed(self, name: str) -> Sequence[str]:
        every, model = list(self.subject.sizes), self.subject.model
        if name == "random":
            rng = random.Random(f"{self.seed} {model.method} {model.precision}")
            return rng.sample(every, len(self.placement.modules))
        return every if name in ("all", "uniform") else self.placement.modules

    def _trained(
        self, modules: Sequence[str], rank: int | None, text: CalibrationText, *, gated: bool, closely: bool
    ) -> Row:
        """Train compensators of a rank, or the largest in the budget; `closely`: measure float32 and quartiles, too."""
        model, measure = self.subject.model, self.evaluation.measure
        if rank is None:
            rank = self.subject.rank_of(modules, gate=gated)
        trained = calibrate(
            self.subject.forward, model, modules, rank, text, self.size.calibration, gated=gated, seed=self.seed
        )
        row = self._row(trained, rank, gated=gated) | {"losses": curve(trained.losses)}
        if closely:
            exact = measure(trained.weights())
            row["perplexity_float"] = exact.perplexity
            ungated = compensated(model.weights(), trained.dense(), trained.parts, gated=False)
            row["quartiles"] = by_quartile(self.quantised, exact, measure(ungated))
        return row

    def _static(self, name: str) -> Row:
        errors = self.subject.model.errors()
        rank = self.subject.rank_of(errors, gate=False)
        parts = {}
        for module, error in errors.items():
            moment = self._sampled.inputs[module].second_moment
            down, up = svd_factors(error, rank) if name == "svd" else whitened_factors(error, moment, rank)
            parts[module] = {"down": down, "up": up, **initial_gate(rank, 0)}
        return self._row(Calibrated(self.subject.model, parts, []), rank, gated=False)

    def _row(self, trained: Calibrated, rank: int, *, gated: bool) -> Row:
        measures = self.evaluation.measure(trained.stored_weights())
        return {
            **measures.summary(),
            "recovered": recovered(self.full.perplexity, self.quantised.perplexity, measures.perplexity),
            "modules": len(trained.parts),
            "rank": rank,
            "bytes": self.subject.bytes_of(trained.parts, rank, gate=gated),
        }

    @cached_property
    def _sampled(self) -> CalibrationText:
        return self._text("sampled")

    def _text(self, name: str) -> CalibrationText:
        """Calibration text, computed with the weights that were quantised: AWQ scales what layers get."""
        return calibration_text(self.subject.forward, self.subject.model.reference, self.texts[name])


Row = dict[str, Any]

TEXTS = "texts.safetensors"
LINE = "\n"
"""Self-sampled text begins behind a line's end."""


def train_model(name: str, seed: int, directory: Path) -> Row:
    torch.set_num_threads(1)
    size = STUDY_SIZES[name]
    model = train_text_model(directory, size.text, "llama", seed)
    first = model.tokenizer.encode(LINE).ids[0]
    held_out = model.data.held_out(size.windows)
    texts = {
        "sampled": self_sampled(model.forward, model.weights, first, size.sequences, size.text.window, seed),
        "corpus": model.data.batch(size.sequences, seed, size.text.training.steps),
        "evaluation": held_out,
        "evaluation_states": final_states(model.forward, model.weights, held_out[:, :-1]),
    }
    with replacing(directory / TEXTS) as draft:
        save_file({text: tokens.contiguous() for text, tokens in texts.items()}, draft)
    return language_model_row("base", seed, model.document)


def compensate(cell: Cell, name: str, seed: int, base: Path) -> Row:
    """Quantise and diagnose a language model, compensate it in every way of a cell, and measure."""
    torch.set_num_threads(1)
    (config, weights), texts, size = read_model(base), load_file(base / TEXTS), STUDY_SIZES[name]
    assert weights.head is not None
    forward, sampled = ForwardPass(config), texts["sampled"]
    evaluation = Evaluation(forward, texts["evaluation"], texts["evaluation_states"], weights.head)
    model = quantise_model(forward, weights, cell.method, cell.precision, sampled[: size.rounded])
    subject = CompensatedModel(forward, model, size.full_rank, size.rule)
    damages, placement = subject.place(sampled[: size.diagnosed])
    full, quantised = evaluation.reference(), evaluation.measure(model.weights())
    compensation = Compensation(subject, size, texts, evaluation, placement, full, quantised, seed)
    places = subject.describe(placement)
    return {
        "kind": "cell",
        "seed": seed,
        "cell": cell.name,
        "full": full.summary(),
        "quantised": {**quantised.summary(), "bytes": model.nbytes},
        "damage": damages,
        "entropy": placement.entropy,
        "modules": places["modules"],
        "budget": subject.budget,
        "share": places["share"],
        "share_llama_2_7b": places["share_llama_2_7b"],
        "variants": {name: compensation.variant(name) for name in cell.variants},
    }


def recipes(name: str) -> Sequence[Recipe]:
    """One language model a seed, and the quantised models of a size."""
    cells = {cell.name: partial(compensate, cell) for cell in STUDY_SIZES[name].cells}
    return [Recipe("base", "base", train_model, cells)]


STUDY = Study(STUDY_SIZES, recipes, summarise)
