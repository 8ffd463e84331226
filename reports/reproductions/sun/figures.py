"""Figures of the reproduced SUN paper: published beside computed."""

from __future__ import annotations

from typing import Any

from reports.layout import (
    Document,
    render,
)

COLOURS = {"Full-FT": "#1f5fa8", "AWQ": "#d1762b", "QSUN": "#2a8c5a"}
ISOLATED, SHARED = "#d1762b", "#1f5fa8"


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    return {
        "concurrency": render(_draw_concurrency, document, 2),
        "pool": render(_draw_pool, document, 1),
        "skew": render(_draw_skew, document, 2),
    }


def _draw_concurrency(panels: list[Any], document: Document) -> None:
    """Printed against predicted TPOT and throughput, fitted rows filled, held-out ones open."""
    rows = document["concurrency"]["rows"]
    for axes, (metric, scale, unit) in zip(panels, (("tpot", 1e3, "ms"), ("throughput", 1.0, "tok/s")), strict=True):
        for method, colour in COLOURS.items():
            for fitted, face in ((True, colour), (False, "white")):
                shown = [row for row in rows if row["method"] == method and row["fitted"] == fitted]
                axes.plot(
                    [scale * row["predicted"][metric] for row in shown],
                    [scale * row["published"][metric] for row in shown],
                    "o", color=colour, mfc=face, ms=4.5, lw=0,
                    label=f"{method}, {'fitted' if fitted else 'concurrency 16'}",
                )  # fmt: skip
        ends = [scale * reach(row["published"][metric] for row in rows) for reach in (min, max)]
        axes.plot(ends, ends, color="black", lw=0.8)
        if metric == "throughput":
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel(f"predicted {'TPOT' if metric == 'tpot' else metric}, {unit}")
        axes.set_ylabel(f"printed, {unit}")
    panels[0].set_title("SUN, Table 4: both models, prompts of 1024 to 4096", loc="left", fontsize=10)
    panels[0].legend(fontsize=7, frameon=False)


def _draw_pool(panels: list[Any], document: Document) -> None:
    """Interactivity against throughput a decode GPU."""
    axes, chosen = panels[0], document["pool"]["chosen"]
    for kind, marker, colour in (("published", "o", "black"), ("predicted", "s-", SHARED)):
        axes.plot(
            [row[kind]["throughput"] for row in chosen["rows"]],
            [100 * (1 + row[kind]["interactivity_change"]) for row in chosen["rows"]],
            marker, color=colour, ms=5, lw=1, label="printed" if kind == "published" else "predicted",
        )  # fmt: skip
    for row in chosen["rows"]:
        at = (row["published"]["throughput"], 100 * (1 + row["published"]["interactivity_change"]))
        axes.annotate(f"{row['workers']} {row['placement']}", at, (6, 5), textcoords="offset points", fontsize=8)
    axes.set_ylim(0, 110)
    axes.set_xlabel("output tokens/s a decode GPU")
    axes.set_ylabel("interactivity, % of isolated")
    axes.set_title(f"SUN, figure 3: answers of {chosen['answer']} tokens", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _draw_skew(panels: list[Any], document: Document) -> None:
    """Throughput and interactivity over skew."""
    skew = document["skew"]
    for axes, (metric, label) in zip(
        panels, (("throughput", "output tokens/s"), ("interactivity", "mean 1/TPOT, tokens/s")), strict=True
    ):
        for placement, colour in (("isolated", ISOLATED), ("shared", SHARED)):
            points = [point for point in skew["points"] if point["placement"] == placement]
            axes.plot(
                [point["zipf"] for point in points], [point[metric] for point in points],
                "o-", color=colour, ms=4, lw=1.2, label=placement,
            )  # fmt: skip
        axes.set_ylim(0, 1.1 * max(point[metric] for point in skew["points"]))
        axes.set_xlabel("Zipf exponent over four models")
        axes.set_ylabel(label)
    panels[0].set_title(f"SUN, figure 4: {skew['rate']:.2f} requests/s (simulated)", loc="left", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="lower left")
