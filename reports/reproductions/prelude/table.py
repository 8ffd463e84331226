"""Tables of the reproduced Prelude paper: published beside computed, and the disagreements."""

from __future__ import annotations

from reports.blocks import Report, Table
from reports.layout import Document, Section, disagreements, milliseconds, percent, sections, table


def tables(document: Document) -> Report:
    """Tables 5 and 6 beside the fitted engines, judges among chats, shared rubrics, then the disagreements in words."""
    parts: list[Section] = [
        ("Table 5, requests/s: Qwen3-4B, 512 in, 1 out (* fitted)", _sweep(document["sweep"])),
        ("What a request costs each engine, ms, as fitted", _costs(document)),
        ("Table 6: Qwen3-0.6B, 128 in, 32 out, from Table 4 and the TPOT (*)", _decode(document["decode_control"])),
        ("The best printed beside the peak of one H200", _floors(document["floors"])),
        *((f"Judges among chats, {load}", _lifetimes(found)) for load, found in document["lifetimes"]["loads"].items()),
        ("Shared rubrics in bursts", _steady(document["prefixes"])),
        ("One cold rubric, requests that come at once: prompt tokens computed", _cold(document["prefixes"]["cold"])),
        ("What disagrees", disagreements(document["claims"])),
    ]
    return sections(parts)


def _sweep(fits: list[Document]) -> Table:
    shown = table("engine", "c", "printed", "predicted", "error", "any split", "of peak")
    for fit in fits:
        for row in fit["rows"]:
            low, high = row["any_share"]
            shown.add_row(
                fit["engine"],
                f"{row['concurrency']}{'*' if row['fitted'] else ''}",
                f"{row['published']:.1f}",
                f"{row['predicted']:.1f}",
                percent(row["error"]),
                f"{low:.0f}-{high:.0f}",
                f"{100 * row['of_floor']:.0f} %",
            )
    return shown


def _costs(document: Document) -> Table:
    shown = table(
        "engine", "client", "host", "step", "prompt", "least prompt", "misfit", "all rows fitted", "one a step, req/s",
    )  # fmt: skip
    every_row = {fit["engine"]: fit["misfit"] for fit in document["sweep_all_rows"]}
    for fit in document["sweep"]:
        misfit = every_row.get(fit["engine"])
        shown.add_row(
            fit["engine"],
            *(milliseconds(fit[name]) for name in ("client", "host", "overhead", "per_prompt", "floor_per_prompt")),
            f"{100 * fit['misfit']:.1f} %",
            "-" if misfit is None else f"{100 * misfit:.1f} %",
            f"{1 / fit['latency_alone']:.1f}",
        )
    return shown


def _decode(predictions: list[Document]) -> Table:
    shown = table("engine", "metric", "printed", "host beside", "error", "host holds up", "error")
    found = {(each["engine"], each["held"]): each["rows"] for each in predictions}
    for engine in dict.fromkeys(each["engine"] for each in predictions):
        for beside, held in zip(found[engine, False], found[engine, True], strict=True):
            written = _rate if beside["metric"] == "rate" else milliseconds
            shown.add_row(
                engine,
                _metric(beside["metric"]) + ("*" if beside["fitted"] else ""),
                written(beside["published"]),
                written(beside["predicted"]),
                percent(beside["error"]),
                written(held["predicted"]),
                percent(held["error"]),
            )
    return shown


def _floors(rows: list[Document]) -> Table:
    shown = table("engine", "TTFT ms, 0.6B", "least", "times", "req/s, 4B", "most", "share")
    for row in rows:
        shown.add_row(
            row["engine"],
            milliseconds(row["ttft"]),
            f"{1e3 * row['ttft_floor']:.2f}",
            f"{row['ttft'] / row['ttft_floor']:.0f}",
            f"{row['best_rate']:.1f}",
            f"{row['rate_ceiling']:.1f}",
            f"{100 * row['best_rate'] / row['rate_ceiling']:.0f} %",
        )
    return shown


def _lifetimes(found: Document) -> Table:
    shown = table(
        "engine", "judges' blocks", "peak", "slots", "all blocks", "chat TTFT ms", "judge TTFT ms", "TPOT ms", "tok/s",
    )  # fmt: skip
    for row in found["variants"]:
        shown.add_row(
            row["variant"],
            _interval(row, "judge_blocks_held", 1, 1),
            f"{row['mean']['judge_blocks_peak']:.0f}",
            f"{row['mean']['judge_slots']:.2f}",
            f"{row['mean']['kv_blocks_held']:.0f}/{row['mean']['kv_blocks']:.0f}",
            _interval(row, "chat_ttft.mean", 1e3, 0),
            _interval(row, "judge_ttft.mean", 1e3, 0),
            _interval(row, "chat_tpot.mean", 1e3, 1),
            _interval(row, "chat_tokens_per_second", 1, 1),
        )
    return shown


def _steady(found: Document) -> Table:
    shown = table("engine", "tokens computed", "spared", "TTFT ms", "P95 ms", "req/s")
    for row in found["steady"]:
        shown.add_row(
            row["variant"],
            f"{row['mean']['computed_tokens']:.0f}",
            f"{row['mean']['cached_tokens']:.0f}",
            _interval(row, "ttft.mean", 1e3, 1),
            _interval(row, "ttft.p95", 1e3, 1),
            f"{row['mean']['requests_per_second']:.1f}",
        )
    return shown


def _cold(jobs: list[Document]) -> Table:
    names = list(jobs[0]["runs"])
    shown = table("peers", "expected led", "not led", *names)
    for job in jobs:
        shown.add_row(
            str(job["peers"]),
            str(job["expected"]["led"]),
            str(job["expected"]["not led"]),
            *(
                f"{job['runs'][name]['computed_tokens']} ({milliseconds(job['runs'][name]['ttft']['mean'])} ms)"
                for name in names
            ),
        )
    return shown


def _interval(row: Document, name: str, scale: float, digits: int) -> str:
    """A mean and the half-width of its 95 % interval."""
    low, high = row["intervals"][name]
    return f"{scale * (low + high) / 2:.{digits}f} ± {scale * (high - low) / 2:.{digits}f}"


def _metric(name: str) -> str:
    return "req/s" if name == "rate" else f"{name.upper()} ms"


def _rate(value: float) -> str:
    return f"{value:.1f}"
