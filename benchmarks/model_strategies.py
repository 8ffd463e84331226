"""The fewest GPUs that meet goals by each strategy of many models, over their number and the skew of their popularity.

    python -m benchmarks.model_strategies [--models 2,4,8,16] [--zipf 0,1,2] [--out FILE] [--figure FILE]

Each strategy of examples/many-models-h100.yaml gets one more engine until the goals of the example are met by so large
a share of the requests (`--share`), or `--engines` are not enough. A fleet whose memory does not hold the models is
too small. Of strategies with as few GPUs, the one with the least mean TPOT is named first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from latency_models.io.config_io import read_yaml
from reports.svg import svg_text
from twin.serving.results.summary import summarise
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

SCHEMA = "twin.benchmark-model-strategies/1"
EXAMPLE = Path(__file__).parents[1] / "examples" / "many-models-h100.yaml"
STRATEGIES = {
    "isolated": "#7f7f7f",
    "swapping": "#8c564b",
    "sun": "#1f5fa8",
    "qsun": "#2ca089",
    "multi_lora": "#d98032",
}
"""Strategies with their colours."""


def attained(strategy: str, models: int, zipf: float, engines: int, requests: int) -> tuple[float, float]:
    """The share of requests that meet all goals, and mean TPOT in seconds; 0 for a fleet that is too small."""
    settings = {
        "system.strategy": strategy, "system.engines": engines, "workload.models": {"count": models, "zipf": zipf},
        "workload.requests": requests,
    }  # fmt: skip
    try:
        plan = prepare(read_yaml(EXAMPLE), EXAMPLE, [settings]).cases[0].plan
        summary = summarise(Simulation(plan).run(), plan.scenario.measure)
    except BadInput:  # weights or a request that do not fit
        return 0.0, float("inf")
    return summary["goodput_share"] or 0.0, summary["tpot"]["mean"]


def fewest(strategy: str, models: int, zipf: float, options: argparse.Namespace) -> dict[str, Any]:
    """The first number of engines that suffices, or None."""
    for engines in range(1, options.engines + 1):
        share, tpot = attained(strategy, models, zipf, engines, options.requests)
        if share >= options.share:
            return {"engines": engines, "share": share, "tpot": tpot}
    return {"engines": None}


def order(entry: dict[str, Any]) -> list[str]:
    """Strategies that suffice, the best first."""
    feasible = {name: answer for name, answer in entry["strategies"].items() if answer["engines"] is not None}
    return sorted(feasible, key=lambda name: (feasible[name]["engines"], feasible[name]["tpot"]))


def draw(entries: list[dict[str, Any]], models: list[int], skews: list[float]) -> str:
    """The map of the best strategies, with the fewest GPUs of each, as SVG text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.9 * len(models) + 0.8, 1.25 * len(skews) + 0.9), layout="constrained")
    axes = figure.subplots()
    for entry in entries:
        x, y = models.index(entry["models"]), skews.index(entry["zipf"])
        best = order(entry)
        colour = STRATEGIES[best[0]] if best else "white"
        axes.add_patch(_square(x, y, colour))
        lines = [f"{name} {entry['strategies'][name]['engines']}" for name in best]
        axes.text(x, y, "\n".join(lines) or "none", ha="center", va="center", fontsize=8, linespacing=1.4)
    axes.set_xlim(-0.5, len(models) - 0.5)
    axes.set_ylim(-0.5, len(skews) - 0.5)
    axes.set_xticks(range(len(models)), [str(count) for count in models])
    axes.set_yticks(range(len(skews)), [f"{count:g}" for count in skews])
    axes.set_xlabel("models")
    axes.set_ylabel("skew z of their popularity")
    axes.set_title("Fewest GPUs that meet the goals (colour: the best strategy)", loc="left", fontsize=10)
    return svg_text(figure)


def _square(x: int, y: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour, alpha=0.35, edgecolor="none")


def main(arguments: list[str] | None = None) -> int:
    """Search, print a table, and write what was requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="2,4,8,16", help="numbers of models")
    parser.add_argument("--zipf", default="0,1,2", help="skews of their popularity")
    parser.add_argument("--engines", type=int, default=8, help="the most engines that are tried")
    parser.add_argument("--requests", type=int, default=1000, help="requests of a run")
    parser.add_argument("--share", type=float, default=0.95, help="share of the requests that must meet all goals")
    parser.add_argument("--out", type=Path, help="write the results to this file, too")
    parser.add_argument("--figure", type=Path, help="write the map to this file (SVG)")
    options = parser.parse_args(arguments)
    models, skews = (
        [int(number) for number in options.models.split(",")],
        [float(number) for number in options.zipf.split(",")],
    )
    entries = []
    print("models  zipf  " + "  ".join(f"{name:>10}" for name in STRATEGIES))
    for count in models:
        for zipf in skews:
            answers = {strategy: fewest(strategy, count, zipf, options) for strategy in STRATEGIES}
            entries.append({"models": count, "zipf": zipf, "strategies": answers})
            cells = "  ".join(f"{number['engines'] or '-':>10}" for number in answers.values())
            print(f"{count:>6}  {zipf:>4g}  {cells}", flush=True)
    if options.out:
        document = {**provenance(SCHEMA), "share": options.share, "entries": entries}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.figure:
        options.figure.write_text(draw(entries, models, skews), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
