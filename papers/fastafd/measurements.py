"""The measured tables: steps of FastAFD bundles over the ratio, and throughput of whole systems.

The tables are not part of this repository. `--data` names the folder that holds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from latency_models.io.tables import read_columns
from workloads.errors import BadInput

RATIO_SWEEP, SYSTEMS = "ratio_sweep.csv", "systems.csv"
TRAY = 4
"""GPUs of one tray of GB200 NVL72: of the FFN, and of each attention tray."""

BUNDLE = re.compile(r"^afd-(\d+)-1$")
WIDE_EP = "vllm-dp-ep"


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One measured decode step (seconds) of a bundle of one FFN tray and r attention trays, `batch_size` a GPU."""

    prompt_tokens: int
    batch_size: int
    ratio: float
    tpot: float

    @property
    def curve(self) -> tuple[int, int]:
        """Prompt length and batch size, which the points of one curve over r have in common."""
        return self.prompt_tokens, self.batch_size


@dataclass(frozen=True, slots=True)
class SystemMeasurement:
    """Measured output tokens a second and GPU of vLLM with DP = EP (ratio None), or a bundle with `ratio` attention
    trays.
    """

    model: str
    prompt_tokens: int
    gpus: int
    batch_size: int
    ratio: int | None
    throughput: float
    ceiling: bool

    @property
    def tpot(self) -> float:
        """Seconds of one decode step, from the throughput of all GPUs."""
        decoding = self.gpus if self.ratio is None else self.gpus - TRAY
        return self.batch_size * decoding / (self.throughput * self.gpus)


def read_ratio_sweep(folder: Path) -> list[StepMeasurement]:
    """The measured steps of `ratio_sweep.csv`, in its order; columns beside those read here are ignored."""
    columns = read_columns(folder / RATIO_SWEEP)
    rows = [
        StepMeasurement(prompt, batch, ratio, milliseconds / 1e3)
        for prompt, batch, ratio, milliseconds in zip(
            columns.wholes("prompt_tokens", low=1),
            columns.wholes("batch_per_attention_gpu", low=1),
            columns.numbers("attention_trays_per_ffn_tray", above=0),
            columns.numbers("tpot_ms", above=0),
            strict=True,
        )
    ]
    points = set()
    for index, row in enumerate(rows):
        point = (*row.curve, row.ratio)
        if point in points:
            expected = "expected each ratio once for a prompt length and batch"
            raise columns.fault(expected, index, "attention_trays_per_ffn_tray")
        points.add(point)
    return rows


def read_systems(folder: Path) -> list[SystemMeasurement]:
    """The systems of `systems.csv`, if the folder has it; `note` says where a batch is below the KV ceiling."""
    if not (folder / SYSTEMS).is_file():
        return []
    columns = read_columns(folder / SYSTEMS)
    names, notes, models = columns.text("system"), columns.text("note"), columns.text("model")
    prompts, gpus = columns.wholes("prompt_tokens", low=1), columns.wholes("gpus", low=1)
    batches = columns.wholes("batch_per_gpu", low=1)
    rates = columns.numbers("output_tokens_per_second_per_gpu", above=0)
    rows = []
    for index, name in enumerate(names):
        bundle = BUNDLE.match(name)
        if bundle is None and name != WIDE_EP:
            raise columns.fault(f"expected {WIDE_EP} or a bundle such as afd-7-1", index, "system")
        ratio = int(bundle.group(1)) if bundle else None
        if ratio is not None and gpus[index] != TRAY * (ratio + 1):
            raise columns.fault(f"expected {TRAY * (ratio + 1)}, the GPUs of {name}", index, "gpus")
        rows.append(
            SystemMeasurement(
                models[index],
                prompts[index],
                gpus[index],
                batches[index],
                ratio,
                rates[index],
                "below the KV ceiling" not in notes[index],
            )
        )
    return rows


def curves(rows: list[StepMeasurement]) -> dict[tuple[int, int], list[StepMeasurement]]:
    """The measured curves by prompt length and batch size, each in ascending ratio."""
    by_curve: dict[tuple[int, int], list[StepMeasurement]] = {}
    for row in sorted(rows, key=lambda row: (*row.curve, row.ratio)):
        by_curve.setdefault(row.curve, []).append(row)
    return by_curve


def require_folder(folder: Path | None) -> Path:
    """The folder of `--data`, which holds `ratio_sweep.csv`."""
    if folder is None:
        raise BadInput(f"expected a folder with {RATIO_SWEEP}, which is not part of the project", field="--data")
    if not (folder / RATIO_SWEEP).is_file():
        raise BadInput(f"expected a folder with {RATIO_SWEEP}", field="--data", value=str(folder))
    return folder
