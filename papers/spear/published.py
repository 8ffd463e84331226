"""The SPEAR paper's published figures of chunk scheduling, of quality, and of its model and machine."""

from __future__ import annotations

from dataclasses import dataclass

from papers.common import published, records

DENSITIES = {"sparse": 0.15, "mid": 0.38, "dense": 0.60}
"""Share of modules that carry an error compensator (5.3.3)."""

RATE, REQUESTS = 16.0, 300
"""Requests a second (Table 3), and how many there are (5.1)."""

GOALS = (0.022, 0.016)
"""T_SLO, seconds (Table 3)."""

SINGLE_TOKEN = 4.7e-3
"""Seconds a token at M = 1 with compensators, Llama-2-7B on one GPU (5.3.1)."""

SINGLE_TOKEN_DENSITY = 24.9 / 80.0
"""Share of modules behind `SINGLE_TOKEN`: Table 4's memory of the chosen compensators over that of all of them, MB. The
paper gives no other figure for that checkpoint.
"""

LAYERS, HIDDEN, INTERMEDIATE, PARAMETERS = 32, 4096, 11008, 6.74e9
"""Sizes of Llama-2-7B (from its config.json and model card)."""

MEMORY = 120e9
"""Bytes of the GH200 (5.1)."""


@dataclass(frozen=True)
class Row:
    """One cell of Table 3, seconds. `chunk` for a static chunk size, `goal` for the SLO scheduler."""

    chunk: int | None
    goal: float | None
    density: str
    p99_itl: float
    ttft: float

    @property
    def name(self) -> str:
        return f"static-{self.chunk}" if self.chunk else f"SLO {1e3 * (self.goal or 0):g} ms"


def published_rows() -> list[Row]:
    """Table 3, in its own order."""
    return [
        Row(
            int(row["scheduler"].removeprefix("static-")) if row["scheduler"] != "slo" else None,
            float(row["slo_ms"]) / 1e3 if row["slo_ms"] else None,
            row["ec_density"],
            float(row["p99_itl_ms"]) / 1e3,
            float(row["mean_ttft_ms"]) / 1e3,
        )
        for row in published("spear", "chunk_scheduling")
    ]


def static_rows() -> list[Row]:
    """The rows that latency tables and the workload are fitted to."""
    return [row for row in published_rows() if row.chunk]


def slo_rows() -> list[Row]:
    """The rows that are predicted: nothing is fitted to them."""
    return [row for row in published_rows() if row.goal]


ROUNDING = 1e-9
"""Relative rounding error. Step ends are summed, and a gap is the difference of two of them."""


def meets(p99: float, goal: float) -> bool:
    return p99 <= goal * (1 + ROUNDING)


@dataclass(frozen=True)
class QualityRow:
    """A perplexity of Tables 1, 2, 4, 10 to 12, 17 or 18; `memory` of compensators in MB, `variant` full: 16 bits."""

    where: str
    model: str
    bits: int
    quantiser: str
    grain: str
    variant: str
    text: str
    memory: float | None
    perplexity: float


def quality_rows() -> list[QualityRow]:
    """The printed perplexities with RTN, GPTQ and AWQ."""
    return records(QualityRow, "spear", "quality", memory="memory_mb")
