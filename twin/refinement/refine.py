"""`twin calibrate refine`: a scenario's step times, corrected by a short run of the real engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.sources.refined import SCHEMA, RefinedStepTime
from latency_models.step_time import StepTime, Unknown
from scenarios.serving import ServingScenario
from twin.recording.server_pages import is_scrapes
from twin.refinement.by_logs import MeanEvidence, StepEvidence, is_step_log
from twin.refinement.by_requests import RequestEvidence
from twin.refinement.posterior import Posterior, unlearned
from twin.refinement.question import Advance, Evidence, Question
from workloads.errors import BadInput

TOO_FAR = 2.0
"""A factor between measured and predicted times that no error of a right scenario's step times explains."""

DEPLOYMENT = ("hardware", "model", "weights", "tensor_parallel", "path")
"""Fields of `step_time` that state the deployment that was measured, in most sources."""

UNSEEN_DRIFT = 0.01
"""Deviation of a refined engine from itself later, where nothing was held out."""

MIN_INFORMATION = 3.0
"""Information below which a run shows nothing: half of the prior's deviation would be left."""


@dataclass(frozen=True)
class Refinement:
    """`twin.refinement/1`, for tables; `twin.refined-step-time/1`, without `folder`; what was read or assumed."""

    document: dict[str, Any]
    file: dict[str, Any]
    notes: list[str]

    def content(self, scenario: Path, output: Path) -> dict[str, Any]:
        """The whole content of the file at `output`, which finds other files from the scenario's folder."""
        folder = relpath(scenario.parent.absolute(), output.parent.absolute())
        return {"schema": self.file["schema"], "folder": folder, **self.file}


def refine(question: Question, advance: Advance = lambda text: None) -> Refinement:
    """Learn a scenario's unknowns from a run, and predict the rest of it."""
    kind: Callable[[Question, Advance], Evidence] = RequestEvidence
    if is_step_log(question.run):
        kind = StepEvidence
    elif is_scrapes(question.run):
        kind = MeanEvidence
    evidence = kind(question, advance)
    step_time, notes = evidence.step_time, evidence.notes
    unknowns = _unknowns(step_time, question.factors)
    names = [unknown.name for unknown in unknowns]
    estimated = posterior = evidence.estimate(names)
    factor = evidence.mean_factor(_refined(step_time, names, posterior, 0.0))
    if factor is None:
        notes.append(
            "the fit is further from the means of its own requests than before: step times are left as they were"
        )
        posterior = unlearned(posterior)
    mean_factor, deviation = factor or (0.0, 0.0)
    drift = math.hypot(evidence.min_drift, deviation)
    errors = evidence.errors(_refined(step_time, names, posterior, drift, math.exp(mean_factor)))
    document = _document(question, evidence, unknowns, posterior) | evidence.fields() | errors
    document["mean_factor"] = {"factor": math.exp(mean_factor), "deviation": deviation}
    held_out = (errors["rest"] or {}).get(evidence.metric)
    later = UNSEEN_DRIFT if held_out is None else abs(math.log1p(held_out["after_error"]))
    drift = math.hypot(max(evidence.min_drift, later), deviation)
    file = _file(evidence.scenario, names, posterior, drift, document)
    doubt = _other_deployment(document, file["step_time"])
    _require_information(estimated, names, question, doubt)
    return Refinement(document, file, notes + [doubt] * bool(doubt))


def _refined(
    step_time: StepTime, names: Sequence[str], posterior: Posterior, drift: float, mean_factor: float = 1.0
) -> RefinedStepTime:
    """The step times after the run. `drift`: deviation of a factor on all of them. `mean_factor`: see `RefinedFile`."""
    return RefinedStepTime(step_time, names, posterior.estimate, posterior.covariance, drift, mean_factor)


