"""SPEAR: SLO-constrained, EC-aware chunk scheduling (4.3, 5.3.3), predicted beside Table 3.

Latency tables and the way in which requests are drawn come from the static rows of the table. The rows of the SLO
scheduler are then predicted: nothing is chosen by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from papers.common import Claim, Task, Wording, conclusion, ends, run_tasks
from papers.spear.published import DENSITIES, GOALS, RATE, REQUESTS, Row, meets, published_rows, slo_rows
from papers.spear.tables import (
    GRID,
    LARGEST,
    READINGS,
    SAMPLINGS,
    SMALLEST,
    SYNTHETIC,
    Figures,
    Iteration,
    Reading,
    Sampling,
    Setting,
    density_misfit,
    fit_tables,
)
from reports.blocks import Document, Report, Table, sections, table
from reports.svg import render
from twin.serving.results.uncertainty import combine
from workloads.traces import Trace

WORDING = Wording("spear")
VLLM = Sampling("vllm")
"""The sampling with the most widely used filter, which is always reported."""

STEP = 64
"""Granularity of chunks, tokens, that brings P99 ITL nearer to the printed SLO rows. It was found by looking at these
rows, so no prediction uses it: it is reported beside them as a possible explanation.
"""


@dataclass(frozen=True)
class Study:
    """The extent of the simulations. Predictions are made with other random numbers than fits.

    `screening`: replications and rounds of the first fit of each reading and sampling; `fitting`: of the best ones',
    and `refining` of the best tables. `predicting`: replications of Table 3. `alternatives`: further samplings that are
    fitted.
    """

    readings: tuple[Reading, ...] = READINGS
    samplings: tuple[Sampling, ...] = SAMPLINGS
    screening: tuple[int, int] = (2, 3)
    fitting: tuple[int, int] = (4, 4)
    refining: tuple[int, int] = (12, 3)
    predicting: int = 20
    alternatives: int = 2


def reproduce(trace: Trace | None, jobs: int, progress: Callable[[str], None], study: Study | None = None) -> Document:
    """The document `twin.reproduction-spear/1`: Table 3 predicted beside printed, two minutes of two cores with a
    trace.
    """
    study = study or Study()
    rows, first = published_rows(), max(study.fitting[0], study.refining[0])

    def run(stage: str, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        return run_tasks([Task(stage, function, ()) for function in functions], jobs, progress)

    def simulations(setting: Setting, fit: Document, rows: Sequence[Row], count: int) -> list[Callable[[], Any]]:
        """Tasks that simulate rows by a fit, with other random numbers than any fit."""
        return [partial(setting.run, fit["iteration"], row, range(first, first + count)) for row in rows]

    settings = _settings(trace, study)
    screened = run("screening", [partial(fit_tables, setting, ("mid",), study.screening) for setting in settings])
    finalists = _finalists(settings, screened, study)
    fits = run("fitting", [partial(fit_tables, setting, tuple(DENSITIES), study.fitting) for setting in finalists])
    stated = [i for i, setting in enumerate(finalists) if setting.reading.passes == "separate"]
    best = min(stated, key=lambda i: _misfit(fits[i]))
    chosen, alternatives = finalists[best], [i for i in range(len(fits)) if i != best]
    refining = partial(fit_tables, chosen, tuple(DENSITIES), study.refining, fits[best]["iteration"])
    (fit,) = run("refining", [refining])
    figures_by_row = run("predicting", simulations(chosen, fit, rows, study.predicting))
    coarse = run("coarse chunks", simulations(replace(chosen, step=STEP), fit, slo_rows(), study.predicting))
    others = [simulations(finalists[i], fits[i], slo_rows(), study.fitting[0]) for i in alternatives]
    alternative_figures = iter(run("alternatives", [task for tasks in others for task in tasks]))
    document = {
        "schema": "twin.reproduction-spear/1",
        "paper": "spear",
        "simulated": True,
        "held_out": "rows of the SLO scheduler; tables and sampling were fitted to the static rows",
        "workload": _describe_workload(chosen),
        "chunk_limits": [SMALLEST, LARGEST],
        "screening": [_describe_fit(*pair) for pair in zip(settings, screened, strict=True)],
        "fit": _describe_fit(chosen, fit),
        "iteration": _describe_iteration(fit["iteration"]),
        "tables": fit["iteration"].tables().document(),
        "density": density_misfit(),
        "rows": [_compare_row(*pair) for pair in zip(rows, figures_by_row, strict=True)],
        "against_static": _against_static(rows, figures_by_row),
        "coarse": {
            "step": STEP,
            "rows": [_compare_row(*pair) for pair in zip(slo_rows(), coarse, strict=True)],
        },
        "alternatives": [
            {
                **_describe_fit(finalists[i], fits[i]),
                "rows": [_compare_row(row, next(alternative_figures)) for row in slo_rows()],
            }
            for i in alternatives
        ],
    }
    return document | {"claims": claims(document), "notes": notes(document)}


def _settings(trace: Trace | None, study: Study) -> list[Setting]:
    """Every reading on every sampling that leaves something of the trace."""
    lengths: list[tuple[Trace | None, str]] = [(None, "synthetic")]
    if trace is not None:
        traces = [(sampling.draw_from(trace), sampling.name) for sampling in study.samplings]
        lengths = [(turns, name) for turns, name in traces if len(turns)]
    return [Setting(reading, *workload) for workload in lengths for reading in study.readings]


def _misfit(fit: Document) -> float:
    return float(np.hypot(fit["misfit_p99"], fit["misfit_ttft"]) / np.sqrt(2))


def _finalists(settings: list[Setting], screened: list[Document], study: Study) -> list[Setting]:
    """The best sampling of each reading; and of the best reading the next best samplings, and vLLM's."""
    order = sorted(range(len(settings)), key=lambda i: _misfit(screened[i]))
    ranked = [settings[i] for i in order]
    best_by_reading = {setting.reading: setting for setting in reversed(ranked)}
    same = [setting for setting in ranked if setting.reading == ranked[0].reading]
    picked = [best_by_reading[reading] for reading in study.readings]
    finalists = [*same[1 : 1 + study.alternatives], *(setting for setting in same if setting.name == VLLM.name)]
    return list(dict.fromkeys([*picked, *finalists]))


