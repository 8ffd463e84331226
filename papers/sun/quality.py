"""SUN's claims about accuracy, beside small models that are trained here (`live/adaptation`).

The printed models have 1.7 to 14 billion parameters and are fine-tuned on text; ours have some hundred thousand and
are fine-tuned on sequence operations. Effects and orderings are compared, not digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean
from typing import Any

from papers.common import CONFIDENCE, claims_table, disagreements, interval, percent_range, step_shares
from papers.sun.concurrency import AccuracyRow, accuracy_rows
from reports.blocks import Document, Report, Section, Table, bullets, sections, table
from reports.svg import render

SCHEMA = "twin.reproduction-sun-quality/1"

GOAL = {"sun": 0.01, "text": 0.02, "naive": 0.20, "qsun": 0.02}
"""Goals, in shares of the prompts, set before anything was computed: how far SUN may be below full fine-tuning, and how
far on text; how far naive sharing must be below it, and how far QSUN at 4 bits may be below it."""

METRICS = {"brackets": "exact_match", "docstring": "token_accuracy"}
"""The measure of a task of text: no docstring is the only right one."""

QUANTISERS = ("awq", "gptq", "rtn")

MEASURES = ("exact_match", "token_accuracy", "perplexity")


def summarise(size: Document, bases: Sequence[Document], tasks: Sequence[Document]) -> Document:
    """The document `twin.reproduction-sun-quality/1`, of rows of models by seed, and of tasks by seed and task."""
    published = accuracy_rows()
    operations, text = _of_kind(tasks, "task"), _of_kind(tasks, "text_task")
    return {
        "schema": SCHEMA,
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
        "notes": notes(),
    }


def claims(tasks: Sequence[Document], published: Sequence[AccuracyRow], goal: float) -> list[Document]:
    result = [
        _claim("Figure 2", "naive sharing below full fine-tuning", tasks, published, "naive", "full",
               maximum=-GOAL["naive"]),
        _claim("Table 1", "SUN against full fine-tuning", tasks, published, "sun", "full", minimum=-goal),
    ]  # fmt: skip
    for quantiser in QUANTISERS:
        for bits in (4, 3):
            kind = f"{quantiser}{bits}"
            if f"qsun_{kind}" in tasks[0]["variants"]:
                result += _quantised_claims(tasks, published, kind, f"{quantiser.upper()} at {bits} bits")
    return result


def text_claims(tasks: Sequence[Document], published: Sequence[AccuracyRow]) -> list[Document]:
    result = []
    for task in dict.fromkeys(row["task"] for row in tasks):
        rows = [_judged(row) for row in tasks if row["task"] == task]
        on = f" ({task}, {METRICS[task].replace('_', ' ')})"
        result += [claim | {"what": claim["what"] + on} for claim in claims(rows, published, GOAL["text"])]
    return result


def notes() -> list[str]:
    return [
        "Printed differences are over the models and benchmarks of the table; ours are over tasks, with a"
        f" {100 * CONFIDENCE:.0f} % interval over seeds (Student's t); each seed has a base model of its own.",
        "Decoders are quantised in groups of up to 128 inputs. 16 bits are 32 here.",
        "The paper prints nothing at 3 bits, nothing with GPTQ or rounding to nearest, and nothing about tuning a part"
        " of the prefill module.",
        "QSUN begins with SUN's module and has fewer steps; the paper does not say how many.",
        "Parts of the prefill module are tuned with the first seed only.",
        "The running sum, which no operation of the base model helps with, has a longer training in every variant.",
        "The base model of text is no chat model: it continues sources of Python's standard library. brackets is"
        " judged by exact match, docstring by the share of right tokens, given those before them.",
    ]


def _of_kind(rows: Sequence[Document], kind: str) -> list[Document]:
    return [row for row in rows if row["kind"] == kind]


def _judged(row: Document) -> Document:
    """A row of a task of text, with the measure that it is judged by in the place of exact match."""
    metric = METRICS[row["task"]]
    variants = {name: {"exact_match": result[metric]} for name, result in row["variants"].items()}
    return {"seed": row["seed"], "task": row["task"], "variants": variants}


def _quantised_claims(
    tasks: Sequence[Document], published: Sequence[AccuracyRow], kind: str, name: str
) -> list[Document]:
    """Claims about a decode module that is quantised in one way; against 16 bits, at 4 bits only."""
    full, sun, again = f"full_{kind}", f"sun_{kind}", f"qsun_{kind}"
    result = []
    if kind.endswith("4"):
        statement = f"QSUN, {name}, against full fine-tuning in 16 bits"
        result.append(_claim("Table 2", statement, tasks, published, again, "full", minimum=-GOAL["qsun"]))
    return [
        *result,
        _claim("Table 2", f"QSUN, {name}, against full fine-tuning, then quantised", tasks, published, again, full,
               minimum=0.0),
        _claim("Table 3", f"SUN's decoder quantised, {name}, without re-tuning, against SUN", tasks, published, sun,
               "sun", maximum=0.0, strict=True),
        _claim("Table 3", f"re-tuning recovers that, {name}", tasks, published, again, sun, minimum=0.0, strict=True),
    ]  # fmt: skip


def _grouped(tasks: Sequence[Document], variant: str, key: str) -> dict[Any, list[float]]:
    """A variant's exact matches by `seed` or `task`; it may be missing in some rows."""
    groups: dict[Any, list[float]] = {}
    for row in tasks:
        if variant in row["variants"]:
            groups.setdefault(row[key], []).append(row["variants"][variant]["exact_match"])
    return groups


