"""`twin validate` on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from reports.reproductions.layout import bullets, milliseconds, percent, sections, table

Document = dict[str, Any]

SHOWN = (
    "ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p99", "itl.p99", "e2e.mean", "e2e.p99",
    "output_throughput",
)  # fmt: skip


def validation_table(document: Document) -> Group:
    """Each load's metrics, steps by kind, the worst steps, and what missed its goal."""
    titled: list[tuple[str, Any]] = [("How it was measured", Text("\n".join(headline(document))))]
    for load in document["loads"]:
        title = f"Load {load['load']:g}: {load['rate']:.2f} requests/s, {load['requests']} requests a repeat"
        titled.append((title, _metrics(load)))
    titled.append(("Steps: |predicted / measured - 1|", _steps(document)))
    titled.append(("Steps that were mispredicted most", _worst(document)))
    missed = document["missed"]
    titled.append(("Further off than their goal", bullets(missed) if missed else Text("nothing")))
    return sections(titled)


def headline(document: Document) -> list[str]:
    """Device, model, and how good the step-time model is."""
    steps, plant = document["calibration"], document["plant"]
    median, p90, spread = (
        f"{100 * steps[name]:.1f} %" for name in ("heldout_median_error", "heldout_p90_error", "repeat_spread")
    )
    return [
        f"{document['name']}: {document['scenario']['model']['path']} ({plant['dtype']}) on {plant['device']}",
        f"steps: {steps['provenance']['source']}; held-out error {median} in the median, {p90} at P90;"
        f" steps that are alike differ by {spread}",
        f"capacity by the twin: {document['capacity']:.2f} requests/s. {document['note']}",
        _pace(document),
    ]


def _pace(document: Document) -> str:
    if not document["calibration"]["yardsticks"]:
        return "pace: not read; the machine is taken to hold still"
    paces = [pace for load in document["loads"] for means in load["pace"] for pace in means.values()]
    return (
        f"pace: repeats took {min(paces):.2f} to {max(paces):.2f} times as long as probing, by yardsticks between"
        " their steps; errors are at that pace, and in the last column by what had been probed before, without it"
    )


def _metrics(load: Document) -> Any:
    made = table(
        "",
        "measured",
        "repeats differ by",
        "predicted",
        "error",
        "95 % interval",
        "goal",
        "at the run's own pace",
        "beforehand",
    )
    for name in SHOWN:
        entry = load["metrics"].get(name)
        if entry is None:
            continue
        low, high = entry["interval"]
        made.add_row(
            _label(name),
            _value(name, entry["measured"]),
            f"{100 * entry['repeat_spread']:.1f} %",
            _value(name, entry["predicted"]),
            percent(entry["error"]),
            f"{percent(low)} … {percent(high)}",
            "" if entry["goal"] is None else f"{100 * entry['goal']:g} %",
            percent(entry["error_at_own_pace"]),
            percent(entry["error_beforehand"]),
        )
    return made


def _label(name: str) -> str:
    metric, _, part = name.partition(".")
    return f"{metric.upper()} {part}, ms" if part else f"{metric.replace('_', ' ')}, tokens/s"


def _value(name: str, value: float) -> str:
    return f"{value:.1f}" if "." not in name else f"{1e3 * value:.2f}"


def _steps(document: Document) -> Any:
    made = table("load", "kind", "steps", "seconds", "median", "P90", "bias")
    for load in document["loads"]:
        kinds = {"all": load["steps"]["all"], **load["steps"]["by_kind"]}
        for kind, entry in kinds.items():
            made.add_row(
                f"{load['load']:g}", kind, str(entry["steps"]), f"{entry['seconds']:.2f}",
                f"{100 * entry['median']:.1f} %", f"{100 * entry['p90']:.1f} %", percent(entry["bias"]),
            )  # fmt: skip
    return made


def _worst(document: Document) -> Any:
    made = table("load", "batch", "measured, ms", "predicted, ms")
    for load in document["loads"]:
        for step in load["steps"]["worst"][:3]:
            times = milliseconds(step["measured"]), milliseconds(step["predicted"])
            made.add_row(f"{load['load']:g}", step["batch"], *times)
    return made