# -- the document ------------------------------------------------------------------------------------------------------


def _describe_workload(setting: Setting) -> Document:
    lengths = setting.lengths
    prompts, answers = SYNTHETIC["prefill"]["mean"], SYNTHETIC["decode"]["mean"]
    if lengths is not None:
        prompts, answers = float(lengths.prefill_tokens.mean()), float(lengths.decode_tokens.mean())
    return {
        "sampling": setting.name,
        "turns": None if lengths is None else len(lengths),
        "mean_prompt": prompts,
        "mean_answer": answers,
        "rate": RATE,
    }


def _describe_fit(setting: Setting, fit: Document) -> Document:
    return {
        "reading": setting.reading.name,
        "sampling": setting.name,
        "misfit": _misfit(fit),
        "misfit_p99_itl": fit["misfit_p99"],
        "misfit_ttft": fit["misfit_ttft"],
    }


def _describe_iteration(iteration: Iteration) -> Document:
    return {
        "tokens": list(GRID),
        "w4": list(iteration.base),
        "compensators": list(iteration.compensators),
        **{name: iteration.at(density) for name, density in DENSITIES.items()},
    }


def _compare_row(row: Row, figures: Sequence[Figures]) -> Document:
    """Published and predicted, seconds; `prediction`: the 95 % range of one run, `inside`: it holds the print."""
    mean, intervals = combine([{"p99_itl": p99, "ttft": ttft} for p99, ttft in figures])
    columns = {}
    for name, published in (("p99_itl", row.p99_itl), ("ttft", row.ttft)):
        low, high = intervals[name]["prediction"]
        columns[name] = {
            "published": published,
            "predicted": mean[name],
            "error": mean[name] / published - 1,
            **{kind: intervals[name][kind] for kind in INTERVALS},
            "inside": low <= published <= high,
        }
    return {
        "scheduler": row.name,
        "chunk": row.chunk,
        "goal": row.goal,
        "density": row.density,
        "fitted": row.chunk is not None,
        **columns,
        "meets": [
            {"goal": goal, "published": row.p99_itl <= goal, "predicted": meets(mean["p99_itl"], goal)}
            for goal in GOALS
        ],
    }


