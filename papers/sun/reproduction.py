"""SUN: Table 4 from its rows of low concurrency, decode pools, and skew over models, printed beside predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from papers.common import Claim, Task, Wording, conclusion, ends, fill, run_tasks
from papers.sun.concurrency import METRICS, concurrency_rows, errors, fits, forms, predict_engine
from papers.sun.pools import (
    LARGEST_BATCH,
    PROMPT,
    choose,
    fitted_service,
    possible_answers,
    predict_pools,
    simulate,
    skew_points,
    summarise_skew,
)
from reports.blocks import Document, Report, Table, sections, table
from reports.svg import render

WORDING = Wording("sun")
REPLICATIONS = 8
"""Replications of every run of a minute: the mean of a rate is then known to about 1 %."""

GOAL = {"relative": 0.03, "throughput": 0.02, "points": 0.03, "stable": 0.02}
"""Goals that were set before anything was computed: Table 4 on average, pools' throughput and points of interactivity.
`stable` is the largest change that counts as none, equal to the goal of pools' throughput."""


def reproduce(jobs: int, progress: Callable[[str], None], replications: int = REPLICATIONS) -> Document:
    """The document `twin.reproduction-sun/1`: about a minute on two cores; fewer replications for a trial."""

    def run(function: Callable[..., Any], arguments: dict[str, tuple[Any, ...]]) -> list[Any]:
        return run_tasks([Task(name, function, values) for name, values in arguments.items()], jobs, progress)

    rows, service = concurrency_rows(), fitted_service()
    engines = dict.fromkeys((row.model, row.method) for row in rows)
    predictions = run(predict_engine, {f"Table 4, {model} {method}": (model, method) for model, method in engines})
    results = [result for engine in predictions for result in engine]
    lengths = {f"figure 3, answers of {n} tokens": (service, n, replications) for n in possible_answers(service)}
    pools = run(predict_pools, lengths)
    pool = choose(pools)
    rate, points = pool["rate"], skew_points()
    skewed = {f"figure 4, {place}, zipf {zipf:g}": (service, rate, place, zipf, replications) for place, zipf in points}
    document: Document = {
        "schema": "twin.reproduction-sun/1",
        "paper": "sun",
        "simulated": True,
        "concurrency": {
            "rows": results,
            "errors": {metric: errors(results, metric) for metric in METRICS},
            "fits": fits(rows),
            "forms": forms(rows),
        },
        "pool": {"chosen": pool, "lengths": pools},
        "skew": summarise_skew(dict(zip(points, run(simulate, skewed), strict=True)), rate),
    }
    return document | {"claims": claims(document), "notes": notes(document)}


def notes(document: Document) -> list[str]:
    contended = [row for row in document["concurrency"]["rows"] if row["concurrency"] > 1]
    return WORDING.notes(
        errors=ends(row["errors"]["ttft"] for row in contended),
        shares=ends(row["published"]["ttft"] * row["published"]["throughput"] / row["concurrency"] / row["answer"]
                    for row in contended),
        rate=document["skew"]["rate"], answer=document["skew"]["answer"], prompt=PROMPT, batch=LARGEST_BATCH,
    )  # fmt: skip


def claims(document: Document) -> list[Claim]:
    return [
        *(_concurrency_claim(metric, document["concurrency"]["errors"]) for metric in ("tpot", "throughput")),
        *(claim for row in document["pool"]["chosen"]["rows"][1:] for claim in _pool_claims(row)),
        *_skew_claims(document["skew"]),
    ]


def _concurrency_claim(metric: str, errors: Document) -> Claim:
    goal = GOAL["relative"]
    return WORDING.claim("concurrency", errors[metric]["mean"] <= goal, metric=metric, goal=goal, **errors[metric])


def _pool_claims(row: Document) -> Iterator[Claim]:
    """Claims on a shared pool; that of one worker chose the length of answers.

    A pool that keeps up has the offered load as its throughput: that is an input.
    """
    values = {"workers": row["workers"], "printed": row["published"], "predicted": row["predicted"]}
    reason = "this row chose the length of answers" if row["fixes_the_load"] else ""
    input_reason = f"{reason}; " if reason else ""
    keeps = abs(row["throughput_error"]) <= GOAL["throughput"]
    yield WORDING.claim("throughput", keeps, reason=input_reason, **values)
    yield WORDING.claim("interactivity", abs(row["interactivity_points"]) <= GOAL["points"], reason=reason, **values)


def _skew_claims(skewed: Document) -> Iterator[Claim]:
    for metric, falls in skewed["falls"].items():
        change = skewed["shared_change"][metric]
        yield WORDING.claim("falls", falls, metric=metric, found="falls" if falls else "does not")
        yield WORDING.claim("stable", abs(change["predicted"]) <= GOAL["stable"], metric=metric, **change)
    for size in skewed["sizes"]:
        low, high = size["one_run"]
        yield WORDING.claim("size", low <= size["published"] <= high, printed=size["published"], **size)


# -- the report --------------------------------------------------------------------------------------------------------


