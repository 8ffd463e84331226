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

from latency_models.deployment.hardware import load_hardware
from twin.serving.results.energy import step_share

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    table = list(rows(parser.parse_args().folder))
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


if __name__ == "__main__":
    main()
