"""Figures of the reproduced Prelude paper: published beside computed."""

from __future__ import annotations

from typing import Any

from reports.layout import Document, render

COLOURS = {"prelude": "#1f5fa8", "vllm": "#d1762b", "sglang": "#2a8c5a"}
SIZE = (7.2, 4.2)
"""Width and height of a figure, inches."""


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text."""
    return {
        "sweep": render(_draw_sweep, document, size=SIZE),
        "lifetimes": render(_draw_lifetimes, document, size=SIZE),
    }


def _draw_sweep(panels: list[Any], document: Document) -> None:
    """Table 5: printed and predicted requests/s, the range that the fit leaves open, and the peak of the device."""
    (axes,) = panels
    for fit in document["sweep"]:
        colour, rows = COLOURS[fit["engine"]], fit["rows"]
        at = [row["concurrency"] for row in rows]
        low, high = zip(*(row["any_share"] for row in rows), strict=True)
        axes.fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            at, [row["predicted"] for row in rows], "-", color=colour, lw=1.2, label=f"{fit['engine']}, predicted"
        )
        for fitted, face in ((True, colour), (False, "white")):
            shown = [row for row in rows if row["fitted"] == fitted]
            axes.plot(
                [row["concurrency"] for row in shown], [row["published"] for row in shown], "o", color=colour, mfc=face,
                ms=5, label=f"{fit['engine']}, printed{', fitted' if fitted else ''}",
            )  # fmt: skip
    peak = document["floors"][0]["rate_ceiling"]
    axes.axhline(peak, color="black", ls=":", lw=1, label=f"one H200 at its peak, {peak:.0f}")
    axes.set_xscale("log", base=2)
    ticks = [row["concurrency"] for row in document["sweep"][0]["rows"]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("concurrency")
    axes.set_ylabel("requests/s")
    axes.set_title("Prelude, Table 5: Qwen3-4B, 512 tokens in, 1 out", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False, ncols=2)


def _draw_lifetimes(panels: list[Any], document: Document) -> None:
    """Mean TTFT of judges and chats below capacity, with 95 % intervals."""
    (axes,) = panels
    variants = document["lifetimes"]["loads"]["open"]["variants"]
    for offset, (who, colour) in enumerate((("judge", COLOURS["prelude"]), ("chat", COLOURS["vllm"]))):
        bounds = [row["intervals"][f"{who}_ttft.mean"] for row in variants]
        middle = [(low + high) / 2 for low, high in bounds]
        reach = [(high - low) / 2 for low, high in bounds]
        places = [index + 0.36 * (offset - 0.5) for index in range(len(variants))]
        axes.barh(places, middle, 0.34, xerr=reach, color=colour, alpha=0.8, ecolor="#333", capsize=2, label=f"{who}s")
    axes.set_yticks(range(len(variants)), [row["variant"] for row in variants])
    axes.invert_yaxis()
    axes.set_xlabel("mean TTFT, seconds, with 95 % interval")
    axes.set_title("Judges among chats, below capacity (simulated)", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
