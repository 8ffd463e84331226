"""Tables of measured AFD bundles: measured beside predicted steps, whole systems, and both layouts compared."""

from __future__ import annotations

from reports.blocks import Report, Table
from reports.layout import Document, Section, bullets, percent, sections, table


def tables(document: Document) -> Report:
    """Steps over the ratio, errors by curve, fitted numbers, systems, AFD against wide EP, then the goals."""
    parts: list[Section] = [
        ("Decode step over attention trays for each FFN tray (* fitted)", _points(document["points"])),
        ("Mean absolute errors of TPOT, and throughput lost by the predicted ratio", _curves(document)),
        (f"Fitted on {document['fit']['points']} steps, for one layer and microbatch", _parameters(document)),
    ]
    if document["systems"]:
        parts += [
            ("Whole systems (* fitted)", _systems(document["systems"])),
            ("AFD over wide EP on the same GPUs, output tokens/s and GPU", _comparison(document["comparison"])),
        ]
    parts += [
        ("Goals", _goals(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _points(points: list[Document]) -> Table:
    shown = table("prompt", "batch", "r", "TPOT ms", "predicted", "error", "tok/s/GPU", "predicted", "set by")
    for point in points:
        shown.add_row(
            f"{point['prompt_tokens']:,}",
            str(point["batch_size"]),
            f"{point['ratio']:g}{'*' if point['fitted'] else ' '}",
            f"{point['tpot_measured_ms']:.2f}",
            f"{point['tpot_predicted_ms']:.2f}",
            percent(point["error"]),
            f"{point['throughput_measured']:.0f}",
            f"{point['throughput_predicted']:.0f}",
            point["bound"],
        )
    return shown


def _curves(document: Document) -> Table:
    shown = table("prompt", "batch", "fitted", "others", "without this length", "best r", "predicted", "lost")
    left_out = {each["prompt_tokens"]: each["error"] for each in document["left_out"]}
    for curve in document["curves"]:
        shown.add_row(
            f"{curve['prompt_tokens']:,}",
            str(curve["batch_size"]),
            _share(curve["error_fitted"]),
            _share(curve["error_predicted"]),
            _share(left_out.get(curve["prompt_tokens"])),
            f"{curve['best_measured']:g}",
            f"{curve['best_predicted']:g}",
            _share(curve["regret"]),
        )
    return shown


def _parameters(document: Document) -> Table:
    shown = table("parameter", "value", "expected before")
    for each in document["parameters"]:
        shown.add_row(each["name"], _value(each["name"], each["value"]), _value(each["name"], each["prior"]))
    if document["wide_ep_overhead"] is not None:
        shown.add_row("wide_ep_overhead", _value("seconds", document["wide_ep_overhead"]), "")
    return shown


def _systems(systems: list[Document]) -> Table:
    shown = table("model", "layout", "GPUs", "batch", "TPOT ms", "predicted", "error", "tok/s/GPU", "predicted")
    for row in systems:
        shown.add_row(
            row["model"],
            row["layout"],
            f"{row['gpus']}{'*' if row['fitted'] else ' '}",
            str(row["batch_size"]),
            f"{row['tpot_measured_ms']:.1f}",
            f"{row['tpot_predicted_ms']:.1f}",
            percent(row["error"]),
            f"{row['throughput_measured']:.0f}",
            f"{row['throughput_predicted']:.0f}",
        )
    return shown


def _comparison(comparison: list[Document]) -> Table:
    gpus = [f"{row['gpus']} GPUs" for row in comparison[0]["rows"]]
    shown = table("prompt", *gpus, "best AFD", "best wide EP", "gain of best")
    for length in comparison:
        afd, wide_ep = length["best_afd"], length["best_wide_ep"]
        shown.add_row(
            f"{length['prompt_tokens']:,}",
            *(percent(row["gain"]) for row in length["rows"]),
            f"{afd['throughput']:.0f} ({afd['ratio']}:1)",
            f"{wide_ep['throughput']:.0f} ({wide_ep['gpus']} GPUs)",
            percent(length["gain_of_best"]),
        )
    return shown


def _goals(claims: list[Document]) -> Table:
    shown = table("goal", "at most", "found", "met")
    for claim in claims:
        shown.add_row(
            claim["what"],
            claim["published"].removeprefix("at most "),
            claim["found"],
            "yes" if claim["agrees"] else "no",
        )
    return shown


def _value(name: str, value: float) -> str:
    return f"{1e6 * value:.2f} µs" if name.endswith(("seconds", "overhead")) else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"
