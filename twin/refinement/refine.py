"""`twin calibrate refine`: a scenario's step times, corrected by a short run of the real engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latency_models.origin import same_model
from latency_models.sources.refined import RefinedStepTime
from scenarios.overrides import Settings
from scenarios.serving import ServingScenario, check_scenario
from scenarios.serving_workload import ReplaySpec
from twin.recording.scrapes import is_scrapes
from twin.refinement import request_times, step_times
from twin.refinement.by_means import refine_by_means
from twin.refinement.measured_run import MeasuredRun, read_measured_run
from twin.refinement.posterior import estimate, unlearned
from twin.refinement.question import (
    Advance,
    Question,
    Refinement,
    chosen_unknowns,
    named_scores,
    one_step_time,
    read_settings,
    refined_file,
    refined_model,
    refinement_document,
    require_information,
)
from twin.refinement.request_times import RequestTimes, StepDerivatives, simulate_requests
from twin.serving.plan import ServingPlan, make_plan
from twin.serving.reference_run import compare
from twin.serving.uncertainty import combine
from workloads.errors import BadInput
from workloads.trace import Trace

Floats = NDArray[np.float64]

SHARE = 0.2
"""The first requests of a run that are fitted, unless stated; a tenth of a log of steps."""
SHARE_OF_STEPS = 0.1

WARM_UP = 10
"""First requests of a run that are not compared, at most a quarter of the fitted ones: an engine's first steps are
slower."""

DRAWS = 12
"""Draws of the refined model for its intervals of the held-out requests."""

FAR = 2.0
"""A factor between measured and predicted times that no error of a right scenario's step times explains."""

DEPLOYMENT = ("hardware", "model", "weights", "tensor_parallel", "path")
"""Fields of `step_time` that say what was measured, in most sources."""

DRIFT = 0.005
"""Least deviation of a refined engine from itself an hour later."""

MOST_FITTED = 600
"""Durations that a fit takes at most: its time grows with their cube."""


def refine(question: Question, advance: Advance = lambda text: None) -> Refinement:
    """Learn a scenario's unknowns from a run, and predict the rest of it.

    Raises:
        BadInput: files that cannot be used, a model without unknowns, factors that the run cannot tell apart, or a run
            that shows none of them.
    """
    if _is_step_log(question.run):
        found = _refine_by_steps(question, advance)
    elif is_scrapes(question.run):
        found = refine_by_means(question, advance)
    else:
        found = _refine_by_requests(question, advance)
    doubt = _other_deployment(found.document, found.file["step_time"])
    return replace(found, notes=[*found.notes, doubt]) if doubt else found


