"""Metrics of a live run and of its prediction, repeat by repeat, and how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.engine_steps import EngineSteps
from reports.metrics import spread
from reports.statistics import student_quantile
from twin.serving.pace import Pace
from twin.serving.series import quantiles
from twin.validation.takes import TimedBatch

Floats = NDArray[np.float64]

GOALS = {
    "tpot.mean": 0.03,
    "e2e.mean": 0.03,
    "output_throughput": 0.03,
    "ttft.mean": 0.05,
    "ttft.p99": 0.10,
    "tpot.p99": 0.10,
}
"""|predicted / measured − 1| at most, over the repeats of a load together; `--tolerance` scales them."""

STEP_GOAL = 0.05
"""Of steps: the median of |predicted / measured − 1| at most."""

CONFIDENCE = 0.95
WORST = 10


@dataclass(frozen=True)
class StepTimes:
    """Steps of a live run: what ran, how long it took and was predicted to take; seconds."""

    kinds: list[str]
    measured: Floats
    predicted: Floats
    batches: list[str]

    @classmethod
    def of(cls, steps: Sequence[TimedBatch], model: EngineSteps, pace: Pace) -> StepTimes:
        """Of steps that ran, each predicted by itself, at the pace that there was in its middle."""
        usual = model.predict([each.step for each in steps])
        factors = [pace.of_rows(each.step.rows).over(each.begin, t) for each, t in zip(steps, usual, strict=True)]
        return cls(
            [each.kind for each in steps],
            np.array([each.step.seconds for each in steps]),
            usual * np.array(factors),
            [each.batch for each in steps],
        )

    @property
    def slowness(self) -> float:
        """Measured over predicted, of all steps together."""
        return float(self.measured.sum() / self.predicted.sum())


def metrics(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """TTFT, TPOT, E2E of each request and all inter-token latencies, seconds, as `twin simulate` defines them."""
    first, last, tokens = columns["first_token"], columns["last_token"], columns["output_tokens"]
    several = tokens > 1
    return {
        "ttft": first - columns["arrival"],
        "tpot": (last - first)[several] / (tokens[several] - 1),
        "itl": columns["gaps"],
        "e2e": last - columns["arrival"],
    }


def summary(columns: Mapping[str, Floats]) -> dict[str, Any]:
    """The summary of a live run, in the words of `twin.simulation/1`."""
    seconds = float(columns["last_token"].max() - columns["arrival"].min())
    told: dict[str, Any] = {name: spread(values) for name, values in metrics(columns).items()}
    told["output_throughput"] = float(columns["output_tokens"].sum()) / seconds
    told["request_throughput"] = len(columns["arrival"]) / seconds
    return told


def compare_load(
    measured: Sequence[Mapping[str, Any]],
    predicted: Sequence[Mapping[str, Any]],
    otherwise: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Each metric over the repeats: means, what repeats differ by, and the error with its confidence interval.

    Measured and predicted of one repeat had the same requests, so the error is taken repeat by repeat: its mean is the
    error reported, its scatter gives the interval, and `repeat_spread` is the live run's own. `otherwise`: other
    predictions of the same, by what their error is called.
    """
    found = {}
    for name in _names(measured[0]):
        live = np.array([_pick(each, name) for each in measured])
        twin = np.array([_pick(each, name) for each in predicted])
        errors = twin / live - 1
        n = len(errors)
        half = student_quantile(CONFIDENCE, n - 1) * float(errors.std(ddof=1)) / math.sqrt(n)
        error = float(errors.mean())
        found[name] = {
            "measured": float(live.mean()),
            "predicted": float(twin.mean()),
            "error": error,
            "interval": [error - half, error + half],
            "repeat_spread": float(live.std(ddof=1) / live.mean()),
            "goal": GOALS.get(name),
        } | {
            called: float((np.array([_pick(each, name) for each in other]) / live - 1).mean())
            for called, other in otherwise.items()
        }
    return found


def compare_steps(steps: Sequence[StepTimes]) -> dict[str, Any]:
    """Step-time errors by kind of batch over all repeats, and the steps that were mispredicted most."""
    kinds = np.array([kind for each in steps for kind in each.kinds])
    measured = np.concatenate([each.measured for each in steps])
    predicted = np.concatenate([each.predicted for each in steps])
    batches = [text for each in steps for text in each.batches]
    errors = predicted / measured - 1
    by_kind = {kind: _errors(errors[kinds == kind], measured[kinds == kind]) for kind in np.unique(kinds).tolist()}
    order = np.argsort(-np.abs(predicted - measured))[:WORST].tolist()
    return {
        "all": _errors(errors, measured),
        "by_kind": by_kind,
        "total_error": float(predicted.sum() / measured.sum() - 1),
        "worst": [
            {
                "kind": str(kinds[i]), "batch": batches[i],
                "measured": float(measured[i]), "predicted": float(predicted[i]),
            }
            for i in order
        ],
    }  # fmt: skip


def _errors(errors: Floats, measured: Floats) -> dict[str, Any]:
    size = np.abs(errors)
    return {
        "steps": len(errors),
        "seconds": float(measured.sum()),
        "median": float(np.median(size)),
        "p90": float(np.quantile(size, 0.9)),
        "bias": float(np.median(errors)),
    }


def curves(columns: Sequence[Mapping[str, Floats]]) -> dict[str, Any]:
    """Quantiles of every metric over all repeats, for overlaid distributions."""
    each = [metrics(one) for one in columns]
    return {name: quantiles(np.concatenate([one[name] for one in each])) for name in each[0]}


def missed(loads: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """What is further off than its goal times `tolerance`, a line each."""
    lines = []
    for load in loads:
        for name, entry in load["metrics"].items():
            if entry["goal"] is not None and abs(entry["error"]) > entry["goal"] * tolerance:
                lines.append(
                    f"load {load['load']:g}: {name} is off by {100 * entry['error']:+.1f} %,"
                    f" goal {100 * entry['goal'] * tolerance:g} %"
                )
        median = load["steps"]["all"]["median"]
        if median > STEP_GOAL * tolerance:
            lines.append(
                f"load {load['load']:g}: steps are off by {100 * median:.1f} % in the median,"
                f" goal {100 * STEP_GOAL * tolerance:g} %"
            )
    return lines


def _names(summary: Mapping[str, Any]) -> list[str]:
    nested = [f"{key}.{inner}" for key in ("ttft", "tpot", "itl", "e2e") if summary[key] for inner in summary[key]]
    return [*nested, "output_throughput", "request_throughput"]


def _pick(summary: Mapping[str, Any], name: str) -> float:
    value: Any = summary
    for key in name.split("."):
        value = value[key]
    return float(value)
