"""The file `twin.engine-steps/2`: a fitted regression on engine steps."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.calibration.file_format import Provenance
from latency_models.fitting.broken_line import BrokenLine
from latency_models.io.config_io import Strict, checked, read_yaml

SCHEMA = "twin.engine-steps/2"


class EngineRegressionFile(Strict):
    """The file `twin.engine-steps/2`. Times are in seconds.

    `page_tokens` and `yardsticks`, earlier names of `block_size` and `speed_probes`, are read as well.

    Attributes:
        block_size: tokens of a KV block.
        overhead, slopes, lines: β, then δ κ ω by name, then the broken lines by name.
        largest: the largest measured value of each feature.
        points: number of steps in the fit.
        heldout_median_error, heldout_p90_error: |predicted / measured − 1| of held-out steps.
        repeat_spread: relative deviation among equal steps, which no model can explain.
        round_spread: relative deviation among rounds of the profile; 0 in files of earlier versions.
        clock: of the timing (`wall`, or `direct`: CPU time of one thread).
        speed_probes: seconds of the speed probes, by their rows, at the machine speed that the model describes; empty
            where the speed was not read.
        frontend: work between steps, where several engines were measured: fields of `system.frontend`, seconds.
    """

    schema_: Literal["twin.engine-steps/2"] = Field(alias="schema")
    block_size: PositiveInt = Field(validation_alias=AliasChoices("block_size", "page_tokens"))
    overhead: NonNegativeFloat
    slopes: dict[str, NonNegativeFloat]
    lines: dict[str, BrokenLine]
    largest: dict[str, int]
    points: PositiveInt
    heldout_median_error: NonNegativeFloat
    heldout_p90_error: NonNegativeFloat
    repeat_spread: NonNegativeFloat
    round_spread: NonNegativeFloat = 0.0
    clock: Literal["wall", "direct"] = "wall"
    speed_probes: dict[PositiveInt, PositiveFloat] = Field(
        default_factory=dict, validation_alias=AliasChoices("speed_probes", "yardsticks")
    )
    frontend: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    provenance: Provenance


def read_engine_regression_file(path: Path) -> EngineRegressionFile:
    """Read and check a file."""
    return checked(EngineRegressionFile, read_yaml(path), path)
