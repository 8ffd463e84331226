"""`twin validate` on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from reports.layout import bullets, milliseconds, percent, sections, table
from reports.validation.verdict import contention_line, verdict_line

Document = dict[str, Any]

SHOWN = (
    "ttft.mean", "ttft.p50", "ttft.p99", "tpot.mean", "tpot.p99", "itl.p99", "e2e.mean", "e2e.p99",
    "output_throughput", "sessions.time.mean", "sessions.waited.mean", "sessions.resent_cached",
    "speculation.acceptance_rate", "speculation.tokens_per_decode",
)  # fmt: skip

CLOCKS = {
    "wall": "wall (arrivals are waited for)",
    "direct": "direct (CPU time of the engine's own computation; waits for arrivals are skipped)",
}


def validation_table(document: Document) -> Group:
    """Metrics of each load, steps by kind of batch, the worst steps, and the goals that were missed."""
    titled: list[tuple[str, Any]] = [("How it was measured", Text("\n".join(headline(document))))]
    for load in document["loads"]:
        rate = f"{load['rate']:.2f} {arriving(document)}/s"
        title = f"Load {load['load']:g}: {rate}, {load['requests']} requests a repeat"
        titled.append((title, _metrics(load)))
    if any(name.startswith("speculation.") for load in document["loads"] for name in load["metrics"]):
        titled.append(("Drafts that were accepted, by position", _drafts(document)))
    titled.append(("Steps: |forecast / measured - 1|", _steps(document)))
    titled.append(("Steps with the largest errors", _worst(document)))
    if document.get("coverage"):
        titled.append(("Coverage", Text(coverage(document))))
    missed = document["missed"]
    titled.append(("Goals that the forecast misses", bullets(missed) if missed else Text("none")))
    titled.append(("", Text(verdict_line(document))))
    return sections(titled)


def clock_of(document: Document) -> str:
    """The clock of the live runs; documents of earlier versions do not name theirs, which was wall time."""
    clock: str = document.get("clock", "wall")
    return clock


def arriving(document: Document) -> str:
    """The noun for what arrives, at loads relative to the capacity: requests, or sessions."""
    noun: str = document.get("arriving", "requests")
    return noun


def headline(document: Document) -> list[str]:
    """The device, the model, the accuracy of the step-time model, and what the errors mean."""
    steps, backend = document["calibration"], document["backend"]
    median, p90, spread = (
        f"{100 * steps[name]:.1f} %" for name in ("heldout_median_error", "heldout_p90_error", "repeat_spread")
    )
    return [
        f"{document['name']}: {document['scenario']['model']['path']} ({backend['dtype']}) on {backend['device']}",
        f"steps: {steps['provenance']['source']}; error on held-out steps {median} in the median, {p90} at P90;"
        f" equal steps differ by {spread}, rounds by {100 * steps.get('round_spread', 0.0):.1f} %",
        f"predicted capacity: {document['capacity']:.2f} {arriving(document)}/s. {document['note']}",
        f"clock: {CLOCKS[clock_of(document)]}",
        *_profiled(document),
        *contention_line(document),
    ]


def _profiled(document: Document) -> list[str]:
    if document.get("profiled") == "in turns":
        return ["forecast by a profile of other requests, in turns with the replays"]
    return []


def coverage(document: Document) -> str:
    """The share of measured values that lie in the forecast's intervals."""
    found = document["coverage"]
    share = 100 * found["inside"] / found["values"]
    return (
        f"{found['inside']} of {found['values']} measured values of metrics with goals ({share:.0f} %) lie in the"
        " model's 95 % intervals around the forecasts for their own requests"
    )


def _metrics(load: Document) -> Any:
    drafts = _has_drafts(load)
    expected = ("forecast interval", "sampling", "model", *drafts, "inside") if _has_intervals(load) else ()
    titles = ("", "measured", "repeat spread", "forecast", "error", "95 % interval", "goal")
    shown = table(*titles, *expected)
    for name in SHOWN:
        entry = load["metrics"].get(name)
        if entry is None:
            continue
        low, high = entry["interval"]
        shown.add_row(
            _label(name),
            _value(name, entry["measured"]),
            f"{100 * entry['repeat_spread']:.1f} %",
            _value(name, entry["predicted"]),
            percent(entry["error"]),
            f"{percent(low)} … {percent(high)}",
            "" if entry["goal"] is None else f"{100 * entry['goal']:g} %",
            *(_expected(name, entry, len(load["measured"]), drafts) if expected else ()),
        )
    return shown


