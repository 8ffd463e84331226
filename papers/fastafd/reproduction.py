"""FastAFD: steps of real bundles predicted from hardware and model files and a few fitted numbers, beside measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from papers.common import Claim, Wording, claims_table, curve, title
from papers.fastafd.stages import (
    BundleParameters,
    LayerStages,
    StepMeasurement,
    SystemMeasurement,
    WideEp,
    compare_layouts,
    curves,
    fit_bundle,
    fit_overhead,
    predict_step,
    priors,
    read_ratio_sweep,
    read_systems,
    relative_error,
    require_folder,
    throughput_per_gpu,
)
from reports.blocks import Document, Report, Section, Table, bullets, rows_table, sections
from reports.svg import render
from scenarios.afd import parse_ratios
from workloads.errors import BadInput

WORDING = Wording("fastafd")
HARDWARE, MODEL, PRINTED_MODEL = "gb200", "qwen3-235b-a22b", "Qwen3-235B-A22B-FP8"
OTHER_MODELS = {"MiniMax-M2.5-FP8": "minimax-m2.5"}
"""Models of which nothing is fitted, by their printed names."""

OVERHEAD_GPUS = (8, 32)
"""Sizes of wide EP that its overhead is fitted on."""

GOAL = {"fitted": 0.015, "left_out": 0.03, "regret": 0.02, "worst_regret": 0.04}
"""The goals that were set for this project: mean absolute TPOT errors, and throughput lost by the predicted ratio, at
most lengths and at any."""


@dataclass(frozen=True)
class FitChoice:
    """The measured steps that are fitted; None: every second ratio of each curve, and all prompt lengths."""

    ratios: str | None = None
    prompts: str | None = None

    def choose(self, rows: Sequence[StepMeasurement]) -> list[StepMeasurement]:
        ratios = None if self.ratios is None else _measured_ratios(self.ratios, rows)
        prompts = None if self.prompts is None else _measured_prompts(self.prompts, rows)
        selection = [
            row
            for curve in curves(list(rows)).values()
            for place, row in enumerate(curve)
            if (place % 2 == 0 if ratios is None else row.ratio in ratios)
            and (prompts is None or row.prompt_tokens in prompts)
        ]
        if not selection:
            raise BadInput("expected a ratio measured at one of these lengths", field="--fit", value=self.ratios)
        return selection


def reproduce(data: Path | None, choice: FitChoice = FitChoice(), fit_data: Path | None = None) -> Document:
    """The document `twin.reproduction-fastafd/1`; takes seconds.

    All steps in `data` but the fitted ones are predicted: those of `choice`, or all of another folder `fit_data`.
    """
    folder = require_folder(data)
    rows = read_ratio_sweep(folder)
    source = rows if fit_data is None else read_ratio_sweep(require_folder(fit_data))
    selection = choice.choose(source)
    stages = LayerStages(load_hardware(HARDWARE), load_model(MODEL))
    parameters = fit_bundle(stages, selection)
    points = [_point(stages, parameters, row, row in selection) for row in curve_order(rows)]
    document: Document = {
        "schema": "twin.reproduction-fastafd/1",
        "paper": "fastafd",
        "simulated": False,
        "hardware": HARDWARE,
        "model": MODEL,
        "fit": {"points": len(selection), **asdict(choice), "data": None if fit_data is None else str(fit_data)},
        "parameters": _parameters(stages, parameters),
        "points": points,
        "curves": _summarise_curves(points),
        "left_out": _leave_one_length_out(stages, rows),
        **_systems(stages, parameters, read_systems(folder)),
    }
    return document | {"claims": claims(document), "notes": notes(document)}


def curve_order(rows: Sequence[StepMeasurement]) -> list[StepMeasurement]:
    """The steps curve by curve, each in ascending ratio."""
    return [row for curve in curves(list(rows)).values() for row in curve]


def claims(document: Document) -> list[Claim]:
    lengths, left_out = document["curves"], document["left_out"]
    errors = [
        ("TPOT at lengths that are fitted in part", "fitted", [row for row in lengths if row["fitted_points"]]),
        ("TPOT at lengths that are not fitted", "left_out", [row for row in lengths if not row["fitted_points"]]),
    ]
    rows = [
        _goal(
            statement, GOAL[goal], _mean_error(document["points"], {_key(row) for row in rows}), "mean absolute error"
        )
        for statement, goal, rows in errors
        if rows
    ]
    rows += [
        _goal(f"TPOT at {row['prompt_tokens']:,} tokens, fitted without them", GOAL["left_out"], row["error"])
        for row in left_out
    ]
    regrets = sorted(row["regret"] for row in [*lengths, *left_out])
    lost = "throughput lost by the predicted ratio, at"
    rows.append(_goal(f"{lost} any curve", GOAL["worst_regret"], regrets[-1]))
    return [*rows, _goal(f"{lost} most curves", GOAL["regret"], regrets[len(regrets) // 2])]


def _goal(statement: str, goal: float, value: float, note: str = "") -> Claim:
    return WORDING.claim("goal", value <= goal, statement=statement, goal=goal, value=value, note=note)


def _mean_error(points: Sequence[Document], of_curves: Collection[tuple[int, int]]) -> float:
    return fmean(abs(point["error"]) for point in points if _key(point) in of_curves)


def notes(document: Document) -> list[str]:
    """Remarks on how the numbers came about, shown below the tables; the last is on whole systems."""
    lines = WORDING.notes(overhead=OVERHEAD_GPUS, model=PRINTED_MODEL)
    return lines if document["systems"] else lines[:-1]


def _key(row: Document) -> tuple[int, int]:
    """The curve of a point."""
    return row["prompt_tokens"], row["batch_size"]


def _point(stages: LayerStages, parameters: BundleParameters, row: StepMeasurement, fitted: bool) -> Document:
    step = predict_step(stages, parameters, row.prompt_tokens, row.batch_size, row.ratio)
    return {
        "prompt_tokens": row.prompt_tokens,
        "batch_size": row.batch_size,
        "ratio": row.ratio,
        "fitted": fitted,
        **_errors(row.tpot, step.tpot),
        "throughput_measured": throughput_per_gpu(row.batch_size, row.ratio, row.tpot),
        "throughput_predicted": throughput_per_gpu(row.batch_size, row.ratio, step.tpot),
        "bound": step.bound,
    }


def _errors(measured: float, predicted: float) -> Document:
    """Both TPOTs in milliseconds, and the error."""
    return {
        "tpot_measured_ms": 1e3 * measured,
        "tpot_predicted_ms": 1e3 * predicted,
        "error": predicted / measured - 1,
    }


def _parameters(stages: LayerStages, parameters: BundleParameters) -> list[Document]:
    expected = priors(stages)
    return [
        {"name": name, "value": value, "prior": expected[name].median, "reason": expected[name].reason}
        for name, value in asdict(parameters).items()
    ]


def _summarise_curves(points: Sequence[Document]) -> list[Document]:
    summaries = []
    for key in dict.fromkeys(map(_key, points)):
        curve_points = [point for point in points if _key(point) == key]
        errors = {
            name: fmean(subset) if (subset := [abs(p["error"]) for p in curve_points if p["fitted"] in kinds]) else None
            for name, kinds in (("error_fitted", (True,)), ("error_predicted", (False,)), ("error", (True, False)))
        }
        counts = {"points": len(curve_points), "fitted_points": sum(point["fitted"] for point in curve_points)}
        prompt, batch = key
        summaries.append({"prompt_tokens": prompt, "batch_size": batch, **counts, **errors, **_regret(curve_points)})
    return summaries


def _regret(points: Sequence[Document]) -> Document:
    """The ratios of highest measured and predicted throughput, and the share of measured throughput between them."""
    measured = max(points, key=lambda point: float(point["throughput_measured"]))
    predicted = max(points, key=lambda point: float(point["throughput_predicted"]))
    return {
        "best_measured": measured["ratio"],
        "best_predicted": predicted["ratio"],
        "regret": 1 - predicted["throughput_measured"] / measured["throughput_measured"],
    }


def _leave_one_length_out(stages: LayerStages, rows: Sequence[StepMeasurement]) -> list[Document]:
    """Each prompt length predicted from all steps at the other lengths; none where there is only one length."""
    prompts = list(dict.fromkeys(row.prompt_tokens for row in curve_order(rows)))
    results = []
    for prompt in prompts if len(prompts) > 1 else []:
        of_length = [row for row in rows if row.prompt_tokens == prompt]
        parameters = fit_bundle(stages, [row for row in rows if row.prompt_tokens != prompt])
        error = fmean(abs(relative_error(stages, parameters, row)) for row in of_length)
        points = [_point(stages, parameters, row, False) for row in of_length]
        results.append({"prompt_tokens": prompt, "points": len(of_length), "error": error, **_worst_regret(points)})
    return results


def _worst_regret(points: Sequence[Document]) -> Document:
    batches = dict.fromkeys(point["batch_size"] for point in points)
    regrets = (_regret([point for point in points if point["batch_size"] == batch]) for batch in batches)
    return max(regrets, key=lambda regret: float(regret["regret"]))


def _systems(stages: LayerStages, parameters: BundleParameters, rows: Sequence[SystemMeasurement]) -> Document:
    """Systems beside their prediction, and both layouts compared; empty where there is nothing to fit the overhead."""
    fitted = [row for row in rows if row.model == PRINTED_MODEL and row.ratio is None and row.gpus in OVERHEAD_GPUS]
    if not fitted:
        return {"wide_ep_overhead": None, "systems": [], "comparison": []}
    overhead = fit_overhead(stages, parameters, fitted)
    data = files("papers.fastafd") / "data"
    models = {PRINTED_MODEL: stages}
    for label, name in OTHER_MODELS.items():
        models[label] = LayerStages(stages.hardware, load_model(Path(str(data / f"{name}.yaml"))))
    systems = [
        _system(WideEp(models[row.model], parameters, overhead), row, row in fitted)
        for row in rows
        if row.model in models
    ]
    comparison = compare_layouts(WideEp(stages, parameters, overhead))
    return {"wide_ep_overhead": overhead, "systems": systems, "comparison": comparison}


def _system(wide_ep: WideEp, row: SystemMeasurement, fitted: bool) -> Document:
    if row.ratio is None:
        tpot = wide_ep.tpot(row.gpus, row.prompt_tokens, row.batch_size)
    else:
        tpot = predict_step(wide_ep.stages, wide_ep.parameters, row.prompt_tokens, row.batch_size, row.ratio).tpot
    return {
        "model": row.model,
        "prompt_tokens": row.prompt_tokens,
        "layout": "wide-ep" if row.ratio is None else f"afd {row.ratio}:1",
        "gpus": row.gpus,
        "batch_size": row.batch_size,
        "fitted": fitted,
        "throughput_measured": row.throughput,
        "throughput_predicted": row.throughput * row.tpot / tpot,
        **_errors(row.tpot, tpot),
    }


def _measured_ratios(text: str, rows: Sequence[StepMeasurement]) -> set[float]:
    measured = {row.ratio for row in rows}
    try:
        ratios = {float(topology.ratio) for topology in parse_ratios(text)}
    except BadInput as error:
        raise BadInput(error.expected, field="--fit", value=text) from None
    return _known(ratios, measured, "--fit", "ratios")


def _measured_prompts(text: str, rows: Sequence[StepMeasurement]) -> set[float]:
    try:
        prompts = {float(part) for part in text.split(",")}
    except ValueError:
        raise BadInput("expected prompt lengths such as 16384,65536", field="--fit-prompts", value=text) from None
    return _known(prompts, {float(row.prompt_tokens) for row in rows}, "--fit-prompts", "lengths")


def _known(values: set[float], measured: set[float], field: str, expected: str) -> set[float]:
    if not values & measured:
        listed = ", ".join(f"{value:g}" for value in sorted(measured))
        raise BadInput(
            f"expected measured {expected}: {listed}", field=field, value=", ".join(f"{v:g}" for v in values)
        )
    return values


# -- the report --------------------------------------------------------------------------------------------------------


def tables(document: Document) -> Report:
    """Steps over the ratio, errors by curve, fitted numbers, systems, AFD against wide EP, then the goals."""
    parts: list[Section] = [
        WORDING.section("points", document["points"]),
        WORDING.section("curves", _curves(document)),
        WORDING.section("parameters", _fitted_numbers(document), points=document["fit"]["points"]),
    ]
    if document["systems"]:
        parts += [
            WORDING.section("systems", document["systems"]),
            (WORDING.title("comparison"), _comparison(document["comparison"])),
        ]
    parts += [("Goals", claims_table(document["claims"])), ("Notes", bullets(document["notes"]))]
    return sections(parts)


def _curves(document: Document) -> list[Document]:
    left_out = {row["prompt_tokens"]: row["error"] for row in document["left_out"]}
    return [
        {
            **row,
            "fitted": _share(row["error_fitted"]),
            "predicted": _share(row["error_predicted"]),
            "left_out": _share(left_out.get(row["prompt_tokens"])),
            "lost": _share(row["regret"]),
        }
        for row in document["curves"]
    ]


def _fitted_numbers(document: Document) -> list[Document]:
    overhead = {"name": "wide_ep_overhead", "value": document["wide_ep_overhead"], "prior": None}
    return [
        row | {part: _value(row["name"], row[part]) for part in ("value", "prior")}
        for row in [*document["parameters"], overhead]
        if row["value"] is not None
    ]


def _value(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{1e6 * value:.2f} µs" if name.endswith(("seconds", "overhead")) else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _comparison(comparison: list[Document]) -> Table:
    texts, rows = WORDING.texts["tables"]["comparison"], comparison[0]["rows"]
    gains = (f"{{rows[{index}][gain]:100 +.1f}} %" for index in range(len(rows)))
    return rows_table(
        " | ".join(["prompt", *(f"{row['gpus']} GPUs" for row in rows), texts["titles"]]),
        " | ".join(["{prompt_tokens:,}", *gains, texts["cells"]]),
        comparison,
    )


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8c4a9e", "#a8321f", "#5f6f7f")


def figures(document: Document) -> dict[str, str]:
    svgs = {"steps": render(_draw_steps, document, 2)}
    if document["comparison"]:
        svgs["layouts"] = render(_draw_layouts, document, 1)
    return svgs


def _draw_steps(panels: list[Any], document: Document) -> None:
    """TPOT and throughput a GPU over the ratio: measured points, filled where fitted, and the predicted lines."""
    names = [("tpot", "_ms", "TPOT, ms"), ("throughput", "", "output tokens/s a GPU")]
    for axes, (name, unit, label) in zip(panels, names, strict=True):
        for index, row in enumerate(document["curves"]):
            colour = COLOURS[index % len(COLOURS)]
            points = [point for point in document["points"] if _key(point) == _key(row)]
            about = f"{row['prompt_tokens']:,} tokens, batch {row['batch_size']}"
            curve(axes, points, "ratio", f"{name}_predicted{unit}", "-", color=colour, lw=1.2, label=about)
            for fitted, face in ((True, colour), (False, "white")):
                subset = [point for point in points if point["fitted"] == fitted]
                curve(axes, subset, "ratio", f"{name}_measured{unit}", "o", color=colour, mfc=face, ms=4)
        axes.set(ylim=(0, None), xlabel="attention trays for each FFN tray, r", ylabel=label)
    title(panels[0], "FastAFD on GB200: measured (filled: fitted), lines predicted")
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")


def _draw_layouts(panels: list[Any], document: Document) -> None:
    """Predicted gain of AFD over wide EP by the number of GPUs, a line for each prompt length."""
    axes = panels[0]
    for index, length in enumerate(document["comparison"]):
        curve(
            axes, length["rows"], "gpus", "gain", "o-", 100, color=COLOURS[index % len(COLOURS)],
            alpha=0.55 if index >= len(COLOURS) else 1, ms=3, lw=1.2, label=f"{length['prompt_tokens']:,}",
        )  # fmt: skip
    axes.axhline(0, color="black", lw=0.8)
    title(axes, "Predicted, by prompt tokens", xlabel="GPUs", ylabel="AFD over wide EP, % tokens/s a GPU")
    axes.legend(fontsize=7, frameon=False)
