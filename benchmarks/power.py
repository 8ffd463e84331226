"""Predicted power of GPUs beside that of the ML.ENERGY Leaderboard v3.0: `python -m benchmarks.power FOLDER`.

FOLDER is `public/data/models` of https://github.com/ml-energy/leaderboard: a file of each model and task, with mean
batch size and watts of each configuration of vLLM on H100 SXM and B200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.hardware import load_hardware
from twin.serving.results.report import step_share

GPUS = {"H100": "h100-sxm", "B200": "b200-sxm"}
TASKS = ("lm-arena-chat", "gpqa", "sourcegraph-fim")
"""Tasks of text alone."""


def rows(folder: Path) -> Iterator[tuple[str, bool, float, float]]:
    """GPU, whether the model is dense, measured and predicted watts of one GPU, of each configuration."""
    for file in sorted(folder.glob("*.json")):
        if not file.stem.endswith(TASKS):
            continue
        model = json.loads(file.read_text())
        dense = model["activated_params_billions"] == model["total_params_billions"]
        for configuration in model["configurations"]:
            limit = load_hardware(GPUS[configuration["gpu_model"]]).power_limit
            assert limit is not None
            batch = configuration["avg_batch_size"] / max(configuration["parallelization"]["data_parallel"], 1)
            watts = configuration["avg_power_watts"] / configuration["num_gpus"]
            yield configuration["gpu_model"], dense, watts, limit * step_share(batch)


WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "mxfp4": 0.53}
PEAKS = {"H100": (3.35e12, 989e12), "B200": (8e12, 2250e12)}
"""Bytes/s of memory and FLOP/s in 16 bit."""

ALIKE = ("235B", "30B-A3B", "480B", "405B", "70B", "DeepSeek")
"""Parts of the names of models of one architecture, which are left out together."""


def left_out(folder: Path) -> Iterator[tuple[float, float]]:
    """Measured and predicted share of the power limit, by a fit to rows of other architectures: least absolute errors
    of logarithms in the device, the batch, and the use of memory and FLOP/s at the measured inter-token latency.
    """
    names, features, shares = [], [], []
    for file in sorted(folder.glob("*.json")):
        model = json.loads(file.read_text()) if file.stem.endswith(TASKS) else {"configurations": []}
        for row in model["configurations"]:
            device, sequences = row["gpu_model"], row["avg_batch_size"]
            bandwidth, flops = PEAKS[device]
            width, gpus = WEIGHT_BYTES[model["weight_precision"]], row["num_gpus"]
            active, total = (1e9 * model[f"{part}_params_billions"] for part in ("activated", "total"))
            read = total * width * (1 - (1 - active / total) ** max(sequences, 1))
            batch = sequences / max(row["parallelization"]["data_parallel"], 1)
            seconds, b200, tokens = row["median_itl_ms"] / 1e3, float(device == "B200"), np.log2(max(batch, 1))
            memory = np.log2(read / gpus / seconds / bandwidth)
            compute = np.log2(2 * active / gpus * batch / seconds / flops)
            names.append(next((name for name in ALIKE if name in model["model_id"]), model["model_id"]))
            features.append(
                [1, b200, tokens, tokens**2, b200 * tokens, memory, compute, b200 * memory, memory * compute]
            )
            limit = load_hardware(GPUS[device]).power_limit
            assert limit is not None
            shares.append(row["avg_power_watts"] / gpus / limit)
    inputs, logs, of = np.array(features), np.log(shares), np.array(names)
    for name in sorted(set(names)):
        out = of == name
        predicted = np.exp(inputs[out] @ _least_absolute(inputs[~out], logs[~out]))
        yield from zip(np.exp(logs[out]), np.clip(predicted, 0.1, 1.0), strict=True)


def _least_absolute(inputs: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients by iteratively reweighted least squares."""
    weights = np.ones(len(target))
    for _ in range(60):
        weighted = inputs.T * weights
        fit = np.linalg.solve(weighted @ inputs + 1e-3 * np.eye(inputs.shape[1]), weighted @ target)
        weights = 1 / np.maximum(np.abs(inputs @ fit - target), 1e-3)
    return fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    table = list(rows(folder))
    errors = np.array([abs(predicted / watts - 1) for _, _, watts, predicted in table])
    groups = {
        "all": np.ones(len(table), dtype=bool),
        **{gpu: np.array([row[0] == gpu for row in table]) for gpu in GPUS},
        "dense": np.array([row[1] for row in table]),
        "sparse": np.array([not row[1] for row in table]),
    }
    for name, mask in groups.items():
        median, tail = np.quantile(errors[mask], [0.5, 0.9])
        print(f"{name}: {int(mask.sum())} rows, median error {median:.1%}, 90th percentile {tail:.1%}")
    errors = np.array([abs(predicted / share - 1) for share, predicted in left_out(folder)])
    median, tail = np.quantile(errors, [0.5, 0.9])
    print(f"by utilisation, architecture left out: median error {median:.1%}, 90th percentile {tail:.1%}")


if __name__ == "__main__":
    main()
