"""`twin calibrate refine` by means: a server's metrics pages, which say nothing of single requests.

Means tell one number about step times: the mean time between two tokens, which holds all steps that decode. Mean time
to first token is a queue, whose length follows from the load; it is compared and not learned from. The scenario must
describe the requests, since pages do not: only their mean lengths are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.serving import check_scenario
from twin.recording.scrapes import Means, between, mean_gauges, read_scrapes
from twin.recording.upstream import cache_settings
from twin.refinement.posterior import Posterior
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
from twin.refinement.request_times import StepDerivatives
from twin.serving.plan import ServingPlan, make_plan
from twin.serving.reference_run import compare
from twin.serving.simulation import Run, Simulation
from twin.serving.summary import summarise
from twin.serving.uncertainty import combine, flatten
from workloads.errors import BadInput

Floats = NDArray[np.float64]

REALISATIONS, DRAWS = 4, 12
"""Realisations of the scenario's workload, whose scatter is the error of sampling; draws of the refined model."""

SERVER = 0.01
"""Deviation of a mean between tokens that neither steps nor sampling explain: streams, and the machine's drift."""

LENGTHS = 0.1
"""Relative difference in mean lengths above which a scenario does not describe the requests."""

UNLIKELY = 3.0
"""Scores beyond which an unknown is a doubtful explanation."""

SEARCH, CLOSE = 4, 0.03
"""Steps of the search at most; fewer scores end it."""

LATENCIES = ("ttft", "itl", "tpot", "e2e")


def refine_by_means(question: Question, advance: Advance) -> Refinement:
    """Learn what the mean time between tokens says, and predict the second half of three or more pages.

    Raises:
        BadInput: pages or a scenario that cannot be used; requests of other lengths than the scenario's; several
            factors; a mean that says nothing of the chosen one.
    """
    if question.first is not None:
        raise BadInput("expected none: a metrics page has no first requests", field="--first", value=question.first)
    if len(question.factors) > 1:
        expected = "expected one: means tell one factor, and not which of several it belongs to"
        raise BadInput(expected, field="--factors", value=",".join(question.factors))
    scrapes = read_scrapes(question.run)
    middle = len(scrapes) // 2 if len(scrapes) > 2 else len(scrapes) - 1
    early = between(scrapes[0], scrapes[middle])
    late = between(scrapes[middle], scrapes[-1]) if middle < len(scrapes) - 1 else None
    metric = next((name for name in ("itl.mean", "tpot.mean") if name in early.means), None)
    if metric is None:
        expected = "expected vllm:inter_token_latency_seconds or vllm:request_time_per_output_token_seconds"
        raise BadInput(expected, file=scrapes[0].source)
    settings, read, notes = read_settings(
        question, {"cache_config": cache_settings(scrapes[-1].text)}, "the metrics page"
    )
    scenario = check_scenario(question.document, settings, question.path)
    plan = make_plan(scenario, question.path.parent, scenario.workload.read_trace(question.path.parent))
    step_time = one_step_time(plan)
    unknowns = chosen_unknowns(step_time, question.factors)
    names = [unknown.name for unknown in unknowns]
    advance("simulating")
    before = [_simulate(plan, i) for i in range(REALISATIONS)]
    _require_lengths(before, early)
    summaries = [_summary(run, plan) for run in before]
    logs = np.log([_of(summary, metric) for summary in summaries])
    found = _estimate(plan, names, metric, math.log(early.means[metric]), logs, plan.requests / early.finished, advance)
    require_information(found, names, question)
    refined = refined_model(step_time, names, found, SERVER)
    after_plan = plan.with_step_time(refined)
    after = [_summary(_simulate(after_plan, i), plan) for i in range(REALISATIONS)]
    draws = []
    for i in range(DRAWS):
        advance("drawing")
        model = refined.draw(np.random.default_rng([scenario.seed, i, 2]))
        draws.append(_summary(_simulate(plan.with_step_time(model), 0), plan))
    results = {
        name: None if part is None else _errors(part, summaries, after, draws)
        for name, part in (("fit", early), ("rest", late))
    }
    notes.append(_load_note(early, summaries))
    for unknown, score in zip(unknowns, found.estimate.tolist(), strict=True):
        if abs(score) > UNLIKELY:
            notes.append(f"{unknown.name} moved by {score:+.1f} of its deviations: something else may be wrong")
    drift = SERVER if results["rest"] is None else max(SERVER, abs(math.log1p(results["rest"][metric]["after_error"])))
    document = refinement_document(question, "means", unknowns, found) | {
        "fitted": early.finished, "held_out": late.finished if late else 0, "settings": read, "learned_from": metric,
        "pages": len(scrapes), "gauges": mean_gauges(scrapes), **results,
        "buckets": _buckets(late or early, summaries, after),
    }  # fmt: skip
    return Refinement(document, refined_file(scenario, names, found, drift, document), [each for each in notes if each])


