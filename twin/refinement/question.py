"""A scenario and a run that corrects it: the question, and what a run must give as its evidence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.refined import RefinedStepTime
from latency_models.step_time import StepTime
from scenarios.reading import Settings, apply
from scenarios.serving import ServingScenario, check_scenario
from schedulers.engine_config import NULL_BLOCKS
from twin.refinement.posterior import Posterior
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.curves import compare
from twin.serving.results.uncertainty import combine
from workloads.errors import BadInput

ENGINE = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "num_gpu_blocks": "num_gpu_blocks",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "enable_prefix_caching": "enable_prefix_caching",
    "async_scheduling": "async_scheduling",
    "scheduling_policy": "scheduling_policy",
    "data_parallel_size": "data_parallel_size",
}
"""Fields of `engine` by vLLM's names. vLLM's `num_gpu_blocks` counts its placeholder block."""

STEP_TIME = {
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel",
    "enable_expert_parallel": "expert_parallel",
}
"""Fields of `step_time` by vLLM's names, for sources that have them."""

SECTIONS = ("engine_kwargs", "engine_args", "engine_effective", "cache_config")
"""Objects of `meta.json` that may hold them, beside the document itself; later ones count."""


def engine_settings(meta: Mapping[str, Any], document: Mapping[str, Any], step_time_fields: set[str]) -> dict[str, Any]:
    """Settings of a scenario, by dotted field, that `meta.json` has and `document` lacks or says otherwise."""
    settings: dict[str, Any] = {}
    for section in (meta, *(meta.get(name) or {} for name in SECTIONS)):
        if not isinstance(section, Mapping):
            continue
        for name, field in ENGINE.items():
            if _plain(section.get(name)):
                settings[f"engine.{field}"] = section[name]
                if field == "num_gpu_blocks" and isinstance(section[name], int):
                    settings["engine.num_gpu_blocks"] -= NULL_BLOCKS
        for name, field in STEP_TIME.items():
            if field in step_time_fields and _plain(section.get(name)):
                settings[f"step_time.{field}"] = section[name]
        share = section.get("gpu_memory_utilization")
        if isinstance(share, int | float) and isinstance((document.get("engine") or {}).get("kv_memory"), Mapping):
            settings["engine.kv_memory.gpu_memory_utilization"] = float(share)
    if "engine.num_gpu_blocks" in settings:
        settings.pop("engine.kv_memory.gpu_memory_utilization", None)
    defaults: dict[str, Any] = {
        "engine.data_parallel_size": 1,
        "step_time.data_parallel": 1,
        "step_time.expert_parallel": False,
    }
    defaults |= {"step_time.tensor_parallel": 1, "step_time.pipeline_parallel": 1, "engine.scheduling_policy": "fcfs"}
    return {field: value for field, value in settings.items() if _stated(document, field, defaults.get(field)) != value}


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str) and value != ""


def _stated(document: Mapping[str, Any], field: str, default: Any) -> Any:
    value: Any = document
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return default if value is None else value


Floats = NDArray[np.float64]
Advance = Callable[[str], object]


def factor_names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated text; none for all factors."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


MAX_FITTED = 600
"""Durations that a fit takes at most: its time grows with their cube."""


@dataclass(frozen=True)
class Question:
    """A scenario and a run.

    Attributes:
        path: of the scenario. document: its content. settings: changed fields.
        run: file or folder of the measured run.
        first: requests or steps to fit; None: `SHARE` of them.
        factors: names of the unknowns to learn; empty: all.
        spread: requests to fit are spread over the run in place of the first ones, so that a drift of the machine is
            in both parts.
        since: seconds since 1970 before which metrics pages are left out.
    """

    path: Path
    document: dict[str, Any]
    settings: Settings
    run: Path
    first: int | None = None
    factors: tuple[str, ...] = ()
    spread: bool = False
    since: float = 0.0


class Evidence(ABC):
    """A measured run and a scenario: requests, engine steps, or means of metrics pages.

    Attributes:
        kind: requests, steps or means. noise_kinds: names of the kinds of observations.
        min_drift: lower bound of the deviation of a refined engine from itself later.
        scenario: with the settings of the run. step_time: of all its pools. notes: on what was read or assumed.
    """

    kind: ClassVar[str]
    noise_kinds: ClassVar[Sequence[str]] = ("step",)
    min_drift: ClassVar[float] = 0.005
    scenario: ServingScenario
    step_time: StepTime
    notes: list[str]

    @abstractmethod
    def estimate(self, names: Sequence[str]) -> Posterior:
        """Scores of unknowns, from the part of the run that is fitted."""

    def worsens(self, typical: RefinedStepTime) -> bool:
        """True if a fit is to be dropped, for what it says of its own evidence."""
        return False

    def mean_factor(self, typical: RefinedStepTime) -> tuple[float, float]:
        """Logarithm of the factor from typical step times, of the estimated scores, to their means; its deviation.

        Both are 0 where means are learned from.
        """
        return 0.0, 0.0

    @abstractmethod
    def errors(self, refined: RefinedStepTime) -> dict[str, Any]:
        """Errors before and after the refinement, of the part that is fitted (`fit`) and of the others (`rest`)."""

    @abstractmethod
    def drift(self, errors: Mapping[str, Any]) -> float:
        """Deviation of a refined engine from itself later, by the errors of the rest."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of the document on what was read and fitted."""


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
    stated = engine_settings(meta, changed, fields)
    new = {field: value for field, value in stated.items() if field not in question.settings}
    settings: Settings = {**question.settings, **new}
    if "engine.num_gpu_blocks" in new:
        settings |= {"engine.kv_memory": None}
    return settings, new, [f"{field}: {value}, as {source} says" for field, value in new.items()]


def one_step_time(plan: ServingPlan) -> StepTime:
    """The step times of all pools."""
    if plan.decode_engines:
        raise BadInput("expected engines that prefill and decode: a request's time is compared with one engine's steps",
                       field="system.topology", value=plan.scenario.system.topology)  # fmt: skip
    if len({pool.spec.step_time.model_dump_json() for pool in plan.pools}) > 1:
        raise BadInput("expected one step_time section for all pools", field="system.pools")
    return plan.step_time


def named_scores(names: Sequence[str], scores: Floats) -> dict[str, float]:
    return dict(zip(names, scores.tolist(), strict=True))


def prediction_errors(
    measured: Mapping[str, Any],
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    draws: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Measured metrics with predictions before and after, and with intervals by draws of the refined model.

    Args:
        before, after: summaries of realisations.
    """
    measured = dict(measured)
    earlier, refined = compare(combine(before)[0], measured), compare(combine(after)[0], measured)
    _, intervals = combine(after, draws)
    return {
        name: {
            "measured": row["measured"], "before": earlier[name]["predicted"], "after": row["predicted"],
            "before_error": earlier[name]["error"], "after_error": row["error"],
            "interval": intervals[name]["prediction"] if name in intervals else None,
        }
        for name, row in refined.items()
    }  # fmt: skip
