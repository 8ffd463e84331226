"""Tables and figures of measured AFD bundles: steps and whole systems beside their prediction, and both layouts."""

from __future__ import annotations

from typing import Any

from papers.layout import claims_table
from reports.blocks import Document, Report, Table
from reports.layout import Section, bullets, percent, render, rows_table, sections, table


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
    parts += [("Goals", claims_table(document["claims"])), ("Notes", bullets(document["notes"]))]
    return sections(parts)


def _points(points: list[Document]) -> Table:
    return rows_table(
        "prompt | batch | r | TPOT ms | predicted | error | tok/s/GPU | predicted | set by",
        "{prompt_tokens:,} | {batch_size} | {ratio:g}{fitted:* } | {tpot_measured_ms:.2f} | {tpot_predicted_ms:.2f}"
        " | {error:100 +.1f} % | {throughput_measured:.0f} | {throughput_predicted:.0f} | {bound}",
        points,
    )


def _curves(document: Document) -> Table:
    result = table("prompt", "batch", "fitted", "others", "without this length", "best r", "predicted", "lost")
    left_out = {row["prompt_tokens"]: row["error"] for row in document["left_out"]}
    for curve in document["curves"]:
        result.add_row(
            f"{curve['prompt_tokens']:,}",
            str(curve["batch_size"]),
            _share(curve["error_fitted"]),
            _share(curve["error_predicted"]),
            _share(left_out.get(curve["prompt_tokens"])),
            f"{curve['best_measured']:g}",
            f"{curve['best_predicted']:g}",
            _share(curve["regret"]),
        )
    return result


def _parameters(document: Document) -> Table:
    result = table("parameter", "value", "expected before")
    for parameter in document["parameters"]:
        result.add_row(
            parameter["name"],
            _value(parameter["name"], parameter["value"]),
            _value(parameter["name"], parameter["prior"]),
        )
    if document["wide_ep_overhead"] is not None:
        result.add_row("wide_ep_overhead", _value("seconds", document["wide_ep_overhead"]), "")
    return result


def _systems(systems: list[Document]) -> Table:
    return rows_table(
        "model | layout | GPUs | batch | TPOT ms | predicted | error | tok/s/GPU | predicted",
        "{model} | {layout} | {gpus}{fitted:* } | {batch_size} | {tpot_measured_ms:.1f} | {tpot_predicted_ms:.1f}"
        " | {error:100 +.1f} % | {throughput_measured:.0f} | {throughput_predicted:.0f}",
        systems,
    )


def _comparison(comparison: list[Document]) -> Table:
    gpus = [f"{row['gpus']} GPUs" for row in comparison[0]["rows"]]
    result = table("prompt", *gpus, "best AFD", "best wide EP", "gain of best")
    for length in comparison:
        afd, wide_ep = length["best_afd"], length["best_wide_ep"]
        result.add_row(
            f"{length['prompt_tokens']:,}",
            *(percent(row["gain"]) for row in length["rows"]),
            f"{afd['throughput']:.0f} ({afd['ratio']}:1)",
            f"{wide_ep['throughput']:.0f} ({wide_ep['gpus']} GPUs)",
            percent(length["gain_of_best"]),
        )
    return result


def _value(name: str, value: float) -> str:
    return f"{1e6 * value:.2f} µs" if name.endswith(("seconds", "overhead")) else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8c4a9e", "#a8321f", "#5f6f7f")


def figures(document: Document) -> dict[str, str]:
    svgs = {"steps": render(_draw_steps, document, 2)}
    if document["comparison"]:
        svgs["layouts"] = render(_draw_layouts, document, 1)
    return svgs


def _draw_steps(panels: list[Any], document: Document) -> None:
    """TPOT and throughput a GPU over the ratio: measured points, filled where fitted, and the predicted lines."""
    keys = [("tpot_measured_ms", "tpot_predicted_ms"), ("throughput_measured", "throughput_predicted")]
    for axes, (measured, predicted) in zip(panels, keys, strict=True):
        for index, curve in enumerate(document["curves"]):
            colour = COLOURS[index % len(COLOURS)]
            points = [p for p in document["points"] if _curve(p) == _curve(curve)]
            label = f"{curve['prompt_tokens']:,} tokens, batch {curve['batch_size']}"
            axes.plot(
                [p["ratio"] for p in points], [p[predicted] for p in points], "-", color=colour, lw=1.2, label=label
            )
            for fitted, face in ((True, colour), (False, "white")):
                subset = [p for p in points if p["fitted"] == fitted]
                axes.plot(
                    [p["ratio"] for p in subset], [p[measured] for p in subset], "o", color=colour, mfc=face, ms=4
                )
        axes.set(ylim=(0, None), xlabel="attention trays for each FFN tray, r")
    panels[0].set_ylabel("TPOT, ms")
    panels[1].set_ylabel("output tokens/s a GPU")
    panels[0].set_title("FastAFD on GB200: measured (filled: fitted), lines predicted", loc="left", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")


def _draw_layouts(panels: list[Any], document: Document) -> None:
    """Predicted gain of AFD over wide EP by the number of GPUs, a line for each prompt length."""
    axes = panels[0]
    for index, length in enumerate(document["comparison"]):
        axes.plot(
            [row["gpus"] for row in length["rows"]], [100 * row["gain"] for row in length["rows"]],
            "o-", color=COLOURS[index % len(COLOURS)], alpha=0.55 if index >= len(COLOURS) else 1, ms=3, lw=1.2,
            label=f"{length['prompt_tokens']:,}",
        )  # fmt: skip
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xlabel="GPUs", ylabel="AFD over wide EP, % tokens/s a GPU")
    axes.set_title("Predicted, by prompt tokens", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False)


def _curve(row: Document) -> tuple[int, int]:
    return row["prompt_tokens"], row["batch_size"]
