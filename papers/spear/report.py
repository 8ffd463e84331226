"""Tables and figures of the reproduced SPEAR paper: published beside computed, and the disagreements."""

from __future__ import annotations

from typing import Any

from papers.layout import disagreements
from reports.blocks import Document, Report, Table
from reports.layout import Section, bullets, percent, render, rows_table, sections, table


def tables(document: Document) -> Report:
    """Table 3, the SLO scheduler against static sizes, the alternatives, then the disagreements in words."""
    workload, coarse = document["workload"], document["coarse"]
    parts: list[Section] = [
        (
            f"Table 3, ms: Llama-2-7B, {workload['rate']:g} requests/s, {workload['sampling']}"
            " (* fitted, the others held out; brackets: 95 % of single runs)",
            _rows(document["rows"]),
        ),
        (
            "Mean TTFT of the SLO scheduler less that of every static size that meets its goal, ms"
            " (brackets: 95 % of the mean)",
            _against(document),
        ),
        ("Iteration latency that the static rows imply, ms", _iteration(document["iteration"])),
        (f"The same predictions with chunks in multiples of {coarse['step']}, ms", _rows(coarse["rows"])),
        ("Other readings of static chunking and other samplings: errors", _alternatives(document)),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _rows(rows: list[Document]) -> Table:
    column = (
        "{0[published]:1e3 .1f} | {0[predicted]:1e3 .1f} | {0[error]:100 +.1f} %"
        " | [{0[prediction][0]:1e3 .1f}, {0[prediction][1]:1e3 .1f}] | {0[inside]:yes}"
    )
    columns = (column.replace("{0", "{" + name) for name in ("p99_itl", "ttft"))
    predicted = "predicted | error | interval | inside"
    return rows_table(
        f"scheduler | density | P99 ITL | {predicted} | TTFT | {predicted}",
        " | ".join(["{scheduler}{fitted:*}", "{density}", *columns]),
        rows,
    )


def _against(document: Document) -> Table:
    """One line for each static size whose P99 ITL keeps the goal, as printed or as predicted."""
    result = table("goal", "density", "static", "printed", "predicted", "interval")
    for comparison in document["against_static"]:
        for size in comparison["sizes"]:
            result.add_row(
                f"{1e3 * comparison['goal']:g}",
                comparison["density"],
                str(size["static"]),
                _difference(size["published"]),
                _difference(size["predicted"]),
                "" if size["predicted"] is None else _range(size["confidence"], "+"),
            )
    return result


def _difference(seconds: float | None) -> str:
    return "misses it" if seconds is None else f"{1e3 * seconds:+.1f}"


def _iteration(iteration: Document) -> Table:
    columns = [name for name in iteration if name != "tokens"]
    result = table("tokens", *("without" if name == "w4" else name for name in columns))
    for index, tokens in enumerate(iteration["tokens"]):
        result.add_row(str(tokens), *(f"{1e3 * iteration[name][index]:.2f}" for name in columns))
    return result


def _alternatives(document: Document) -> Table:
    """The chosen alternative comes first. Errors of static rows are root mean squares of logarithms, of its fit."""
    result = table("reading", "sampling", "static P99 ITL", "static TTFT", "SLO P99 ITL", "SLO TTFT")
    held_out = [row for row in document["rows"] if not row["fitted"]]
    for alternative in ({**document["fit"], "rows": held_out}, *document["alternatives"]):
        spans = (_percent_span([row[name]["error"] for row in alternative["rows"]]) for name in ("p99_itl", "ttft"))
        misfits = (f"{100 * alternative[name]:.1f} %" for name in ("misfit_p99_itl", "misfit_ttft"))
        result.add_row(alternative["reading"], alternative["sampling"], *misfits, *spans)
    return result


def _percent_span(errors: list[float]) -> str:
    return f"{percent(min(errors))} to {percent(max(errors))}"


def _range(bounds: list[float], sign: str = "") -> str:
    low, high = (f"{1e3 * end:{sign}.1f}" for end in bounds)
    return f"[{low}, {high}]"


# -- figures -----------------------------------------------------------------------------------------------------------


STATIC, SLO = "#d1762b", "#1f5fa8"
COLOURS = {"w4": "black", "sparse": "#2a8c5a", "mid": "#1f5fa8", "dense": "#d1762b"}


def figures(document: Document) -> dict[str, str]:
    return {
        "tradeoff": render(_draw_tradeoff, document, len(_densities(document))),
        "iteration": render(_draw_iteration, document),
    }


def _densities(document: Document) -> list[str]:
    return list(dict.fromkeys(row["density"] for row in document["rows"]))


def _draw_tradeoff(panels: list[Any], document: Document) -> None:
    """Mean TTFT against P99 ITL, a panel a density; bars reach over 95 % of single runs, dots stand at the goals."""
    for axes, density in zip(panels, _densities(document), strict=True):
        rows = [row for row in document["rows"] if row["density"] == density]
        for fitted, colour, name in ((True, STATIC, "static"), (False, SLO, "SLO")):
            _draw_rows(axes, [row for row in rows if row["fitted"] == fitted], colour, name)
        for goal in sorted({row["goal"] for row in rows if row["goal"]}):
            axes.axvline(1e3 * goal, color="black", ls=":", lw=1)
        axes.set(yscale="log", xlabel="P99 ITL, ms")
        axes.set_title(density, loc="left", fontsize=10)
    panels[0].set_title(f"SPEAR, Table 3: {_densities(document)[0]}", loc="left", fontsize=10)
    panels[0].set_ylabel("mean TTFT, ms")
    panels[0].legend(fontsize=7, frameon=False)


def _draw_rows(axes: Any, rows: list[Document], colour: str, name: str) -> None:
    for kind, face in (("published", "white"), ("predicted", colour)):
        across, up = ([1e3 * row[column][kind] for row in rows] for column in ("p99_itl", "ttft"))
        # Held-out rows are where a difference between the two has something to say: lines join the fitted ones only.
        mark = "o" if name == "static" else "s"
        line = f"{mark}-" if name == "static" and kind == "predicted" else mark
        label = f"{name}, {'printed' if kind == 'published' else 'predicted'}"
        axes.plot(across, up, line, color=colour, mfc=face, ms=5, lw=1, label=label)
    for row in rows:
        at = 1e3 * row["p99_itl"]["predicted"]
        axes.plot([at, at], [1e3 * end for end in row["ttft"]["prediction"]], color=colour, lw=1, alpha=0.6)
        label, above = (str(row["chunk"]), 3) if row["chunk"] else (f"{1e3 * row['goal']:g} ms", -9)
        place = (at, 1e3 * row["ttft"]["predicted"])
        axes.annotate(label, place, (5, above), textcoords="offset points", fontsize=7)


def _draw_iteration(panels: list[Any], document: Document) -> None:
    """T_S over the tokens of a pass, without compensators and at every density."""
    (axes,) = panels
    iteration = document["iteration"]
    for name, colour in COLOURS.items():
        label = "without compensators" if name == "w4" else name
        latency = [1e3 * seconds for seconds in iteration[name]]
        axes.plot(iteration["tokens"], latency, "o-", color=colour, ms=4, lw=1.2, label=label)
    axes.set(ylim=(0, None), xlabel="tokens of a pass", ylabel="iteration latency, ms")
    axes.set_title("SPEAR: implied by the static rows of Table 3", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
