"""SUN: Table 4 from its rows of low concurrency, decode pools, and skew over models, printed beside predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from papers.common import Claim, Task, claim, disagreements, run_tasks
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
from reports.blocks import Document, Report, Section, Table, bullets, rows_table, sections, table
from reports.svg import render

SCHEMA = "twin.reproduction-sun/1"
REPLICATIONS = 8
"""Replications of every run of a minute: the mean of a rate is then known to about 1 %."""

GOAL = {"relative": 0.03, "throughput": 0.02, "points": 0.03, "stable": 0.02}
"""Goals that were set before anything was computed: Table 4 on average, pools' throughput and points of interactivity.
`stable` is the largest change that counts as none, equal to the goal of pools' throughput."""


def reproduce(jobs: int, progress: Callable[[str], None], replications: int = REPLICATIONS) -> Document:
    """The document `twin.reproduction-sun/1`: about a minute on two cores; fewer replications for a trial."""
    rows, service = concurrency_rows(), fitted_service()
    answers = possible_answers(service)
    engines = dict.fromkeys((row.model, row.method) for row in rows)
    tasks = [Task(f"Table 4, {model} {method}", predict_engine, (model, method)) for model, method in engines]
    results = [result for engine in run_tasks(tasks, jobs, progress) for result in engine]
    tasks = [Task(f"figure 3, answers of {n} tokens", predict_pools, (service, n, replications)) for n in answers]
    pools = run_tasks(tasks, jobs, progress)
    pool = choose(pools)
    points = skew_points()
    tasks = [
        Task(
            f"figure 4, {placement}, zipf {zipf:g}",
            simulate,
            (service, pool["rate"], placement, zipf, replications),
        )
        for placement, zipf in points
    ]
    curves = dict(zip(points, run_tasks(tasks, jobs, progress), strict=True))
    document: Document = {
        "schema": SCHEMA,
        "paper": "sun",
        "simulated": True,
        "concurrency": {
            "rows": results,
            "errors": {metric: errors(results, metric) for metric in METRICS},
            "fits": fits(rows),
            "forms": forms(rows),
        },
        "pool": {"chosen": pool, "lengths": pools},
        "skew": summarise_skew(curves, pool["rate"]),
    }
    document["claims"], document["notes"] = claims(document), notes(document)
    return document


def claims(document: Document) -> list[Claim]:
    return [
        *_concurrency_claims(document["concurrency"]),
        *_pool_claims(document["pool"]["chosen"]),
        *_skew_claims(document["skew"]),
    ]


def notes(document: Document) -> list[str]:
    contended = [row for row in document["concurrency"]["rows"] if row["concurrency"] > 1]
    errors_of = [row["errors"]["ttft"] for row in contended]
    shares = [row["published"]["ttft"] * row["published"]["throughput"] / row["concurrency"] / row["answer"]
              for row in contended]  # fmt: skip
    skewed = document["skew"]
    return [
        "No row of concurrency 16 enters a parameter. The form of the decode line and its fit follow from the roofline"
        " and from how a closed loop works, but were settled by people who had seen those rows; what other choices give"
        " stands beside them.",
        f"TTFT at concurrency 4 and 16 is predicted {100 * min(errors_of):+.0f} to {100 * max(errors_of):+.0f} % off:"
        " the print has prompts waiting for each other in a way that it does not describe. TTFT is"
        f" {100 * min(shares):.0f} to {100 * max(shares):.0f} % of an answer's time there.",
        "Lost from the text that we have: lengths and rate of figures 3 and 4, and the strongest skew. Figure 3's"
        " isolated row fixes the rate and its row of one worker the length of answers; figure 4 is taken at that rate"
        f" ({skewed['rate']:.2f} requests/s; one rate at every length, section 4.1) with {skewed['answer']} tokens"
        " (appendix A.2). Nothing is fitted to figure 4, but its sizes were known when this was settled.",
        f"Prompts of {PROMPT} tokens, Poisson arrivals, {LARGEST_BATCH} sequences a worker and 80 GB a GPU are assumed;"
        " the paper states none.",
    ]


