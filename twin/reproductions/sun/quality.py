"""SUN's claims about accuracy, beside small models that are trained here (`live/adaptation`).

The printed models have 1.7 to 14 billion parameters and are fine-tuned on text; ours have some hundred thousand and
are fine-tuned on sequence operations. Effects and orderings are compared, not digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from twin.reproductions.intervals import CONFIDENCE, interval
from twin.reproductions.sun.published import AccuracyRow, accuracy_rows

SCHEMA = "twin.reproduction-sun-quality/1"

Document = dict[str, Any]

GOAL = {"sun": 0.01, "naive": 0.20, "qsun": 0.02}
"""Goals, in shares of the prompts, set before anything was computed: how far SUN may be below full fine-tuning, how far
naive sharing must be below it, and how far QSUN at 4 bits may be below it."""

PRINTED = {"full_rtn4": "full_awq4", "sun_rtn4": "sun_awq4"}
"""Variants whose printed counterpart is quantised with AWQ."""


def summarise(size: Document, bases: Sequence[Document], tasks: Sequence[Document]) -> Document:
    """The document `twin.reproduction-sun-quality/1`.

    Args:
        size: the sizes of model and trainings. bases: rows of base models, one for each seed. tasks: rows of tasks, one
            for each seed and task; each with the same variants.
    """
    published = accuracy_rows()
    document: Document = {
        "schema": SCHEMA,
        "paper": "sun",
        "simulated": False,
        "size": size,
        "bases": list(bases),
        "tasks": list(tasks),
        "variants": [_variant(name, tasks, published) for name in tasks[0]["variants"]],
    }
    document["claims"], document["notes"] = claims(tasks, published), notes()
    return document


def claims(tasks: Sequence[Document], published: Sequence[AccuracyRow]) -> list[Document]:
    """The paper's claims about accuracy: printed, found, and whether they hold here."""
    made = [
        _claim("Figure 2", "naive sharing below full fine-tuning", tasks, published, "naive", "full",
               most=-GOAL["naive"]),
        _claim("Table 1", "SUN against full fine-tuning", tasks, published, "sun", "full", least=-GOAL["sun"]),
    ]  # fmt: skip
    for bits in (4, 3):
        quantised, cut, again = f"full_rtn{bits}", f"sun_rtn{bits}", f"qsun{bits}"
        if bits == 4:
            made.append(
                _claim("Table 2", "QSUN at 4 bits against full fine-tuning", tasks, published, again, "full",
                       least=-GOAL["qsun"])
            )  # fmt: skip
        made += [
            _claim("Table 2", f"QSUN at {bits} bits against full fine-tuning, then quantised", tasks, published, again,
                   quantised, least=0.0),
            _claim("Table 3", f"SUN's decoder quantised to {bits} bits without re-tuning, against SUN", tasks,
                   published, cut, "sun", most=0.0, strict=True),
            _claim("Table 3", f"re-tuning for {bits} bits recovers that", tasks, published, again, cut, least=0.0,
                   strict=True),
        ]  # fmt: skip
    return made


def notes() -> list[str]:
    """Notes on the method, for the reader of the numbers."""
    return [
        "Printed differences are over the models and benchmarks of the table; ours are over tasks, with a"
        f" {100 * CONFIDENCE:.0f} % interval over seeds (Student's t); each seed has a base model of its own.",
        "Decoders are rounded to nearest in groups of up to 128 inputs, where the paper uses AWQ. 16 bits are 32 here.",
        "The paper prints nothing at 3 bits, and nothing about tuning a part of the prefill module.",
    ]


def _by_seed(tasks: Sequence[Document], variant: str) -> dict[int, float]:
    """The mean exact match over tasks, by seed."""
    seeds: dict[int, list[float]] = {}
    for row in tasks:
        seeds.setdefault(row["seed"], []).append(row["variants"][variant]["exact_match"])
    return {seed: mean(values) for seed, values in seeds.items()}


def _variant(name: str, tasks: Sequence[Document], published: Sequence[AccuracyRow]) -> Document:
    """A variant's exact match by task and over all, with intervals over seeds, and the printed range."""
    by_task: dict[str, list[float]] = {}
    for row in tasks:
        by_task.setdefault(row["task"], []).append(row["variants"][name]["exact_match"])
    seeds = list(_by_seed(tasks, name).values())
    printed = [row.accuracy / 100 for row in published if row.variant == PRINTED.get(name, name)]
    return {
        "variant": name,
        "exact_match": mean(seeds),
        "interval": interval(seeds),
        "by_task": {
            task: {"exact_match": mean(values), "interval": interval(values)} for task, values in by_task.items()
        },
        "trained_parameters": tasks[0]["variants"][name].get("trained_parameters"),
        "printed": [min(printed), max(printed)] if printed else None,
    }


def _claim(
    where: str,
    what: str,
    tasks: Sequence[Document],
    published: Sequence[AccuracyRow],
    variant: str,
    against: str,
    *,
    least: float | None = None,
    most: float | None = None,
    strict: bool = False,
) -> Document:
    """A difference of two variants: printed over benchmarks, ours over tasks; it holds within `least` and `most`.

    With `strict` the interval over seeds must lie on one side of the bound, too. The note says on how many tasks the
    mean over seeds is within the bound.
    """

    def within(low: float, high: float) -> bool:
        return (least is None or _above(low, least, strict)) and (most is None or _above(-high, -most, strict))

    ours, other = _by_seed(tasks, variant), _by_seed(tasks, against)
    differences = [ours[seed] - other[seed] for seed in ours]
    found, span = mean(differences), interval(differences)
    by_task = _by_task(tasks, variant, against)
    bound = f"at least {100 * least:+g}" if least is not None else f"at most {100 * (most or 0):+g}"
    reached = sum(within(value, value) for value in by_task.values())
    seeds = f"; {100 * span[0]:+.1f} to {100 * span[1]:+.1f} over seeds" if span else ""
    printed = _printed_differences(published, PRINTED.get(variant, variant), PRINTED.get(against, against))
    return {
        "where": where,
        "what": what,
        "published": f"{min(printed):+.1f} to {max(printed):+.1f} points" if printed else "nothing",
        "found": f"{100 * found:+.1f} points",
        "difference": found,
        "interval": span,
        "by_task": by_task,
        "tasks": f"{reached} of {len(by_task)}",
        "agrees": within(*(span if span and strict else (found, found))),
        "note": f"goal {bound} points, reached on {reached} of {len(by_task)} tasks{seeds}",
    }


def _by_task(tasks: Sequence[Document], variant: str, against: str) -> dict[str, float]:
    """The mean difference of two variants over seeds, by task."""
    differences: dict[str, list[float]] = {}
    for row in tasks:
        shares = row["variants"]
        found = shares[variant]["exact_match"] - shares[against]["exact_match"]
        differences.setdefault(row["task"], []).append(found)
    return {task: mean(values) for task, values in differences.items()}


def _above(value: float, bound: float, strict: bool) -> bool:
    return value > bound if strict else value >= bound


def _printed_differences(published: Sequence[AccuracyRow], variant: str, against: str) -> list[float]:
    """Printed differences in points, over models and benchmarks that have both."""
    values = {(row.model, row.benchmark, row.variant): row.accuracy for row in published}
    pairs = {(row.model, row.benchmark) for row in published}
    return [
        values[*pair, variant] - values[*pair, against]
        for pair in sorted(pairs)
        if (*pair, variant) in values and (*pair, against) in values
    ]
