"""SUN's claims about accuracy, beside small models that are trained here (`live/adaptation`).

The printed models have 1.7 to 14 billion parameters and are fine-tuned on text; ours have some hundred thousand and
are fine-tuned on sequence operations. Effects and orderings are compared, not digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from papers.layout import CONFIDENCE, interval
from papers.sun.published import AccuracyRow, accuracy_rows

SCHEMA = "twin.reproduction-sun-quality/1"

Document = dict[str, Any]

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
