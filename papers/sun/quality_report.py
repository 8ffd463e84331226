"""Tables and figures of SUN's claims about accuracy: small models trained here beside the printed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from papers.layout import claims_table, disagreements, percent_range, step_shares
from reports.blocks import Document, Report, Table
from reports.layout import Section, bullets, render, sections, table

NAMES = {
    "base": "base",
    "full": "full fine-tuning",
    "naive": "naive sharing",
    "sun": "SUN",
    "sun_attention": "SUN, attention only",
    "sun_low_rank": "SUN, low rank",
} | {
    f"{variant}_{quantiser}{bits}": f"{name}{quantiser.upper()}, {bits} bits"
    for quantiser in ("rtn", "gptq", "awq")
    for bits in (4, 3)
    for variant, name in (("full", "full fine-tuning, then "), ("sun", "SUN, decoder then "), ("qsun", "QSUN, "))
}
"""Variants as tables and figures name them."""


CLAIM_COLUMNS: dict[str, Callable[[Document], str]] = {
    "over seeds": lambda claim: percent_range(claim["interval"]),
    "tasks": lambda claim: str(claim["tasks"]),
}


def tables(document: Document) -> Report:
    """Exact match of every variant, the claims with what is found, what disagrees, and notes."""
    size, bases = document["size"]["operations"], document["bases"]
    per_seed = ", ".join(f"{100 * _mean(base['exact_match'].values()):.1f}" for base in bases)
    about = (
        f"A base model of {bases[0]['parameters']:,} parameters ({size['layers']} layers, width {size['hidden']}),"
        f" {size['digits']} digits, {len(bases)} seeds; on its own eight operations {per_seed} %"
    )
    parts: list[Section] = [
        (f"{about}\nExact match on operations it has not seen, % (and 95 % interval over seeds)", _variants(document)),
        *_text(document),
        ("Claims", claims_table(document["claims"], CLAIM_COLUMNS)),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _variants(document: Document) -> Table:
    rows = document["variants"]
    names = list(rows[0]["by_task"])
    result = table("variant", *names, "mean", "interval", "trained", "printed (other models and tasks)")
    for row in rows:
        result.add_row(
            NAMES.get(row["variant"], row["variant"]),
            *(f"{100 * row['by_task'][name]['exact_match']:.1f}" for name in names),
            f"{100 * row['exact_match']:.1f}",
            percent_range(row["interval"]),
            f"{row['trained_parameters']:,}" if row["trained_parameters"] else "",
            percent_range(row["printed"]),
        )
    return result


def _text(document: Document) -> Iterator[Section]:
    """The tasks of text, if there are any: exact match, right tokens, and perplexity, with intervals over seeds."""
    rows, bases = document["text_variants"], document["text_bases"]
    if not rows:
        return
    per_seed = ", ".join(f"{base['perplexity']:.2f}" for base in bases)
    about = (
        f"A language model of {bases[0]['parameters']:,} parameters on the {bases[0]['corpus']['description']},"
        f" {len(bases)} seeds; held-out perplexity {per_seed}"
    )
    for task in rows[0]["by_task"]:
        result = table("variant", "exact match, %", "over seeds", "right tokens, %", "over seeds", "perplexity")
        for row in rows:
            measures = row["by_task"][task]
            exact, right = measures["exact_match"], measures["token_accuracy"]
            result.add_row(
                NAMES.get(row["variant"], row["variant"]),
                f"{100 * exact['mean']:.1f}", percent_range(exact["interval"]),
                f"{100 * right['mean']:.1f}", percent_range(right["interval"]), f"{measures['perplexity']['mean']:.3f}",
            )  # fmt: skip
        yield f"{about}\nTask {task}", result


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = {"full": "#1f5fa8", "sun": "#2a8c5a", "qsun_awq4": "#d1762b", "qsun_awq3": "#8c2a6b", "base": "#777777"}

RETUNED = "#d1762b"
"""Bars of QSUN."""


def figures(document: Document) -> dict[str, str]:
    """Every figure by name, each a complete SVG text; loss curves where the document has the trainings' rows."""
    panels = 1 + len(_text_names(document))
    size = (4.6 * panels + 1.5, 0.22 * len(document["variants"]) + 1)
    quality = {"quality": render(_draw_quality, document, panels, size)}
    if "tasks" not in document:
        return quality
    return quality | {
        "losses": render(_draw_losses, document, len(_task_names(document)), (13.0, 3.4)),
        "base_loss": render(_draw_base, document, 1),
    }


def _draw_quality(panels: list[Any], document: Document) -> None:
    """Each variant's mean with its interval over seeds: on sequence operations, and on each task of text."""
    rows = document["variants"]
    _draw_bars(panels[0], [(row["variant"], row["exact_match"], row["interval"]) for row in rows])
    for place, row in enumerate(rows):
        tasks = [100 * task["exact_match"] for task in row["by_task"].values()]
        panels[0].plot(tasks, [place] * len(tasks), "o", color="black", ms=3, mfc="white")
    panels[0].set_xlabel("exact match on four operations, %")
    for axes, task in zip(panels[1:], _text_names(document), strict=True):
        measure = document["text_metrics"][task]
        variants = [(row["variant"], row["by_task"][task][measure]) for row in document["text_variants"]]
        _draw_bars(axes, [(name, summary["mean"], summary["interval"]) for name, summary in variants])
        axes.set_xlabel(f"{task}: {measure.replace('_', ' ')}, %")


def _draw_bars(axes: Any, bars: list[tuple[str, float, list[float] | None]]) -> None:
    """A bar for each variant: its name, share and interval."""
    for place, (name, share, span) in enumerate(bars):
        colour = RETUNED if name.startswith("qsun") else COLOURS.get(name, "#b9c9dc")
        axes.barh(place, 100 * share, color=colour, height=0.65)
        if span:
            low, high = (100 * min(max(end, 0.0), 1.0) for end in span)
            axes.plot([low, high], [place, place], color="black", lw=1.2)
    axes.set_yticks(range(len(bars)), [NAMES.get(name, name) for name, _, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 101)


def _draw_losses(panels: list[Any], document: Document) -> None:
    """Loss curves of the trainings, a panel for each task, a line for each seed."""
    for axes, name in zip(panels, _task_names(document), strict=True):
        for row in (row for row in document["tasks"] if row["task"] == name):
            for variant in ("full", "sun", "qsun_awq4", "qsun_awq3"):
                losses = row["variants"][variant]["losses"]
                label = NAMES[variant] if row["seed"] == document["tasks"][0]["seed"] else None
                axes.plot(step_shares(losses), losses, color=COLOURS[variant], lw=0.9, label=label)
        axes.set_yscale("log")
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xlabel("share of the steps")
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend(fontsize=7, frameon=False)


def _draw_base(panels: list[Any], document: Document) -> None:
    axes = panels[0]
    for base in document["bases"]:
        axes.plot(step_shares(base["losses"]), base["losses"], color=COLOURS["base"], lw=1)
    axes.set(yscale="log", xlabel="share of the steps", ylabel="loss, nats a token")
    axes.set_title("base models, one a seed", loc="left", fontsize=10)


def _text_names(document: Document) -> list[str]:
    return list(document["text_variants"][0]["by_task"]) if document["text_variants"] else []


def _task_names(document: Document) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in document["tasks"]))
