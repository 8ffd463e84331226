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
from papers.common import claim, claims_table
from papers.fastafd.stages import (
    RATIO_SWEEP,
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
from reports.blocks import Document, Report, Section, Table, bullets, percent, rows_table, sections, table
from reports.svg import render
from scenarios.afd import parse_ratios
from workloads.errors import BadInput

SCHEMA = "twin.reproduction-fastafd/1"
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
        "schema": SCHEMA,
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
    document["claims"], document["notes"] = claims(document), notes(document)
    return document


def curve_order(rows: Sequence[StepMeasurement]) -> list[StepMeasurement]:
    """The steps curve by curve, each in ascending ratio."""
    return [row for curve in curves(list(rows)).values() for row in curve]


def claims(document: Document) -> list[Document]:
    curves = document["curves"]
    fitted = [curve for curve in curves if curve["fitted_points"]]
    predicted = [curve for curve in curves if not curve["fitted_points"]]
    left_out = document["left_out"]
    rows = []
    if fitted:
        error = _mean_error(document["points"], {tuple(curve[key] for key in CURVE) for curve in fitted})
        rows.append(_goal("TPOT at lengths that are fitted in part", GOAL["fitted"], error, "mean absolute error"))
    if predicted:
        error = _mean_error(document["points"], {tuple(curve[key] for key in CURVE) for curve in predicted})
        rows.append(_goal("TPOT at lengths that are not fitted", GOAL["left_out"], error, "mean absolute error"))
    rows += [
        _goal(f"TPOT at {row['prompt_tokens']:,} tokens, fitted without them", GOAL["left_out"], row["error"])
        for row in left_out
    ]
    regrets = [curve["regret"] for curve in curves] + [row["regret"] for row in left_out]
    rows.append(_goal("throughput lost by the predicted ratio, at any curve", GOAL["worst_regret"], max(regrets)))
    median = sorted(regrets)[len(regrets) // 2]
    return [*rows, _goal("throughput lost by the predicted ratio, at most curves", GOAL["regret"], median)]


def notes(document: Document) -> list[str]:
    """Remarks on how the numbers came about, shown below the tables."""
    lines = [
        "The memory bandwidth is the data sheet's. A fitted share of it came to 1.00. The steps of 65,536-token prompts"
        " leave no room for reading the attention projections beside the KV cache, so these are not charged.",
        "One run a point, and neighbouring points differ by about 1 %: no smooth curve comes much below 1 %.",
    ]
    if document["systems"]:
        lines.append(
            f"The overhead of wide EP is fitted on {OVERHEAD_GPUS[0]} and {OVERHEAD_GPUS[1]} GPUs of {PRINTED_MODEL};"
            " nothing is fitted to another model. At 64 GPUs, with two experts on each, the measured step is far longer"
            " than predicted. An uneven choice of experts, as a second fitted number, leaves 14 % of it unexplained and"
            " makes 4 GPUs and the other model worse."
        )
    return lines


CURVE = ("prompt_tokens", "batch_size")


def _point(stages: LayerStages, parameters: BundleParameters, row: StepMeasurement, fitted: bool) -> Document:
    step = predict_step(stages, parameters, row.prompt_tokens, row.batch_size, row.ratio)
    return {
        "prompt_tokens": row.prompt_tokens,
        "batch_size": row.batch_size,
        "ratio": row.ratio,
        "fitted": fitted,
        "tpot_measured_ms": 1e3 * row.tpot,
        "tpot_predicted_ms": 1e3 * step.tpot,
        "error": step.tpot / row.tpot - 1,
        "throughput_measured": throughput_per_gpu(row.batch_size, row.ratio, row.tpot),
        "throughput_predicted": throughput_per_gpu(row.batch_size, row.ratio, step.tpot),
        "bound": step.bound,
    }


def _parameters(stages: LayerStages, parameters: BundleParameters) -> list[Document]:
    expected, values = priors(stages), asdict(parameters)
    return [
        {"name": name, "value": value, "prior": expected[name].median, "reason": expected[name].reason}
        for name, value in values.items()
    ]


def _summarise_curves(points: Sequence[Document]) -> list[Document]:
    summaries = []
    for curve in dict.fromkeys(tuple(point[key] for key in CURVE) for point in points):
        curve_points = [point for point in points if tuple(point[key] for key in CURVE) == curve]
        errors = {
            name: fmean(subset) if (subset := [abs(p["error"]) for p in curve_points if p["fitted"] in kinds]) else None
            for name, kinds in (("error_fitted", (True,)), ("error_predicted", (False,)), ("error", (True, False)))
        }
        row = dict(zip(CURVE, curve, strict=True))
        fitted = sum(point["fitted"] for point in curve_points)
        summaries.append(
            {**row, "points": len(curve_points), "fitted_points": fitted, **errors, **_regret(curve_points)}
        )
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
    return max((_regret(curve) for curve in _by_batch(points)), key=lambda regret: float(regret["regret"]))


def _by_batch(points: Sequence[Document]) -> list[list[Document]]:
    batches = dict.fromkeys(point["batch_size"] for point in points)
    return [[point for point in points if point["batch_size"] == batch] for batch in batches]


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
        "tpot_measured_ms": 1e3 * row.tpot,
        "tpot_predicted_ms": 1e3 * tpot,
        "error": tpot / row.tpot - 1,
    }


def _mean_error(points: Sequence[Document], of_curves: Collection[tuple[Any, ...]]) -> float:
    return fmean(abs(point["error"]) for point in points if tuple(point[key] for key in CURVE) in of_curves)


def _goal(statement: str, goal: float, value: float, note: str = "") -> Document:
    return claim(RATIO_SWEEP, statement, f"at most {100 * goal:g} %", f"{100 * value:.2f} %", value <= goal, note)


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


def tables(document: Document) -> Report:
    """Steps over the ratio, errors by curve, fitted numbers, systems, AFD against wide EP, then the goals."""
    parts: list[Section] = [
        ("Decode step over attention trays for each FFN tray (* fitted)", _points(document["points"])),
        ("Mean absolute errors of TPOT, and throughput lost by the predicted ratio", _curves(document)),
        (f"Fitted on {document['fit']['points']} steps, for one layer and microbatch", _parameters_table(document)),
    ]
    if document["systems"]:
        parts += [
            ("Whole systems (* fitted)", _systems_table(document["systems"])),
            ("AFD over wide EP on the same GPUs, output tokens/s and GPU", _comparison(document["comparison"])),
        ]
    parts += [("Goals", claims_table(document["claims"])), ("Notes", bullets(document["notes"]))]
    return sections(parts)


def _points(points: list[Document]) -> Table:
    return rows_table(
        "prompt | batch | r | TPOT ms | predicted | error | tok/s/GPU | predicted | set by",
        "{prompt_tokens:,} | {batch_size} | {ratio:g}{fitted:* } | {tpot_measured_ms:.2f} | {tpot_predicted_ms:.2f}"
        " | {error:100 +.1f} % | {throughput_measured:.0f} | {throughput_predicted:.0f} | {bound}",
        points,
    )


def _curves(document: Document) -> Table:
    result = table("prompt", "batch", "fitted", "others", "without this length", "best r", "predicted", "lost")
    left_out = {row["prompt_tokens"]: row["error"] for row in document["left_out"]}
    for curve in document["curves"]:
        result.add_row(
            f"{curve['prompt_tokens']:,}",
            str(curve["batch_size"]),
            _share(curve["error_fitted"]),
            _share(curve["error_predicted"]),
            _share(left_out.get(curve["prompt_tokens"])),
            f"{curve['best_measured']:g}",
            f"{curve['best_predicted']:g}",
            _share(curve["regret"]),
        )
    return result


def _parameters_table(document: Document) -> Table:
    result = table("parameter", "value", "expected before")
    for parameter in document["parameters"]:
        result.add_row(
            parameter["name"],
            _value(parameter["name"], parameter["value"]),
            _value(parameter["name"], parameter["prior"]),
        )
    if document["wide_ep_overhead"] is not None:
        result.add_row("wide_ep_overhead", _value("seconds", document["wide_ep_overhead"]), "")
    return result


def _systems_table(systems: list[Document]) -> Table:
    return rows_table(
        "model | layout | GPUs | batch | TPOT ms | predicted | error | tok/s/GPU | predicted",
        "{model} | {layout} | {gpus}{fitted:* } | {batch_size} | {tpot_measured_ms:.1f} | {tpot_predicted_ms:.1f}"
        " | {error:100 +.1f} % | {throughput_measured:.0f} | {throughput_predicted:.0f}",
        systems,
    )


def _comparison(comparison: list[Document]) -> Table:
    gpus = [f"{row['gpus']} GPUs" for row in comparison[0]["rows"]]
    result = table("prompt", *gpus, "best AFD", "best wide EP", "gain of best")
    for length in comparison:
        afd, wide_ep = length["best_afd"], length["best_wide_ep"]
        result.add_row(
            f"{length['prompt_tokens']:,}",
            *(percent(row["gain"]) for row in length["rows"]),
            f"{afd['throughput']:.0f} ({afd['ratio']}:1)",
            f"{wide_ep['throughput']:.0f} ({wide_ep['gpus']} GPUs)",
            percent(length["gain_of_best"]),
        )
    return result


def _value(name: str, value: float) -> str:
    return f"{1e6 * value:.2f} µs" if name.endswith(("seconds", "overhead")) else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


# -- figures -----------------------------------------------------------------------------------------------------------


COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8c4a9e", "#a8321f", "#5f6f7f")


def figures(document: Document) -> dict[str, str]:
    svgs = {"steps": render(_draw_steps, document, 2)}
    if document["comparison"]:
        svgs["layouts"] = render(_draw_layouts, document, 1)
    return svgs


def _draw_steps(panels: list[Any], document: Document) -> None:
    """TPOT and throughput a GPU over the ratio: measured points, filled where fitted, and the predicted lines."""
    keys = [("tpot_measured_ms", "tpot_predicted_ms"), ("throughput_measured", "throughput_predicted")]
    for axes, (measured, predicted) in zip(panels, keys, strict=True):
        for index, curve in enumerate(document["curves"]):
            colour = COLOURS[index % len(COLOURS)]
            points = [p for p in document["points"] if _curve(p) == _curve(curve)]
            label = f"{curve['prompt_tokens']:,} tokens, batch {curve['batch_size']}"
            axes.plot(
                [p["ratio"] for p in points], [p[predicted] for p in points], "-", color=colour, lw=1.2, label=label
            )
            for fitted, face in ((True, colour), (False, "white")):
                subset = [p for p in points if p["fitted"] == fitted]
                axes.plot(
                    [p["ratio"] for p in subset], [p[measured] for p in subset], "o", color=colour, mfc=face, ms=4
                )
        axes.set(ylim=(0, None), xlabel="attention trays for each FFN tray, r")
    panels[0].set_ylabel("TPOT, ms")
    panels[1].set_ylabel("output tokens/s a GPU")
    panels[0].set_title("FastAFD on GB200: measured (filled: fitted), lines predicted", loc="left", fontsize=10)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")


def _draw_layouts(panels: list[Any], document: Document) -> None:
    """Predicted gain of AFD over wide EP by the number of GPUs, a line for each prompt length."""
    axes = panels[0]
    for index, length in enumerate(document["comparison"]):
        axes.plot(
            [row["gpus"] for row in length["rows"]], [100 * row["gain"] for row in length["rows"]],
            "o-", color=COLOURS[index % len(COLOURS)], alpha=0.55 if index >= len(COLOURS) else 1, ms=3, lw=1.2,
            label=f"{length['prompt_tokens']:,}",
        )  # fmt: skip
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xlabel="GPUs", ylabel="AFD over wide EP, % tokens/s a GPU")
    axes.set_title("Predicted, by prompt tokens", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False)


def _curve(row: Document) -> tuple[int, int]:
    return row["prompt_tokens"], row["batch_size"]