def _concurrency_claims(concurrency: Document) -> list[Claim]:
    result = []
    for metric in ("tpot", "throughput"):
        mean, worst, row = (concurrency["errors"][metric][key] for key in ("mean", "worst", "worst_row"))
        note = (
            f"goal {100 * GOAL['relative']:g} %; worst {100 * worst:+.1f} %, {row['model']} {row['method']},"
            f" {row['prompt']} tokens in"
        )
        result.append(
            claim(
                "Table 4", f"{metric} at concurrency 16 from 1 and 4, mean error over rows", "0 %",
                f"{100 * mean:.2f} %", mean <= GOAL["relative"], note,
            )
        )  # fmt: skip
    return result


def _pool_claims(pool: Document) -> list[Claim]:
    """Claims on every shared pool but that of one worker, which chose the length of answers.

    A pool that keeps up has the offered load as its throughput: that is an input.
    """
    result = []
    for row in pool["rows"][1:]:
        note = "this row chose the length of answers" if row["fixes_the_load"] else ""
        load_note = "; ".join(
            filter(None, [note, "an input where the pool keeps up: the offered load over its workers"])
        )
        label, published, predicted = f"{row['workers']} shared", row["published"], row["predicted"]
        result += [
            claim(
                "figure 3", f"{label}: tok/s a decode GPU (input)", f"{published['throughput']:g}",
                f"{predicted['throughput']:.0f}", abs(row["throughput_error"]) <= GOAL["throughput"], load_note,
            ),
            claim(
                "figure 3", f"{label}: interactivity", f"{100 * published['interactivity_change']:+.0f} %",
                f"{100 * predicted['interactivity_change']:+.1f} %",
                abs(row["interactivity_points"]) <= GOAL["points"], note,
            ),
        ]  # fmt: skip
    return result


def _skew_claims(skewed: Document) -> list[Claim]:
    result = []
    for metric, falls in skewed["falls"].items():
        change = skewed["shared_change"][metric]["predicted"]
        result += [
            claim("figure 4", f"isolated {metric} falls with every step of skew", "falls",
                   "falls" if falls else "does not", falls, ""),
            claim("figure 4", f"shared {metric}, zipf 2 against 0", "stable", f"{100 * change:+.1f} %",
                   abs(change) <= GOAL["stable"], ""),
        ]  # fmt: skip
    for size in skewed["sizes"]:
        low, high = size["one_run"]
        result.append(
            claim(
                "figure 4", size["what"], f"{100 * size['published']:+.1f} %",
                f"{100 * size['predicted']:+.1f} %", low <= size["published"] <= high,
                f"95 % of runs of a minute within {100 * low:+.1f} to {100 * high:+.1f} %",
            )
        )  # fmt: skip
    return result


FORMS = {"batching": "batching, rows free: what the roofline says", "rows": "every row", "neither": "neither: KV alone"}


def tables(document: Document) -> Report:
    """Table 4's high concurrency, pools of decode workers, skew over models, then the disagreements in words."""
    skew = document["skew"]
    parts: list[Section] = [
        ("Table 4, concurrency 16 from concurrency 1 and 4", _concurrency(document["concurrency"])),
        ("The decode line behind it: microseconds, and nanoseconds a KV token", _fits(document["concurrency"]["fits"])),
        (
            "Who bears what four sequences cost beyond their KV: mean errors in closed form",
            _forms(document["concurrency"]["forms"]),
        ),
        ("Figure 3: tok/s a decode GPU and interactivity against isolated (* an input)", _pool(document["pool"])),
        (
            f"Figure 4: {skew['rate']:.2f} requests/s, answers of {skew['answer']} tokens,"
            f" {skew['replications']} minutes each",
            _skew(skew),
        ),
        ("Sizes of the effect of skew, zipf 2", _sizes(skew["sizes"])),
        ("What disagrees", disagreements(document["claims"])),
        ("Notes", bullets(document["notes"])),
    ]
    return sections(parts)


