"""Steps of real AFD bundles against step-time source `afd_bundle`: `python -m benchmarks.afd_bundles --data FOLDER`.

Fits the four numbers that no data sheet has to the measured steps of Qwen3-235B-A22B on GB200 (`ratio_sweep.csv`), with
each prompt length left out in turn, and predicts two systems of which nothing was fitted (`systems.csv`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from latency_models.sources.afd_bundle import BundleStepTime, DataSheetStages, Measured, Shape
from papers.fastafd.stages import SCATTER, TRAY, StepMeasurement, read_ratio_sweep, read_systems

MODELS = {"Qwen3-235B-A22B-FP8": "qwen3-235b-a22b", "MiniMax-M2.5-FP8": "minimax-m2.5"}
PRIOR = {"sequence": (1e-6, 1.0), "efficiency": (0.6, 0.3), "source": (5e-7, 0.5), "exchange": (3.9e-5, 1.5)}
"""Medians, and standard deviations of the logarithm, as of `twin reproduce fastafd`."""


def predict(model: str, row: StepMeasurement, measured: Measured) -> float:
    """The step of a bundle of trays of four GPUs, all sequences of one length."""
    shape = Shape(round(row.ratio * TRAY), 1, TRAY, 2)
    hardware, loaded = load_hardware("gb200"), load_model(model)
    ratio, link = row.ratio * TRAY, hardware.network.intra_node
    stages = DataSheetStages(loaded, hardware, TRAY, ratio, "fp8", "bf16", link, measured)
    step_time = BundleStepTime(loaded, hardware, shape, stages, weights="fp8", cache="bf16")
    decodes = row.batch_size * shape.attention_instances
    return step_time.decode_seconds(decodes, decodes * row.prompt_tokens, row.prompt_tokens, 1)[0]


def error(model: str, row: StepMeasurement, measured: Measured) -> float:
    """Predicted over measured, less 1."""
    return predict(model, row, measured) / row.tpot - 1


def fit(rows: Sequence[StepMeasurement]) -> Measured:
    """The numbers that predict some rows best."""
    medians, spreads = np.array([PRIOR[field.name] for field in fields(Measured)]).T

    def residuals(logs: np.ndarray) -> np.ndarray:
        model = Measured(*np.exp(logs))
        errors = np.array([error(MODELS["Qwen3-235B-A22B-FP8"], row, model) for row in rows]) / SCATTER
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, (logs - np.log(medians)) / spreads])

    starts = [np.log(medians) + np.array([a, 0, 0, b]) for a in (-0.5, 0.5) for b in (-0.5, 0.5)]
    best = min((least_squares(residuals, start) for start in starts), key=lambda fitted: float(fitted.cost))
    return Measured(*np.exp(best.x).tolist())


def main() -> None:
    """Print fits and errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with ratio_sweep.csv and systems.csv")
    folder = parser.parse_args().data
    rows, qwen = read_ratio_sweep(folder), MODELS["Qwen3-235B-A22B-FP8"]
    lengths = sorted({row.prompt_tokens for row in rows})

    def show(title: str, measured: Measured, among: Sequence[StepMeasurement]) -> None:
        errors = np.abs([error(qwen, row, measured) for row in among])
        print(
            f"{title}: mean error {100 * errors.mean():.1f} %, largest {100 * errors.max():.1f} % of {len(among)} steps"
        )

    model = fit(rows)
    print(f"fitted: {model}")
    show("fitted on all", model, rows)
    show("the defaults of the source", Measured(), rows)
    for length in lengths:
        fitted_rows, held_out = (
            [row for row in rows if (row.prompt_tokens == length) == same] for same in (False, True)
        )
        show(f"{length:,} tokens left out", fit(fitted_rows), held_out)
    for row in read_systems(folder):
        if row.ratio is not None:
            step = StepMeasurement(row.prompt_tokens, row.batch_size, row.ratio, row.tpot)
            off = error(MODELS[row.model], step, Measured())
            print(f"{row.model} at {row.ratio}:1, nothing fitted: {100 * off:+.1f} %")


if __name__ == "__main__":
    main()
