"""The SPEAR paper's published figures of chunk scheduling, of its model and machine, and its claims beside results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from papers.common import Claim, claim, published, records
from reports.blocks import milliseconds as ms

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


GATE_OFF = {"Llama-3.2-1B": 1.03, "Llama-3.2-3B": 0.41, "Llama-2-7B": 0.18}
"""C4 perplexity that γ ≡ 1 costs at 4 bits (5.4.2)."""


def static_rows() -> list[Row]:
    """The rows that latency tables and the workload are fitted to."""
    return [row for row in published_rows() if row.chunk]


def slo_rows() -> list[Row]:
    """The rows that are predicted: nothing is fitted to them."""
    return [row for row in published_rows() if row.goal]


ROUNDING = 1e-9
"""Relative rounding error. Step ends are summed, and a gap is the difference of two of them."""

HALF_DIGIT = 0.05e-3
"""Half of the last printed digit, seconds: Table 3 prints tenths of a millisecond."""


def meets(p99: float, goal: float) -> bool:
    return p99 <= goal * (1 + ROUNDING)


def claims(document: dict[str, Any]) -> list[Claim]:
    return [*_goal_claims(document), *_ttft_claims(document), *_table_claims(document)]


def _goal_claims(document: dict[str, Any]) -> list[Claim]:
    rows = []
    step = document["coarse"]["step"]
    for goal in GOALS:
        exact, coarse = ([row["p99_itl"] for row in some if row["goal"] == goal]
                       for some in (document["rows"], document["coarse"]["rows"]))  # fmt: skip
        meeting = [meets(row["predicted"], goal) for row in exact]
        rows.append(
            claim("Table 3", f"the SLO scheduler keeps P99 ITL within {ms(goal)} ms",
                   _span(row["published"] for row in exact), _span(row["predicted"] for row in exact), all(meeting),
                   f"met at {sum(meeting)} of {len(meeting)} densities; with chunks in multiples of {step}"
                   f" {_span(row['predicted'] for row in coarse)}")
        )  # fmt: skip
    marks = [(goal_row["published"], goal_row["predicted"]) for row in document["rows"] if row["fitted"]
             for goal_row in row["meets"]]  # fmt: skip
    same = sum(a == b for a, b in marks)
    rows.append(
        claim("Table 3", "which static chunk sizes meet which goal", f"{len(marks)} marks", f"{same} the same",
               same == len(marks), "P99 ITL of these rows is fitted, with errors of "
               + _percent([row["p99_itl"]["error"] for row in document["rows"] if row["fitted"]]))
    )  # fmt: skip
    return rows


def _ttft_claims(document: dict[str, Any]) -> list[Claim]:
    rows = []
    for comparison in document["against_static"]:
        published, predicted = comparison["published"], comparison["predicted"]
        low, high = predicted["confidence"]
        note = f"predicted against static-{predicted['static']}, 95 % of the mean difference"
        if published["difference"] >= 0:
            note += "; the printed row does not bear the claim out either"
        rows.append(
            claim("5.3.3",
                   f"TTFT below every static size that meets {ms(comparison['goal'])} ms, {comparison['density']}",
                   f"{1e3 * published['difference']:+.1f} ms", f"{1e3 * low:+.1f} to {1e3 * high:+.1f} ms", high < 0,
                   note)
        )  # fmt: skip
    return rows


def _table_claims(document: dict[str, Any]) -> list[Claim]:
    rows = []
    for name, title, fitted in (
        ("ttft", "mean TTFT, static rows", True),
        ("ttft", "mean TTFT, SLO rows, held out", False),
        ("p99_itl", "P99 ITL, SLO rows, held out", False),
    ):
        some = [row[name] for row in document["rows"] if row["fitted"] == fitted]
        inside = sum(entry["inside"] for entry in some)
        note = "; a scheduler that weighs every token comes up to its goal" if name == "p99_itl" else ""
        errors = _percent([entry["error"] for entry in some])
        rows.append(
            claim("Table 3", title, f"{len(some)} values", f"{inside} inside", inside == len(some),
                   f"inside 95 % of runs of {REQUESTS} requests; errors of the mean {errors}{note}")
        )  # fmt: skip
    worst = max(document["density"], key=lambda entry: entry["largest"])
    largest = max(row["p99_itl"]["published"] for row in document["rows"] if row["chunk"] == worst["chunk"])
    rows.append(
        claim("4.3", "P99 ITL at a static chunk size is linear in the density", "sum over modules",
               f"within {ms(worst['largest'])} ms", worst["largest"] <= HALF_DIGIT,
               f"largest at chunks of {worst['chunk']}, of {ms(largest)} ms; 0.05 ms is what printing rounds off")
    )  # fmt: skip
    return rows


def notes(document: dict[str, Any]) -> list[str]:
    workload, fit, coarse = document["workload"], document["fit"], document["coarse"]
    errors = [row["p99_itl"]["error"] for row in coarse["rows"]]
    widths = {f"{row['scheduler']}, {row['density']}": row["ttft"] for row in document["rows"]}
    widest = max(widths, key=lambda name: _relative_width(widths[name]))
    low, high = widths[widest]["prediction"]
    held_out = [_relative_width(row["ttft"]) for row in document["rows"] if not row["fitted"]]
    return [
        "Kernel latencies are not printed: tables are what the static rows of Table 3 and the decode latency of 5.3.1"
        " imply. They are of no use for another model or device.",
        f"How {REQUESTS} requests were drawn is not printed either. Of {len(document['screening'])} pairs of a reading"
        f" of static chunking and a sampling, the best fit to the static rows was taken among those in which a step"
        f" takes T(d) + T(c), as 4.3 reckons it: {fit['reading']}, {workload['sampling']}"
        f" ({workload['mean_prompt']:.0f} tokens in, {workload['mean_answer']:.0f} out on average). Some others fit"
        " about as well; what they would predict stands beside it.",
        "No row of the SLO scheduler enters a parameter, but the list of readings was written by people who had seen"
        " them. In the twin a step takes just what the scheduler reckons, so that a goal is missed only where decodes"
        " leave no room for c_min: that goals are met is a check of the arithmetic, what TTFT that costs is the"
        " prediction.",
        f"Chunks in multiples of {coarse['step']} tokens give P99 ITL {_percent(errors)} off on those rows. That was"
        " found by looking at them, so no prediction uses it.",
        f"Runs of {REQUESTS} requests differ. A printed mean TTFT inside their 95 % says little where those are wide"
        f" ({widest}: {ms(low)} to {ms(high)} ms) and more at the SLO scheduler (± {100 * min(held_out):.0f} to"
        f" {100 * max(held_out):.0f} %). Its P99 ITL hardly varies.",
        f"c_min = {document['chunk_limits'][0]} and c_max = {document['chunk_limits'][1]} are assumed; the paper states"
        " neither.",
    ]


def _relative_width(column: dict[str, Any]) -> float:
    low, high = column["prediction"]
    return float((high - low) / 2 / column["predicted"])


def _span(seconds: Iterable[float]) -> str:
    values = list(seconds)
    return f"{ms(min(values))} to {ms(max(values))} ms"


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * min(errors):+.1f} to {100 * max(errors):+.1f} %"