def _concurrency(concurrency: Document) -> Table:
    result = rows_table(
        "model | method | in | TPOT ms | predicted | error | any split | tok/s | predicted | error",
        "{model} | {method} | {prompt} | {published[tpot]:1e3 .1f} | {predicted[tpot]:1e3 .2f}"
        " | {errors[tpot]:100 +.1f} % | {ends[0]:1e3 .1f}-{ends[1]:1e3 .1f} | {published[throughput]:.1f}"
        " | {predicted[throughput]:.1f} | {errors[throughput]:100 +.1f} %",
        [{**row, "ends": sorted(row["tpot_any_split"])} for row in concurrency["rows"] if not row["fitted"]],
    )
    means = {metric: f"{100 * concurrency['errors'][metric]['mean']:.2f} %" for metric in ("tpot", "throughput")}
    result.add_row("mean |error|", "", "", "", "", means["tpot"], "", "", "", means["throughput"])
    for name, error in concurrency["errors"]["tpot"]["by_method"].items():
        throughput = concurrency["errors"]["throughput"]["by_method"][name]
        model, _, method = name.rpartition(" ")
        result.add_row(model, method, "", "", "", f"{100 * error:.2f} %", "", "", "", f"{100 * throughput:.2f} %")
    return result


def _fits(fits: list[Document]) -> Table:
    result = table("model", "β, 16 bits", "β, 4 bits", "batching", "KV token", "misfit", "ridge, 16 bits", "4 bits")
    for fit in fits:
        result.add_row(
            fit["model"],
            *(f"{1e6 * seconds:.0f}" for seconds in (fit["weights"]["16"], fit["weights"]["4"], fit["batching"])),
            f"{1e9 * fit['per_kv_token']:.0f}",
            f"{100 * fit['misfit']:.1f} %",
            *(f"{fit['ridge_rows'][bits]:.0f} rows" for bits in ("16", "4")),
        )
    return result


def _forms(forms: list[Document]) -> Table:
    return rows_table(
        "borne by | fit | fitted rows | TPOT at 16 | throughput at 16",
        "{name} | {columns} | {misfit:100 .2f} % | {tpot_error:100 .2f} % | {throughput_error:100 .2f} %",
        [
            {**form, "name": FORMS[form["form"]], "columns": "TPOT alone" if form["plain"] else "both columns"}
            for form in forms
        ],
    )


def _pool(pool: Document) -> Table:
    """The printed pools, the chosen length, and the other possible lengths with the errors that they would give."""
    lengths = [pool["chosen"], *(length for length in pool["lengths"] if length["answer"] != pool["chosen"]["answer"])]
    result = table("decode workers", "printed", *(f"{length['answer']} out" for length in lengths))
    for index, row in enumerate(pool["chosen"]["rows"]):
        star = "*" if row["fixes_the_load"] else ""
        result.add_row(
            f"{row['workers']} {row['placement']}{star}",
            _pool_cell(row["published"]),
            *(_pool_cell(length["rows"][index]["predicted"]) for length in lengths),
        )
    result.add_row("requests/s", "", *(f"{length['rate']:.2f}" for length in lengths))
    return result


def _pool_cell(values: Document) -> str:
    return f"{values['throughput']:.0f} {100 * values['interactivity_change']:+.1f} %"


def _skew(skew: Document) -> Table:
    return rows_table(
        "decode | zipf | tok/s | of offered | TPOT ms | interactivity | TTFT ms",
        "{placement} | {zipf:g} | {throughput:.0f} | {achieved:100 .1f} % | {tpot:1e3 .1f} | {interactivity:.1f}"
        " | {ttft:1e3 .1f}",
        skew["points"],
    )


def _sizes(sizes: list[Document]) -> Table:
    return rows_table(
        "change | printed | predicted | one run of a minute",
        "{what} | {published:100 +.1f} % | {predicted:100 +.1f} % | {one_run[0]:100 +.1f} % to {one_run[1]:100 +.1f} %",
        sizes,
    )


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
