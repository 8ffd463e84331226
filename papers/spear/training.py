"""`twin reproduce spear --quality`: language models, and quantised models that are compensated in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from live.adaptation.directories import read_model
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.text.language_model import self_sampled, train_text_model
from papers.spear.quality import summarise
from papers.spear.sizes import STUDY_SIZES, Cell
from papers.spear.variants import StudiedModel
from papers.training import Recipe, Study, language_model_row
from reports.records.run_directory import replacing

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
