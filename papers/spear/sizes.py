"""Studies on language models of a size: quantised models, and the ways to compensate them."""

from __future__ import annotations

from dataclasses import dataclass

from live.adaptation.compensation.calibrating import CalibrationSettings
from live.adaptation.compensation.selection import DEFAULT_RULE, Rule
from live.adaptation.quantisers.grid import Precision
from live.adaptation.quantisers.models import Method
from live.adaptation.sizes import TEXT_SIZES, TextSize
from live.adaptation.training import TrainingSettings

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
