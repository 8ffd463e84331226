"""SUN's claims about accuracy, beside small models that are trained here (`live/adaptation`).

The printed models have 1.7 to 14 billion parameters and are fine-tuned on text; ours have some hundred thousand and
are fine-tuned on sequence operations. Effects and orderings are compared, not digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from papers.common import Claim, Wording, claims_table, conclusion, ends, fill, interval, reaches, step_shares, title
from papers.sun.concurrency import AccuracyRow, accuracy_rows
from reports.blocks import Document, Report, Section, rows_table, sections
from reports.svg import render

WORDING = Wording("sun", "quality")

GOAL = {"sun": 0.01, "text": 0.02}
"""Goals, in shares of the prompts: how far SUN may be below full fine-tuning, and how far on text."""

METRICS = {"brackets": "exact_match", "docstring": "token_accuracy"}
"""The measure of a task of text: no docstring is the only right one."""

MEASURES = ("exact_match", "token_accuracy", "perplexity")


def summarise(size: Document, bases: Sequence[Document], tasks: Sequence[Document]) -> Document:
    """The document `twin.reproduction-sun-quality/1`, of rows of models by seed, and of tasks by seed and task."""
    published = accuracy_rows()
    operations, text = _of_kind(tasks, "task"), _of_kind(tasks, "text_task")
    return {
        "schema": "twin.reproduction-sun-quality/1",
        "paper": "sun",
        "simulated": False,
        "size": size,
        "bases": _of_kind(bases, "base"),
        "text_bases": _of_kind(bases, "text_base"),
        "tasks": operations,
        "text_tasks": text,
        "variants": [_variant(name, operations, published) for name in operations[0]["variants"]],
        "text_metrics": METRICS,
        "text_variants": [_text_variant(name, text) for name in (text[0]["variants"] if text else ())],
        "claims": claims(operations, published, GOAL["sun"]) + text_claims(text, published),
        "notes": WORDING.notes(),
    }


def claims(tasks: Sequence[Document], published: Sequence[AccuracyRow], goal: float) -> list[Claim]:
    """All claims; `goal`: how far SUN may be below full fine-tuning."""
    result = [_claim(claim, tasks, published, goal=goal) for claim in WORDING.texts["claims"]]
    for quantiser in ("awq", "gptq", "rtn"):
        for bits in (4, 3):
            kind = f"{quantiser}{bits}"
            if f"qsun_{kind}" in tasks[0]["variants"]:
                name = f"{quantiser.upper()} at {bits} bits"
                quantised = [row for row in WORDING.texts["quantised"] if row.get("bits", bits) == bits]
                result += [_claim(row, tasks, published, kind=kind, name=name) for row in quantised]
    return result


def text_claims(tasks: Sequence[Document], published: Sequence[AccuracyRow]) -> list[Claim]:
    """The same claims on each task of text, by the measure that it is judged by in the place of exact match."""
    result = []
    for task in dict.fromkeys(row["task"] for row in tasks):
        metric = METRICS[task]
        rows = [
            row | {"variants": {name: {"exact_match": shares[metric]} for name, shares in row["variants"].items()}}
            for row in tasks
            if row["task"] == task
        ]
        on = f" ({task}, {metric.replace('_', ' ')})"
        result += [claim | {"what": claim["what"] + on} for claim in claims(rows, published, GOAL["text"])]
    return result


def _claim(
    claim: Document, tasks: Sequence[Document], published: Sequence[AccuracyRow], goal: float = 0.0, **names: str
) -> Claim:
    """A difference of two variants, printed and ours, with the number of tasks on which it reaches the goal."""
    what, variant, against = (fill(claim[part], names) for part in ("what", "variant", "against"))
    at_most, strict = "at_most" in claim, claim.get("strict", False)
    limit = claim["at_most"] if at_most else claim["at_least"]
    limit = -goal if limit == "goal" else limit
    accuracies, reference = _by_seed(tasks, variant), _by_seed(tasks, against)
    differences = [accuracies[seed] - reference[seed] for seed in accuracies]
    by_task = _by_task(tasks, variant, against)
    agreements = sum(reaches([value], limit, at_most=at_most, strict=strict) for value in by_task.values())
    span = interval(differences)
    seeds = f"; {100 * span[0]:+.1f} to {100 * span[1]:+.1f} over seeds" if span else ""
    goal_text = f"goal {'at most' if at_most else 'at least'} {100 * limit:+g} points"
    printed = _printed_differences(published, variant, against)
    return {
        "where": claim["where"],
        "what": what,
        "published": "{:+.1f} to {:+.1f} points".format(*ends(printed)) if printed else "nothing",
        "found": f"{100 * mean(differences):+.1f} points",
        "difference": mean(differences),
        "interval": span,
        "by_task": by_task,
        "tasks": f"{agreements} of {len(by_task)}",
        "agrees": reaches(differences, limit, at_most=at_most, strict=strict),
        "note": f"{goal_text}, reached on {agreements} of {len(by_task)} tasks{seeds}",
    }


def _of_kind(rows: Sequence[Document], kind: str) -> list[Document]:
    return [row for row in rows if row["kind"] == kind]


def _grouped(tasks: Sequence[Document], variant: str, key: str) -> dict[Any, list[float]]:
    """A variant's exact matches by `seed` or `task`; it may be missing in some rows."""
    groups: dict[Any, list[float]] = {}
    for row in tasks:
        if variant in row["variants"]:
            groups.setdefault(row[key], []).append(row["variants"][variant]["exact_match"])
    return groups


