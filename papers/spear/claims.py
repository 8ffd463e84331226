"""The SPEAR paper's claims on chunk scheduling, beside the results, and notes on the method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from papers.layout import Claim, claim
from papers.spear.published import GOALS, REQUESTS
from reports.layout import milliseconds as ms

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