def _has_intervals(load: Document) -> bool:
    return any(entry.get("inside") is not None for entry in load["metrics"].values())


def _has_drafts(load: Document) -> tuple[str, ...]:
    """The column of the deviation by drafts, with speculative decoding."""
    return ("drafts",) if any("drafts" in entry.get("parts", {}) for entry in load["metrics"].values()) else ()


def _expected(name: str, entry: Document, repeats: int, drafts: tuple[str, ...]) -> tuple[str, ...]:
    """The forecast's own interval, the deviations in it, and the repeats that the model's part contains."""
    if entry.get("inside") is None:
        return ("", "", "", *("" for _ in drafts), "")
    low, high = entry["forecast_interval"]
    sampling, model = (entry["parts"][part] for part in ("sampling", "model"))
    return (
        f"{_value(name, low)} to {_value(name, high)}",
        "" if sampling is None else f"{100 * sampling:.1f} %",
        f"{100 * model:.1f} %",
        *(f"{100 * entry['parts'][part]:.1f} %" for part in drafts),
        f"{entry['inside']} of {repeats}",
    )


_RATIOS = ("sessions.resent_cached", "speculation.acceptance_rate", "speculation.tokens_per_decode")

_OF_SESSIONS = {
    "sessions.time.mean": "time to a session's last answer, s",
    "sessions.waited.mean": "of it waiting for answers, s",
}


def _drafts(document: Document) -> Any:
    """Shares of drafts whose token at each position was right, and the share of decodes that had one."""
    shown = table("load", "", "decodes with a draft", "accepted, by position")
    for load in document["loads"]:
        for title, key in (("measured", "measured"), ("forecast", "predicted")):
            runs = [each["speculation"] for each in load[key]]
            drafts, decodes = (sum(run[name] for run in runs) for name in ("num_drafts", "num_decodes"))
            each = zip(*(run["num_accepted_tokens_per_pos"] for run in runs), strict=True)
            shares = ", ".join(f"{100 * sum(counts) / max(drafts, 1):.0f} %" for counts in each)
            shown.add_row(f"{load['load']:g}", title, f"{100 * drafts / max(decodes, 1):.0f} %", shares)
    return shown


def _label(name: str) -> str:
    if name in _RATIOS:
        return name.partition(".")[2].replace("_", " ")
    if name.startswith("sessions."):
        return _OF_SESSIONS[name]
    metric, _, part = name.partition(".")
    return f"{metric.upper()} {part}, ms" if part else f"{metric.replace('_', ' ')}, tokens/s"


def _value(name: str, value: float) -> str:
    if name in _RATIOS:
        return f"{value:.3f}"
    if name.startswith("sessions."):
        return f"{value:.3f}"
    return f"{value:.1f}" if "." not in name else f"{1e3 * value:.2f}"


def _steps(document: Document) -> Any:
    shown = table("load", "kind", "steps", "seconds", "median", "P90", "bias")
    for load in document["loads"]:
        for kind, entry in _kinds(load["steps"]).items():
            shown.add_row(
                f"{load['load']:g}", kind, str(entry["steps"]), f"{entry['seconds']:.2f}",
                f"{100 * entry['median']:.1f} %", f"{100 * entry['p90']:.1f} %", percent(entry["bias"]),
            )  # fmt: skip
    return shown


def _kinds(steps: Document) -> Document:
    return {"all": steps["all"], **steps["by_kind"]}


def _worst(document: Document) -> Any:
    shown = table("load", "batch", "measured, ms", "forecast, ms")
    for load in document["loads"]:
        for step in load["steps"]["worst"][:3]:
            times = milliseconds(step["measured"]), milliseconds(step["predicted"])
            shown.add_row(f"{load['load']:g}", step["batch"], *times)
    return shown