def _by_seed(tasks: Sequence[Document], variant: str) -> dict[int, float]:
    return {seed: mean(values) for seed, values in _grouped(tasks, variant, "seed").items()}


def _by_task(tasks: Sequence[Document], variant: str, against: str) -> dict[str, float]:
    shares, references = (_grouped(tasks, name, "task") for name in (variant, against))
    return {task: mean(a - b for a, b in zip(values, references[task], strict=True)) for task, values in shares.items()}


def _variant(name: str, tasks: Sequence[Document], published: Sequence[AccuracyRow]) -> Document:
    """A variant's exact match by task and over all, with intervals over seeds, and the printed range."""
    by_task = _grouped(tasks, name, "task")
    seeds = list(_by_seed(tasks, name).values())
    accuracies = [row.accuracy / 100 for row in published if row.variant == name]
    return {
        "variant": name,
        "exact_match": mean(seeds),
        "interval": interval(seeds),
        "seeds": len(seeds),
        "by_task": {
            task: {"exact_match": mean(values), "interval": interval(values)} for task, values in by_task.items()
        },
        "trained_parameters": tasks[0]["variants"][name].get("trained_parameters"),
        "printed": list(ends(accuracies)) if accuracies else None,
    }


def _text_variant(name: str, tasks: Sequence[Document]) -> Document:
    by_task: Document = {}
    for task in dict.fromkeys(row["task"] for row in tasks):
        results = [row["variants"][name] for row in tasks if row["task"] == task]
        values = {measure: [row[measure] for row in results] for measure in MEASURES}
        by_task[task] = {
            measure: {"mean": mean(samples), "interval": interval(samples)} for measure, samples in values.items()
        }
    return {"variant": name, "by_task": by_task}


def _printed_differences(published: Sequence[AccuracyRow], variant: str, against: str) -> list[float]:
    """Printed differences in points, over models and benchmarks that have both."""
    values, references = (
        {(row.model, row.benchmark): row.accuracy for row in published if row.variant == name}
        for name in (variant, against)
    )
    return [values[pair] - references[pair] for pair in values.keys() & references.keys()]


# -- the report --------------------------------------------------------------------------------------------------------


NAMES: dict[str, str] = WORDING.texts["names"] | {
    f"{variant}_{quantiser}{bits}": f"{name}{quantiser.upper()}, {bits} bits"
    for quantiser in ("rtn", "gptq", "awq")
    for bits in (4, 3)
    for variant, name in WORDING.texts["quantised_names"].items()
}
"""Variants as tables and figures name them."""


def tables(document: Document) -> Report:
    """Exact match of every variant, the claims with what is found, what disagrees, and notes."""
    columns = {
        "over seeds": lambda claim: fill("{interval:100 to.1f}", claim),
        "tasks": lambda claim: str(claim["tasks"]),
    }
    claims = ("Claims", claims_table(document["claims"], columns))
    return sections([_variants(document), *_text(document), claims, *conclusion(document)])


def _named(rows: Sequence[Document]) -> list[Document]:
    return [row | {"name": NAMES.get(row["variant"], row["variant"])} for row in rows]


def _variants(document: Document) -> Section:
    rows, bases, texts = document["variants"], document["bases"], WORDING.texts["tables"]["variants"]
    tasks = list(rows[0]["by_task"])
    shares = [f"{{by_task[{task}][exact_match]:100 .1f}}" for task in tasks]
    means = (sum(base["exact_match"].values()) / len(base["exact_match"]) for base in bases)
    values = document["size"]["operations"] | {"parameters": bases[0]["parameters"], "seeds": len(bases)}
    per_seed = ", ".join(f"{100 * share:.1f}" for share in means)
    return WORDING.title("variants", per_seed=per_seed, **values), rows_table(
        " | ".join(["variant", *tasks, texts["titles"]]), " | ".join(["{name}", *shares, texts["cells"]]), _named(rows)
    )


def _text(document: Document) -> Iterator[Section]:
    """The tasks of text, if there are any: exact match, right tokens, and perplexity, with intervals over seeds."""
    bases = document["text_bases"]
    for task in _text_names(document):
        rows = [row | row["by_task"][task] for row in _named(document["text_variants"])]
        per_seed = ", ".join(f"{base['perplexity']:.2f}" for base in bases)
        yield WORDING.section("text", rows, task=task, seeds=len(bases), per_seed=per_seed, **bases[0])


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
        title(axes, name, yscale="log", xlabel="share of the steps")
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend(fontsize=7, frameon=False)


def _draw_base(panels: list[Any], document: Document) -> None:
    for base in document["bases"]:
        panels[0].plot(step_shares(base["losses"]), base["losses"], color=COLOURS["base"], lw=1)
    title(panels[0], "base models, one a seed", yscale="log", xlabel="share of the steps")
    panels[0].set_ylabel("loss, nats a token")


def _text_names(document: Document) -> list[str]:
    return list(document["text_variants"][0]["by_task"]) if document["text_variants"] else []


def _task_names(document: Document) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in document["tasks"]))
