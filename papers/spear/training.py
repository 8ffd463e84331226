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

from live.adaptation.compensation import Evaluation, TokenMeasures, by_quartile, recovered
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
from live.adaptation.placement import (
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
from live.adaptation.quantisers import Method, Precision, QuantisedModel, quantise_model
from live.adaptation.training import TrainingSettings, curve
from live.adaptation.weights import module_sizes, read_model
from live.models.weights import Weights
from papers.common import Recipe, Study, language_model_row
from papers.spear.quality import summarise
from reports.run_directory import replacing

VARIANTS = ("spear", "random", "uniform", "all", "gate_off", "corpus", "svd", "whitened")
"""Ways to compensate, as `papers.spear.training` describes them."""


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


def _cells(every: tuple[Precision, ...], extra: tuple[tuple[Method, Precision], ...]) -> tuple[Cell, ...]:
    """Cells of rounding to nearest with all variants, then others with SPEAR alone."""
    return (*(Cell("rtn", precision, VARIANTS) for precision in every), *(Cell(*cell) for cell in extra))


_CHANNEL = (Precision(4), Precision(3), Precision(2))

STUDY_SIZES = {
    "reduced": StudySize(
        text=TEXT_SIZES["reduced"],
        windows=256,
        sequences=512,
        rounded=128,
        diagnosed=32,
        full_rank=8,
        calibration=CalibrationSettings(
            factors=TrainingSettings(steps=300, batch_size=4, learning_rate=6e-3),
            gate=TrainingSettings(steps=40, batch_size=4, learning_rate=1e-2),
        ),
        cells=_cells(
            _CHANNEL,
            (
                ("gptq", Precision(4)), ("awq", Precision(4)), ("gptq", Precision(3)), ("awq", Precision(3)),
                ("rtn", Precision(3, 128)),
            ),
        ),
    ),
    "full": StudySize(
        text=TEXT_SIZES["full"],
        windows=256,
        sequences=512,
        rounded=128,
        diagnosed=64,
        full_rank=8,
        calibration=CalibrationSettings(
            factors=TrainingSettings(steps=375, batch_size=4, learning_rate=1e-3),
            gate=TrainingSettings(steps=250, batch_size=4, learning_rate=5e-3),
        ),
        cells=_cells(
            _CHANNEL,
            tuple(
                (method, Precision(bits, group))
                for bits in (4, 3)
                for group in (-1, 128)
                for method in ("rtn", "gptq", "awq")
                if (method, group) != ("rtn", -1)
            ),
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class StudiedModel:
    """A language model with everything that is computed of it once.

    `texts`: `sampled` and `corpus` to calibrate with, `evaluation`; each (sequences, n) int64, with the model's states.
    """

    forward: ForwardPass
    weights: Weights
    texts: dict[str, torch.Tensor]
    size: StudySize
    seed: int

    @cached_property
    def evaluation(self) -> Evaluation:
        assert self.weights.head is not None
        return Evaluation(self.forward, self.texts["evaluation"], self.texts["evaluation_states"], self.weights.head)

    @cached_property
    def sizes(self) -> dict[str, Size]:
        return module_sizes(self.forward.config, self.weights)

    @cached_property
    def budget(self) -> int:
        """Bytes of compensators: half of those on all modules at full rank."""
        return total_bytes(self.sizes.values(), self.size.full_rank) // 2

    def run(self, cell: Cell) -> Row:
        """The quantised model's measures, its damage and placement, and every variant of the cell."""
        sampled = self.texts["sampled"]
        rounded = sampled[: self.size.rounded]
        model = quantise_model(self.forward, self.weights, cell.method, cell.precision, rounded)
        damages = damage(self.forward, model, sampled[: self.size.diagnosed])
        placement = select(damages, deployment_costs(damages), self.sizes, self.budget, self.size.rule)
        full, quantised = self.evaluation.reference(), self.evaluation.measure(model.weights())
        compensation = Compensation(self, model, placement, full, quantised)
        layers, bits = self.forward.config.shape.layers, cell.precision.bits
        return {
            "cell": cell.name,
            "full": full.summary(),
            "quantised": {**quantised.summary(), "bytes": model.nbytes},
            "damage": damages,
            "entropy": placement.entropy,
            "modules": list(placement.modules),
            "budget": self.budget,
            "share": total_bytes([self.sizes[name] for name in placement.modules], placement.rank) / model.nbytes,
            "share_llama_2_7b": share_of(LLAMA_2_7B, placement.modules, layers, placement.rank, bits),
            "variants": {name: compensation.variant(name) for name in cell.variants},
        }


@dataclass(frozen=True)
class Compensation:
    """A quantised model that is compensated in several ways."""

    study: StudiedModel
    model: QuantisedModel
    placement: Placement
    full: TokenMeasures
    quantised: TokenMeasures

    def variant(self, name: str) -> Row:
        if name in ("svd", "whitened"):
            return self._static(name)
        modules, rank, text = self._placed(name), None, self._sampled
        if name == "all":
            rank = self.study.size.full_rank
        elif name == "corpus":
            text = self._text("corpus")
        return self._trained(modules, rank, text, gated=name != "gate_off", closely=name == "spear")

    def _placed(self, name: str) -> Sequence[str]:
        every = list(self.study.sizes)
        if name == "random":
            rng = random.Random(f"{self.study.seed} {self.model.method} {self.model.precision}")
            return rng.sample(every, len(self.placement.modules))
        return every if name in ("all", "uniform") else self.placement.modules

    def _trained(
        self, modules: Sequence[str], rank: int | None, text: CalibrationText, *, gated: bool, closely: bool
    ) -> Row:
        """Train compensators of a rank, or the largest in the budget; `closely`: measure float32 and quartiles, too."""
        study = self.study
        if rank is None:
            rank = affordable_rank([study.sizes[name] for name in modules], study.budget, gate=gated)
        trained = calibrate(
            study.forward, self.model, modules, rank, text, study.size.calibration, gated=gated, seed=study.seed
        )
        row = self._row(trained, rank, gated=gated) | {"losses": curve(trained.losses)}
        if closely:
            exact = study.evaluation.measure(trained.weights())
            row["perplexity_float"] = exact.perplexity
            ungated = compensated(self.model.weights(), trained.dense(), trained.parts, gated=False)
            row["quartiles"] = by_quartile(self.quantised, exact, study.evaluation.measure(ungated))
        return row

    def _static(self, name: str) -> Row:
        study, errors = self.study, self.model.errors()
        rank = affordable_rank(study.sizes.values(), study.budget, gate=False)
        parts = {}
        for module, error in errors.items():
            moment = self._sampled.inputs[module].second_moment
            down, up = svd_factors(error, rank) if name == "svd" else whitened_factors(error, moment, rank)
            parts[module] = {"down": down, "up": up, **initial_gate(rank, 0)}
        return self._row(Calibrated(self.model, parts, []), rank, gated=False)

    def _row(self, trained: Calibrated, rank: int, *, gated: bool) -> Row:
        measures = self.study.evaluation.measure(trained.stored_weights())
        sizes = [self.study.sizes[name] for name in trained.parts]
        full, quantised = self.full.perplexity, self.quantised.perplexity
        return {
            **measures.summary(),
            "recovered": recovered(full, quantised, measures.perplexity),
            "modules": len(sizes),
            "rank": rank,
            "bytes": total_bytes(sizes, rank, gate=gated),
        }

    @cached_property
    def _sampled(self) -> CalibrationText:
        return self._text("sampled")

    def _text(self, name: str) -> CalibrationText:
        """Calibration text, computed with the weights that were quantised: AWQ scales what layers get."""
        return calibration_text(self.study.forward, self.model.reference, self.study.texts[name])


Row = dict[str, Any]

TEXTS = "texts.safetensors"
LINE = "\n"
"""Self-sampled text begins behind a line's end."""


def train_model(name: str, seed: int, directory: Path) -> Row:
    torch.set_num_threads(1)
    size = STUDY_SIZES[name]
    model, document = train_text_model(directory, size.text, "llama", seed)
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
    return language_model_row("base", seed, document)


def compensate(cell: Cell, name: str, seed: int, base: Path) -> Row:
    """Quantise and diagnose a language model, compensate it in every way of a cell, and measure."""
    torch.set_num_threads(1)
    config, weights = read_model(base)
    model = StudiedModel(ForwardPass(config), weights, load_file(base / TEXTS), STUDY_SIZES[name], seed)
    return {"kind": "cell", "seed": seed, **model.run(cell)}


def recipes(name: str) -> Sequence[Recipe]:
    """One language model a seed, and the quantised models of a size."""
    cells = {cell.name: partial(compensate, cell) for cell in STUDY_SIZES[name].cells}
    return [Recipe("base", "base", train_model, cells)]


STUDY = Study(STUDY_SIZES, recipes, summarise)