def _other_deployment(document: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    """A note where the run is so far from the scenario that it is likely of another GPU, model or split; else empty."""
    rows = document.get("fit") or document["rest"] or {}
    name, error = next(
        ((name, rows[name]["before_error"]) for name in ("tpot.mean", "itl.mean", "step") if name in rows), ("", 0.0)
    )
    times = 1 / (1 + error)
    if 1 / FAR < times < FAR:
        return ""
    fields = [f"step_time.{each} ({section[each]})" for each in DEPLOYMENT if section.get(each) is not None]
    what = "step time" if name == "step" else name.removesuffix(".mean").upper()
    return (
        f"measured {what} is {times:.2g} times the predicted one: the run is likely of another GPU, model or split "
        f"than the scenario; check {', '.join(fields) or 'step_time'}"
    )


def _is_step_log(run: Path) -> bool:
    return run.is_file() and ".csv" in run.suffixes


def _refine_by_requests(question: Question, advance: Advance) -> Refinement:
    run = read_measured_run(question.run)
    plan, read, notes = _plan(question, run)
    step_time = one_step_time(plan)
    fitted = question.first if question.first is not None else max(round(SHARE * len(run)), min(10, len(run)))
    if not 2 <= fitted <= len(run):
        raise BadInput(
            f"expected a number from 2 to {len(run)}, the requests of the run", field="--first", value=fitted
        )
    unknowns = chosen_unknowns(step_time, question.factors)
    names = [unknown.name for unknown in unknowns]
    simulated = request_times.requests_before(run, fitted)
    warm_up = min(WARM_UP, fitted // 4)
    compared = request_times.compared(run, fitted, warm_up)
    observed = request_times.observe(run, fitted).where(compared)
    notes.append(f"the first {warm_up} requests are left out as the engine's warm-up")
    if len(observed.measured) > MOST_FITTED:
        expected = f"expected fewer requests to fit: {len(observed.measured)} durations, at most {MOST_FITTED}"
        raise BadInput(expected, field="--first", value=fitted)

    def linearise(scores: Floats) -> tuple[Floats, Floats]:
        advance("simulating")
        steps = StepDerivatives(plan, names, named_scores(names, scores))
        there = simulate_requests(plan, named_scores(names, scores), simulated, steps.watch)
        jacobian = request_times.derivatives(there, steps, run, fitted)
        return request_times.predicted(there, run, fitted)[compared], jacobian[compared]

    learned = found = estimate(observed, linearise, len(names))
    parts = slice(warm_up, fitted), slice(fitted, None)
    results = _request_errors(plan, refined_model(step_time, names, found, DRIFT), run, parts, advance)
    if _off(results["fit"], "after") > _off(results["fit"], "before"):
        notes.append(
            "the fit is further from the means of its own requests than before: step times are left as they were"
        )
        found = unlearned(found)
        results = _request_errors(plan, refined_model(step_time, names, found, DRIFT), run, parts, advance)
    rest = results["rest"] or {}
    drift = max(DRIFT, abs(math.log1p(rest["tpot.mean"]["after_error"])) if "tpot.mean" in rest else 0.01)
    document = refinement_document(question, "requests", unknowns, found) | {
        "fitted": fitted, "warm_up": warm_up, "held_out": len(run) - fitted, "settings": read, **results,
    }  # fmt: skip
    file = refined_file(plan.scenario, names, found, drift, document)
    require_information(learned, names, question, _other_deployment(document, file["step_time"]))
    return Refinement(document, file, notes)


def _refine_by_steps(question: Question, advance: Advance) -> Refinement:
    from latency_models.sources.vllm_step_log.step_log import read_step_log

    scenario = check_scenario(question.document, question.settings, question.path)
    plan = make_plan(scenario, question.path.parent, scenario.workload.read_trace(question.path.parent))
    step_time = one_step_time(plan)
    log = read_step_log(question.run).executed()
    known = step_time.measured_deployment()
    name = "" if known is None else known.model.name if known.model is not None else known.origin.model
    if not same_model(name, log.origin.model):
        expected = f"expected a log of {name}, as the scenario's step_time is for"
        raise BadInput(expected, field="model", value=log.origin.model, file=question.run)
    early = _early(log.run, question.first)
    fitted = int(early.sum())
    if not 2 <= fitted <= MOST_FITTED:
        expected = f"expected fewer or more steps to fit than {fitted} of {len(log)}: from 2 to {MOST_FITTED}"
        raise BadInput(expected, field="--first", value=question.first)
    ran, rest = step_times.batches(log.where(early)), step_times.batches(log.where(~early))
    unknowns = chosen_unknowns(step_time, question.factors)
    names = [unknown.name for unknown in unknowns]

    def linearise(scores: Floats) -> tuple[Floats, Floats]:
        advance("comparing")
        named = named_scores(names, scores)
        there = step_times.predicted(step_time.vary(named), ran)
        return there, step_times.derivatives(step_time, ran, names, named)

    found = estimate(step_times.observe(log.where(early)), linearise, len(names))
    require_information(found, names, question)
    refined = refined_model(step_time, names, found, DRIFT)
    results: dict[str, Any] = {"rest": None}
    drift = 0.01
    if rest:
        measured = np.log(log.seconds[~early])
        before, after = (step_times.predicted(model, rest) - measured for model in (step_time, refined))
        drift = max(DRIFT, abs(float(np.median(after))))
        results["rest"] = {"step": {
            "measured": float(np.exp(np.median(measured))),
            "before_error": float(np.expm1(np.median(before))), "after_error": float(np.expm1(np.median(after))),
            "before_median": float(np.median(np.abs(np.expm1(before)))),
            "after_median": float(np.median(np.abs(np.expm1(after)))),
        }}  # fmt: skip
    document = refinement_document(question, "steps", unknowns, found) | {
        "fitted": fitted, "held_out": len(log) - fitted, "settings": {}, **results,
    }  # fmt: skip
    return Refinement(document, refined_file(scenario, names, found, drift, document), [])


def _early(runs: NDArray[np.str_], first: int | None) -> NDArray[np.bool_]:
    """Mask of the first steps of each run: `first` of them, or `SHARE_OF_STEPS`."""
    early = np.zeros(len(runs), dtype=np.bool_)
    for run in np.unique(runs):
        rows = np.flatnonzero(runs == run)
        early[rows[: first if first is not None else max(round(SHARE_OF_STEPS * len(rows)), 1)]] = True
    return early


def _plan(question: Question, run: MeasuredRun) -> tuple[ServingPlan, Settings, list[str]]:
    """The plan of the run: the scenario with the engine's own settings, and the run's requests."""
    settings, read, notes = read_settings(question, run.meta or {}, "the run's meta.json")
    scenario = check_scenario(question.document, question.settings, question.path)
    if not run.meta:
        notes.append("no meta.json beside the run: the engine's settings are those of the scenario")
    trace = _own_trace(scenario, question.path.parent, run)
    document = question.document
    if trace is None:
        notes.append("the workload is the run's own requests, without prefix ids")
        settings = {key: value for key, value in settings.items() if not key.startswith("workload.")}
        document = {**document, "workload": {"trace": {"path": str(run.source)}, "arrivals": {"process": "replay"}}}
        trace = run.trace
    if run.by_client and scenario.measure.start == "queued":
        settings["measure.start"] = "submitted"
    plan = make_plan(check_scenario(document, settings, question.path), question.path.parent, trace)
    return plan, read, notes


def _own_trace(scenario: ServingScenario, base: Path, run: MeasuredRun) -> Trace | None:
    """The scenario's trace if it has the run's requests, in this order; it may have prefix ids besides."""
    spec = scenario.workload
    if spec.trace is None or spec.sessions is not None or not isinstance(spec.arrivals, ReplaySpec):
        return None
    trace = spec.read_trace(base)
    if trace is None or trace.arrivals is None or len(trace) != len(run):
        return None
    same = np.array_equal(trace.prefill_tokens, run.prompts) and np.array_equal(trace.decode_tokens, run.answers)
    return trace if same else None


def _request_errors(
    plan: ServingPlan, refined: RefinedStepTime, run: MeasuredRun, slices: tuple[slice, slice], advance: Advance
) -> dict[str, Any]:
    """Mean latencies of the compared requests and of the rest, before and after, with 95 % intervals after."""
    after_plan = plan.with_step_time(refined)
    before, after = (simulate_requests(each, {}, len(run)) for each in (plan, after_plan))
    draws = []
    for i in range(DRAWS):
        advance("drawing")
        model = refined.draw(np.random.default_rng([plan.scenario.seed, i, 2]))
        draws.append(simulate_requests(plan.with_step_time(model), {}, len(run)))
    fit, rest = slices
    parts: dict[str, Any] = {"fit": fit, "rest": rest if rest.start < len(run) else None}
    return {name: None if part is None else _errors(run, part, before, after, draws) for name, part in parts.items()}


def _off(errors: dict[str, Any], when: str) -> float:
    """The mean distance of predicted from measured means of TTFT and TPOT, as logarithms."""
    known = [errors[name] for name in ("ttft.mean", "tpot.mean") if name in errors]
    return sum(abs(math.log1p(row[f"{when}_error"])) for row in known) / len(known)


def _errors(
    run: MeasuredRun, part: slice, before: RequestTimes, after: RequestTimes, draws: Sequence[RequestTimes]
) -> dict[str, Any]:
    answers = run.answers[part]

    def means(times: RequestTimes | MeasuredRun) -> dict[str, Any]:
        return request_times.summary(times.start[part], times.first[part], times.last[part], answers)

    measured = means(run)
    was, now = compare(means(before), measured), compare(means(after), measured)
    _, intervals = combine([means(after)], [means(each) for each in draws])
    return {
        name: {
            "measured": row["measured"], "before": was[name]["predicted"], "after": row["predicted"],
            "before_error": was[name]["error"], "after_error": row["error"],
            "interval": intervals[name]["prediction"] if name in intervals else None,
        }
        for name, row in now.items()
    }  # fmt: skip