def _other_deployment(document: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    """A note where the run is so far from the scenario that it is likely of another GPU, model or split; else empty."""
    rows = document.get("fit") or document["rest"] or {}
    name, error = next(
        ((name, rows[name]["before_error"]) for name in ("tpot.mean", "itl.mean", "step") if name in rows), ("", 0.0)
    )
    times = 1 / (1 + error)
    if 1 / TOO_FAR < times < TOO_FAR:
        return ""
    fields = [f"step_time.{field} ({section[field]})" for field in DEPLOYMENT if section.get(field) is not None]
    metric = "step time" if name == "step" else name.removesuffix(".mean").upper()
    return (
        f"measured {metric} is {times:.2g} times the predicted one: the run is likely of another GPU, model or split "
        f"than the scenario; check {', '.join(fields) or 'step_time'}"
    )


def _unknowns(step_time: StepTime, factors: Sequence[str]) -> list[Unknown]:
    unknowns = list(step_time.unknowns())
    if not unknowns:
        raise BadInput("expected a source whose error is known: it has nothing to learn", field="step_time.source")
    names = [unknown.name for unknown in unknowns]
    for name in factors:
        if name not in names:
            raise BadInput(f"expected some of {', '.join(names)}", field="--factors", value=name)
    return [unknown for unknown in unknowns if not factors or unknown.name in factors]


def _require_information(posterior: Posterior, names: Sequence[str], question: Question, doubt: str) -> None:
    """Refuse a run that shows nothing, and named factors that it does not tell apart. `doubt`: why it shows nothing."""
    if float(np.linalg.eigvalsh(posterior.information)[-1]) < MIN_INFORMATION:
        why = doubt or "it changes none of their deviations by half"
        expected = f"expected a run that shows some of the factors; {why}"
        raise BadInput(expected, field="--run", value=str(question.run))
    if not question.factors:
        return
    for i, name in enumerate(names):
        if posterior.verdict(i) != "learned":
            tied = " and ".join(names[j] for j in posterior.tied(i))
            why = f"it cannot be told from {tied}" if tied else "the run does not show it"
            remaining = f"{100 * posterior.left[i]:.0f} % of its deviation would be left"
            raise BadInput(
                f"expected factors that the run tells apart: {why} ({remaining})", field="--factors", value=name
            )


def _document(
    question: Question, evidence: Evidence, unknowns: Sequence[Unknown], posterior: Posterior
) -> dict[str, Any]:
    """The part of `twin.refinement/1` that all runs have."""
    names = [unknown.name for unknown in unknowns]
    return {
        "schema": "twin.refinement/1",
        "scenario": str(question.path),
        "run": str(question.run),
        "kind": evidence.kind,
        "unknowns": [
            {
                "name": unknown.name,
                "about": unknown.about,
                "verdict": posterior.verdict(i),
                "tied": [names[j] for j in posterior.tied(i)],
                "score": float(posterior.estimate[i]),
                "factor": None if unknown.deviation is None else unknown.factor(float(posterior.estimate[i])),
                "deviation_before": unknown.deviation,
                "left": float(posterior.left[i]),
            }
            for i, unknown in enumerate(unknowns)
        ],
        "noise": {
            evidence.noise_kinds[kind]: {"deviation": deviation, "shared": shared}
            for kind, (deviation, shared) in posterior.noise.items()
        },
    }


def _file(
    scenario: ServingScenario, names: Sequence[str], posterior: Posterior, drift: float, document: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `twin.refined-step-time/1`, without `folder`."""
    section = scenario.pools[0].step_time.model_dump(mode="json", by_alias=True, exclude_unset=True)
    evidence = {name: document[name] for name in ("scenario", "run", "kind", "fitted", "held_out", "rest")}
    return {
        "schema": SCHEMA,
        "step_time": section,
        "unknowns": list(names),
        "estimate": [float(f"{score:.6g}") for score in posterior.estimate],
        "covariance": [[float(f"{value:.9g}") for value in row] for row in posterior.covariance],
        "drift": float(f"{drift:.4g}"),
        "mean_factor": float(f"{document['mean_factor']['factor']:.5g}"),
        "evidence": evidence,
    }