def _by_seed(tasks: Sequence[Document], variant: str) -> dict[int, float]:
    return {seed: mean(values) for seed, values in _grouped(tasks, variant, "seed").items()}


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
        "printed": [min(accuracies), max(accuracies)] if accuracies else None,
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


def _claim(
    where: str,
    statement: str,
    tasks: Sequence[Document],
    published: Sequence[AccuracyRow],
    variant: str,
    against: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    strict: bool = False,
) -> Document:
    """A difference of two variants, printed and ours, which holds within `minimum` and `maximum` over tasks.

    With `strict` the interval over seeds must lie on one side of the limit, too.
    """

    def within(low: float, high: float) -> bool:
        return (minimum is None or _above(low, minimum, strict)) and (
            maximum is None or _above(-high, -maximum, strict)
        )

    accuracies, reference = _by_seed(tasks, variant), _by_seed(tasks, against)
    differences = [accuracies[seed] - reference[seed] for seed in accuracies]
    average, span = mean(differences), interval(differences)
    by_task = _by_task(tasks, variant, against)
    limit = f"at least {100 * minimum:+g}" if minimum is not None else f"at most {100 * (maximum or 0):+g}"
    agreements = sum(within(value, value) for value in by_task.values())
    seeds = f"; {100 * span[0]:+.1f} to {100 * span[1]:+.1f} over seeds" if span else ""
    published_differences = _printed_differences(published, variant, against)
    return {
        "where": where,
        "what": statement,
        "published": f"{min(published_differences):+.1f} to {max(published_differences):+.1f} points"
        if published_differences
        else "nothing",
        "found": f"{100 * average:+.1f} points",
        "difference": average,
        "interval": span,
        "by_task": by_task,
        "tasks": f"{agreements} of {len(by_task)}",
        "agrees": within(*(span if span and strict else (average, average))),
        "note": f"goal {limit} points, reached on {agreements} of {len(by_task)} tasks{seeds}",
    }


def _by_task(tasks: Sequence[Document], variant: str, against: str) -> dict[str, float]:
    differences: dict[str, list[float]] = {}
    for row in tasks:
        shares = row["variants"]
        difference = shares[variant]["exact_match"] - shares[against]["exact_match"]
        differences.setdefault(row["task"], []).append(difference)
    return {task: mean(values) for task, values in differences.items()}


def _above(value: float, limit: float, strict: bool) -> bool:
    return value > limit if strict else value >= limit


def _printed_differences(published: Sequence[AccuracyRow], variant: str, against: str) -> list[float]:
    """Printed differences in points, over models and benchmarks that have both."""
    values = {(row.model, row.benchmark, row.variant): row.accuracy for row in published}
    pairs = {(row.model, row.benchmark) for row in published}
    return [
        values[*pair, variant] - values[*pair, against]
        for pair in sorted(pairs)
        if (*pair, variant) in values and (*pair, against) in values
    ]


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
