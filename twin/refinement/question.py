"""A scenario and a run that corrects it, and the parts of the answer that all kinds of runs have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.refined import SCHEMA, RefinedStepTime
from latency_models.step_time import StepTime
from latency_models.unknowns import Unknown
from scenarios.overrides import Settings, apply
from scenarios.serving import ServingScenario, check_scenario
from twin.refinement.engine_settings import engine_settings
from twin.refinement.posterior import Posterior
from twin.serving.plan import ServingPlan
from workloads.errors import BadInput

Floats = NDArray[np.float64]
Advance = Callable[[str], object]

DOCUMENT = "twin.refinement/1"

NOTHING = 3.0
"""Information below which a run has not said anything: half of the prior's deviation would be left."""


@dataclass(frozen=True)
class Refinement:
    """The result of a refinement.

    Attributes:
        document: `twin.refinement/1`, for tables. file: `twin.refined-step-time/1`, without `folder`.
        notes: on what was read or assumed.
    """

    document: dict[str, Any]
    file: dict[str, Any]
    notes: list[str]


@dataclass(frozen=True)
class Question:
    """A scenario and a run.

    Attributes:
        path: of the scenario. document: its content. settings: changed fields.
        run: file or folder of the measured run.
        first: requests or steps to fit; None: `SHARE` of them.
        factors: names of the unknowns to learn; empty: all.
    """

    path: Path
    document: dict[str, Any]
    settings: Settings
    run: Path
    first: int | None = None
    factors: tuple[str, ...] = ()


def read_settings(question: Question, meta: Mapping[str, Any], source: str) -> tuple[Settings, Settings, list[str]]:
    """The engine's own settings in place of the scenario's, unless the question states others.

    Args:
        meta: as of `engine_settings`. source: where they stand, for notes.

    Returns:
        All changed fields of the scenario; those that were read; a note on each of them.
    """
    changed = apply(question.document, question.settings)
    scenario = check_scenario(question.document, question.settings, question.path)
    fields = set(type(scenario.step_time).model_fields)
    read = {
        field: value
        for field, value in engine_settings(meta, changed, fields).items()
        if field not in question.settings
    }
    settings: Settings = {**question.settings, **read}
    if "engine.num_gpu_blocks" in read:
        settings |= {"engine.kv_memory": None}
    return settings, read, [f"{field}: {value}, as {source} says" for field, value in read.items()]


def one_step_time(plan: ServingPlan) -> StepTime:
    """The step times of all pools.

    Raises:
        BadInput: pools with different ones, or engines that hand requests to others.
    """
    if plan.decode_engines:
        raise BadInput("expected engines that prefill and decode: a request's time is compared with one engine's steps",
                       field="system.topology", value=plan.scenario.system.topology)  # fmt: skip
    if len({pool.spec.step_time.model_dump_json() for pool in plan.pools}) > 1:
        raise BadInput("expected one step_time section for all pools", field="system.pools")
    return plan.step_time


def chosen_unknowns(step_time: StepTime, factors: Sequence[str]) -> list[Unknown]:
    """The unknowns of these names, or all.

    Raises:
        BadInput: a model without unknowns, or a name that is none of them.
    """
    unknowns = list(step_time.unknowns())
    if not unknowns:
        raise BadInput("expected a source whose error is known: it has nothing to learn", field="step_time.source")
    known = [unknown.name for unknown in unknowns]
    for name in factors:
        if name not in known:
            raise BadInput(f"expected some of {', '.join(known)}", field="--factors", value=name)
    return [unknown for unknown in unknowns if not factors or unknown.name in factors]


def require_information(found: Posterior, names: Sequence[str], question: Question, doubt: str = "") -> None:
    """Refuse a run that shows nothing, and chosen factors that it does not tell apart.

    `doubt`: why it may show nothing; such as steps that take less time than the scenario's GPU needs at its peaks.
    """
    if float(np.linalg.eigvalsh(found.information)[-1]) < NOTHING:
        why = doubt or "it changes none of their deviations by half"
        expected = f"expected a run that shows some of the factors; {why}"
        raise BadInput(expected, field="--run", value=str(question.run))
    if not question.factors:
        return
    for i, name in enumerate(names):
        if found.verdict(i) != "learned":
            others = " and ".join(names[j] for j in found.tied(i))
            why = f"it cannot be told from {others}" if others else "the run does not show it"
            left = f"{100 * found.left[i]:.0f} % of its deviation would be left"
            raise BadInput(f"expected factors that the run tells apart: {why} ({left})", field="--factors", value=name)


def refined_model(step_time: StepTime, names: Sequence[str], found: Posterior, drift: float) -> RefinedStepTime:
    """The step times after the run. `drift`: deviation of a factor on all of them."""
    return RefinedStepTime(step_time, names, found.estimate, found.covariance, drift)


def refinement_document(question: Question, kind: str, unknowns: Sequence[Unknown], found: Posterior) -> dict[str, Any]:
    """The part of `twin.refinement/1` that all runs have. `kind`: requests, steps or means."""
    names = [unknown.name for unknown in unknowns]
    return {
        "schema": DOCUMENT,
        "scenario": str(question.path),
        "run": str(question.run),
        "kind": kind,
        "unknowns": [
            {
                "name": unknown.name,
                "about": unknown.about,
                "verdict": found.verdict(i),
                "tied": [names[j] for j in found.tied(i)],
                "score": float(found.estimate[i]),
                "factor": None if unknown.deviation is None else unknown.factor(float(found.estimate[i])),
                "deviation_before": unknown.deviation,
                "left": float(found.left[i]),
            }
            for i, unknown in enumerate(unknowns)
        ],
        "noise": {
            ("ttft", "decoding")[kind_of] if kind == "requests" else "step": {"deviation": deviation, "shared": shared}
            for kind_of, (deviation, shared) in found.noise.items()
        },
    }


def refined_file(
    scenario: ServingScenario, names: Sequence[str], found: Posterior, drift: float, document: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `twin.refined-step-time/1`, without `folder`."""
    section = scenario.pools[0].step_time.model_dump(mode="json", by_alias=True, exclude_unset=True)
    evidence = {name: document[name] for name in ("scenario", "run", "kind", "fitted", "held_out", "rest")}
    return {
        "schema": SCHEMA,
        "step_time": section,
        "unknowns": list(names),
        "estimate": [float(f"{each:.6g}") for each in found.estimate],
        "covariance": [[float(f"{each:.9g}") for each in row] for row in found.covariance],
        "drift": float(f"{drift:.4g}"),
        "evidence": evidence,
    }


def named_scores(names: Sequence[str], scores: Floats) -> dict[str, float]:
    """Scores by the names of their unknowns."""
    return dict(zip(names, scores.tolist(), strict=True))