INTERVALS = ("confidence", "prediction")


def _against_static(rows: Sequence[Row], figures: Sequence[Sequence[Figures]]) -> list[Document]:
    """Mean TTFT of the SLO scheduler less that of static chunk sizes that meet the same goal, run by run, seconds.

    Printed and predicted each have the static size that is quickest by their own figures: the largest difference.
    """
    pairs = list(zip(rows, figures, strict=True))
    results = []
    for slo, slo_runs in pairs:
        if slo.goal is None:
            continue
        sizes = []
        for row, runs in pairs:
            if row.chunk and row.density == slo.density:
                mean, intervals = combine([{"ttft": a[1] - b[1]} for a, b in zip(slo_runs, runs, strict=True)])
                meets_goal = meets(float(np.mean([p99 for p99, _ in runs])), slo.goal)
                sizes.append(
                    {
                        "static": row.chunk,
                        "published": slo.ttft - row.ttft if row.p99_itl <= slo.goal else None,
                        "predicted": mean["ttft"] if meets_goal else None,
                        **{kind: intervals["ttft"][kind] for kind in INTERVALS},
                    }
                )
        comparison: Document = {"goal": slo.goal, "density": slo.density}
        for name, kinds in (("published", ()), ("predicted", INTERVALS)):
            size = max((size for size in sizes if size[name] is not None), key=lambda size: float(size[name]))
            comparison[name] = {"static": size["static"], "difference": size[name]} | {k: size[k] for k in kinds}
        meeting = [size for size in sizes if size["published"] is not None or size["predicted"] is not None]
        results.append(comparison | {"sizes": meeting})
    return results


# -- claims ------------------------------------------------------------------------------------------------------------


HALF_DIGIT = 0.05e-3
"""Half of the last printed digit, seconds: Table 3 prints tenths of a millisecond."""


def claims(document: Document) -> list[Claim]:
    return [*_goal_claims(document), *map(_ttft_claim, document["against_static"]), *_table_claims(document)]


def _goal_claims(document: Document) -> Iterator[Claim]:
    for goal in GOALS:
        exact, coarse = ([row["p99_itl"] for row in some if row["goal"] == goal]
                         for some in (document["rows"], document["coarse"]["rows"]))  # fmt: skip
        met = [meets(row["predicted"], goal) for row in exact]
        yield WORDING.claim(
            "goal", all(met), goal=goal, met=sum(met), count=len(met), step=document["coarse"]["step"],
            printed=ends(row["published"] for row in exact), exact=ends(row["predicted"] for row in exact),
            coarse=ends(row["predicted"] for row in coarse),
        )  # fmt: skip
    fitted = [row for row in document["rows"] if row["fitted"]]
    marks = [goal["published"] == goal["predicted"] for row in fitted for goal in row["meets"]]
    errors = ends(row["p99_itl"]["error"] for row in fitted)
    yield WORDING.claim("marks", all(marks), count=len(marks), same=sum(marks), errors=errors)


def _ttft_claim(comparison: Document) -> Claim:
    misses = comparison["published"]["difference"] >= 0
    contradicted = "; the printed row does not bear the claim out either" if misses else ""
    return WORDING.claim("ttft", comparison["predicted"]["confidence"][1] < 0, contradicted=contradicted, **comparison)