def tables(document: Document) -> Report:
    """Table 4's high concurrency, pools of decode workers, skew over models, then the disagreements in words."""
    concurrency, skew, names = document["concurrency"], document["skew"], WORDING.texts["forms"]
    lines = [
        fit | {f"{name}{bits}": fit[column][bits] for bits in ("16", "4") for name, column in
               (("weights", "weights"), ("ridge", "ridge_rows"))}
        for fit in concurrency["fits"]
    ]  # fmt: skip
    choices = [
        {**form, "name": names[form["form"]], "columns": "TPOT alone" if form["plain"] else "both columns"}
        for form in concurrency["forms"]
    ]
    return sections(
        [
            (WORDING.title("concurrency"), _concurrency(concurrency)),
            WORDING.section("fits", lines),
            WORDING.section("forms", choices),
            (WORDING.title("pool"), _pool(document["pool"])),
            WORDING.section("skew", skew["points"], **skew),
            WORDING.section("sizes", skew["sizes"]),
            *conclusion(document),
        ]
    )


def _concurrency(concurrency: Document) -> Table:
    held_out = [row for row in concurrency["rows"] if not row["fitted"]]
    result = WORDING.table("concurrency", [{**row, "ends": ends(row["tpot_any_split"])} for row in held_out])
    tpot, throughput = (concurrency["errors"][metric] for metric in ("tpot", "throughput"))
    methods = [(*name.rpartition(" ")[::2], tpot["by_method"][name], throughput["by_method"][name])
               for name in tpot["by_method"]]  # fmt: skip
    for model, method, *shares in [("mean |error|", "", tpot["mean"], throughput["mean"]), *methods]:
        first, second = (f"{100 * share:.2f} %" for share in shares)
        result.add_row(model, method, "", "", "", first, "", "", "", second)
    return result


def _pool(pool: Document) -> Table:
    """The printed pools, the chosen length, and the other possible lengths with the errors that they would give."""
    lengths = [pool["chosen"], *(length for length in pool["lengths"] if length["answer"] != pool["chosen"]["answer"])]
    cell = WORDING.texts["tables"]["pool"]["cell"]
    result = table("decode workers", "printed", *(f"{length['answer']} out" for length in lengths))
    for index, row in enumerate(pool["chosen"]["rows"]):
        values = [row["published"], *(length["rows"][index]["predicted"] for length in lengths)]
        name = fill("{workers} {placement}{fixes_the_load:*}", row)
        result.add_row(name, *(fill(cell, value) for value in values))
    result.add_row("requests/s", "", *(f"{length['rate']:.2f}" for length in lengths))
    return result


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = {"Full-FT": "#1f5fa8", "AWQ": "#d1762b", "QSUN": "#2a8c5a"}
ISOLATED_COLOUR, SHARED_COLOUR = "#d1762b", "#1f5fa8"


def figures(document: Document) -> dict[str, str]:
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
                subset = [row for row in rows if row["method"] == method and row["fitted"] == fitted]
                axes.plot(
                    [scale * row["predicted"][metric] for row in subset],
                    [scale * row["published"][metric] for row in subset],
                    "o", color=colour, mfc=face, ms=4.5, lw=0,
                    label=f"{method}, {'fitted' if fitted else 'concurrency 16'}",
                )  # fmt: skip
        ends = [scale * reach(row["published"][metric] for row in rows) for reach in (min, max)]
        axes.plot(ends, ends, color="black", lw=0.8)
        if metric == "throughput":
            axes.set(xscale="log", yscale="log")
        axes.set(xlabel=f"predicted {'TPOT' if metric == 'tpot' else metric}, {unit}", ylabel=f"printed, {unit}")
    panels[0].set_title("SUN, Table 4: both models, prompts of 1024 to 4096", loc="left", fontsize=10)
    panels[0].legend(fontsize=7, frameon=False)


def _draw_pool(panels: list[Any], document: Document) -> None:
    axes, pool = panels[0], document["pool"]["chosen"]
    for kind, marker, colour in (("published", "o", "black"), ("predicted", "s-", SHARED_COLOUR)):
        axes.plot(
            [row[kind]["throughput"] for row in pool["rows"]],
            [100 * (1 + row[kind]["interactivity_change"]) for row in pool["rows"]],
            marker, color=colour, ms=5, lw=1, label="printed" if kind == "published" else "predicted",
        )  # fmt: skip
    for row in pool["rows"]:
        at = (row["published"]["throughput"], 100 * (1 + row["published"]["interactivity_change"]))
        axes.annotate(f"{row['workers']} {row['placement']}", at, (6, 5), textcoords="offset points", fontsize=8)
    axes.set(ylim=(0, 110), xlabel="output tokens/s a decode GPU", ylabel="interactivity, % of isolated")
    axes.set_title(f"SUN, figure 3: answers of {pool['answer']} tokens", loc="left", fontsize=10)
    axes.legend(fontsize=8, frameon=False)


def _draw_skew(panels: list[Any], document: Document) -> None:
    skew = document["skew"]
    for axes, (metric, label) in zip(
        panels, (("throughput", "output tokens/s"), ("interactivity", "mean 1/TPOT, tokens/s")), strict=True
    ):
        for placement, colour in (("isolated", ISOLATED_COLOUR), ("shared", SHARED_COLOUR)):
            points = [point for point in skew["points"] if point["placement"] == placement]
            axes.plot(
                [point["zipf"] for point in points], [point[metric] for point in points],
                "o-", color=colour, ms=4, lw=1.2, label=placement,
            )  # fmt: skip
        top = 1.1 * max(point[metric] for point in skew["points"])
        axes.set(ylim=(0, top), xlabel="Zipf exponent over four models", ylabel=label)
    panels[0].set_title(f"SUN, figure 4: {skew['rate']:.2f} requests/s (simulated)", loc="left", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="lower left")