def _estimate(
    plan: ServingPlan,
    names: Sequence[str],
    metric: str,
    measured: float,
    logs: Floats,
    share: float,
    advance: Advance,
) -> Posterior:
    """The posterior of one number: scores s with y = f(s) + ε, by Gauss and Newton's method.

    Args:
        measured: y, the logarithm of the mean. logs: those of realisations at the estimates.
        share: a realisation's requests over the server's, whose own sampling is smaller the more there were.
    """
    sampling = float(logs.std(ddof=1))
    noise = math.sqrt(sampling**2 * (1 / len(logs) + share) + SERVER**2)
    aside = float(logs.mean() - logs[0])  # the first realisation is simulated at other scores, for all
    scores, gradient = np.zeros(len(names)), np.zeros(len(names))
    for _ in range(SEARCH):
        advance("simulating")
        there, gradient = _linearised(plan, names, scores, metric)
        residual = measured - (there + aside) + float(gradient @ scores)
        aim = gradient * residual / (noise**2 + float(gradient @ gradient))
        moved, scores = float(np.abs(aim - scores).max()), aim
        if moved < CLOSE:
            break
    information = np.outer(gradient, gradient) / noise**2
    covariance = np.linalg.inv(information + np.eye(len(names)))
    return Posterior(scores, (covariance + covariance.T) / 2, information, {}, SEARCH)


def _linearised(plan: ServingPlan, names: Sequence[str], scores: Floats, metric: str) -> tuple[float, Floats]:
    """The logarithm of the mean at scores, and its derivatives: those of all time in which requests decode."""
    named = named_scores(names, scores)
    steps = StepDerivatives(plan, names, named)
    pools = [pool.at(named) for pool in plan.pools]
    slow = plan.scenario.model_copy(update={"detail": "requests", "fast_forward": False})
    run = Simulation(replace(plan, scenario=slow, pools=pools), watch=steps.watch).run()
    table: dict[str, Any] = run.columns.table()
    first, last, engines = (np.asarray(table[name]) for name in ("first_token", "last_token", "replica"))
    total = np.zeros(len(names))
    for engine in np.unique(engines).tolist():
        own = engines == engine
        total += steps.between(engine, first[own], last[own]).sum(axis=0)
    return math.log(_of(_summary(run, plan), metric)), total / max(float((last - first).sum()), 1e-9)


def _simulate(plan: ServingPlan, realisation: int) -> Run:
    scenario = plan.scenario.model_copy(update={"detail": "requests"})
    return Simulation(replace(plan, scenario=scenario), realisation).run()


def _summary(run: Run, plan: ServingPlan) -> dict[str, Any]:
    """Metrics that a page has, too. A server counts from the arrival of a request."""
    summary = summarise(run, plan.scenario.measure)
    return {name: summary[name] for name in (*LATENCIES, "output_throughput", "request_throughput")}


def _of(summary: Mapping[str, Any], metric: str) -> float:
    value = flatten(dict(summary)).get(metric)
    if not value:
        raise BadInput("expected answers of more than one token", field="workload.decode")
    return value


def _require_lengths(runs: Sequence[Run], means: Means) -> None:
    """Refuse a scenario whose requests are longer or shorter than the server's."""
    tables: list[dict[str, Any]] = [run.columns.table() for run in runs]
    for name, field in (("prompt_tokens", "prefill"), ("output_tokens", "decode")):
        mine = float(np.mean([np.mean(table[name]) for table in tables]))
        theirs = means.means.get(name)
        if theirs and abs(mine / theirs - 1) > LENGTHS:
            expected = f"expected the server's requests, of {theirs:.4g} {name.replace('_', ' ')} on average"
            raise BadInput(expected, field=f"workload.{field}", value=f"{mine:.4g}")


def _load_note(means: Means, summaries: Sequence[Mapping[str, Any]]) -> str:
    """A note where the simulated load differs, on which queues and batches depend."""
    mine, theirs = float(np.mean([each["request_throughput"] for each in summaries])), means.means["request_throughput"]
    if abs(mine / theirs - 1) <= LENGTHS:
        return ""
    return f"the scenario answers {mine:.3g} requests a second, the server answered {theirs:.3g}: batches differ"


def _errors(
    means: Means, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], draws: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    measured: dict[str, Any] = dict(means.means)
    was, now = (combine(each)[0] for each in (before, after))
    _, intervals = combine(after, draws)
    earlier, later = compare(was, measured), compare(now, measured)
    return {
        name: {
            "measured": row["measured"], "before": earlier[name]["predicted"], "after": row["predicted"],
            "before_error": earlier[name]["error"], "after_error": row["error"],
            "interval": intervals[name]["prediction"] if name in intervals else None,
        }
        for name, row in later.items()
    }  # fmt: skip


def _buckets(
    means: Means, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Quantiles that a page knows up to a bucket, beside predicted ones."""
    was, now = (flatten(combine(each)[0]) for each in (before, after))
    return {
        name: {"low": low, "high": high if math.isfinite(high) else None, "before": was[name], "after": now[name]}
        for name, (low, high) in means.bounds.items()
        if now.get(name) is not None
    }