def _table_claims(document: Document) -> Iterator[Claim]:
    for name, title, fitted, more in (
        ("ttft", "mean TTFT, static rows", True, ""),
        ("ttft", "mean TTFT, SLO rows, held out", False, ""),
        ("p99_itl", "P99 ITL, SLO rows, held out", False, "; a scheduler that weighs every token comes up to its goal"),
    ):
        columns = [row[name] for row in document["rows"] if row["fitted"] == fitted]
        inside, errors = sum(column["inside"] for column in columns), ends(column["error"] for column in columns)
        yield WORDING.claim(
            "inside", inside == len(columns), title=title, count=len(columns), inside=inside, requests=REQUESTS,
            errors=errors, more=more,
        )  # fmt: skip
    worst = max(document["density"], key=lambda entry: float(entry["largest"]))
    largest = max(row["p99_itl"]["published"] for row in document["rows"] if row["chunk"] == worst["chunk"])
    yield WORDING.claim("linear", worst["largest"] <= HALF_DIGIT, of=largest, **worst)


def notes(document: Document) -> list[str]:
    rows = document["rows"]
    widest = max(rows, key=lambda row: _relative_width(row["ttft"]))
    return WORDING.notes(
        requests=REQUESTS,
        pairs=len(document["screening"]),
        reading=document["fit"]["reading"],
        workload=document["workload"],
        step=document["coarse"]["step"],
        coarse=ends(row["p99_itl"]["error"] for row in document["coarse"]["rows"]),
        widest=f"{widest['scheduler']}, {widest['density']}",
        wide=widest["ttft"]["prediction"],
        narrow=ends(_relative_width(row["ttft"]) for row in rows if not row["fitted"]),
        limits=document["chunk_limits"],
    )


def _relative_width(column: Document) -> float:
    low, high = column["prediction"]
    return float((high - low) / 2 / column["predicted"])


# -- the report --------------------------------------------------------------------------------------------------------


def tables(document: Document) -> Report:
    """Table 3, the SLO scheduler against static sizes, the alternatives, then the disagreements in words."""
    coarse = document["coarse"]
    return sections(
        [
            WORDING.section("rows", document["rows"], **document["workload"]),
            WORDING.section("against", _against(document)),
            (WORDING.title("iteration"), _iteration(document["iteration"])),
            (WORDING.title("coarse", **coarse), WORDING.table("rows", coarse["rows"])),
            WORDING.section("alternatives", _alternatives(document)),
            *conclusion(document),
        ]
    )


def _against(document: Document) -> Iterator[Document]:
    """Each static size whose P99 ITL keeps the goal, as printed or as predicted."""
    for comparison in document["against_static"]:
        for size in comparison["sizes"]:
            low, high = (f"{1e3 * end:+.1f}" for end in size["confidence"])
            yield {
                **comparison,
                "static": size["static"],
                "printed": _difference(size["published"]),
                "found": _difference(size["predicted"]),
                "interval": None if size["predicted"] is None else f"[{low}, {high}]",
            }


def _difference(seconds: float | None) -> str:
    return "misses it" if seconds is None else f"{1e3 * seconds:+.1f}"


def _iteration(iteration: Document) -> Table:
    columns = [name for name in iteration if name != "tokens"]
    result = table("tokens", *("without" if name == "w4" else name for name in columns))
    for index, tokens in enumerate(iteration["tokens"]):
        result.add_row(str(tokens), *(f"{1e3 * iteration[name][index]:.2f}" for name in columns))
    return result


def _alternatives(document: Document) -> Iterator[Document]:
    """The chosen alternative comes first. Errors of static rows are root mean squares of logarithms, of its fit."""
    held_out = [row for row in document["rows"] if not row["fitted"]]
    for alternative in ({**document["fit"], "rows": held_out}, *document["alternatives"]):
        errors = {name: ends(row[name]["error"] for row in alternative["rows"]) for name in ("p99_itl", "ttft")}
        yield alternative | errors


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
