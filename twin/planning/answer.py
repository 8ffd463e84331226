"""The document of a plan: the recommendation, the table, what would change it, and the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ExpertFFN, LatentAttention
from scenarios.goals import Goal
from twin.planning.judging import Horizon, Verdict, in_unit
from twin.planning.load import Load
from twin.planning.prospects import Prospect, Refused
from twin.planning.question import Document, Question
from twin.planning.search import Search
from twin.planning.space import Candidate
from twin.serving.uncertainty import combine

SCHEMA = "twin.plan/1"
NOTE = "Simulated (discrete events, no hardware)."
HOURS = 100
"""Spans that a reliability is stated for."""


def row(question: Question, verdict: Verdict, role: str = "recommended") -> Document:
    """One deployment: what it costs, what it does, and how its goals stand; `role`: the reason why it is shown."""
    candidate, goals = verdict.candidate, question.goals
    summary = verdict.summary
    output = summary.get("output_throughput")
    tpot = (summary.get("tpot") or {}).get("mean")
    return {
        **identity(candidate),
        "role": role,
        "devices": candidate.devices,
        "cost_per_million_output_tokens": _per_million(candidate.cost, output),
        "output_throughput": output,
        "tokens_per_second_per_gpu": None if output is None else output / candidate.gpus,
        "tokens_per_second_per_user": None if not tpot else 1 / tpot,
        "goals": [_goal(goal, i, verdict) for i, goal in enumerate(goals)],
        "probability": verdict.probability,
        "sure": verdict.sure,
        "meets": verdict.meets,
        "saturated": verdict.saturated,
        "reason": verdict.reason,
        "windows": len(verdict.windows),
        "requests_a_window": verdict.windows[0]["requests"] if verdict.windows else None,
        "draws": verdict.draws,
        "seed": question.seed if verdict.seed is None else verdict.seed,
        "summary": summary,
        "intervals": verdict.intervals,
    }


def identity(candidate: Candidate) -> Document:
    """The fields that tell a candidate from others."""
    family = candidate.family
    return {
        "name": candidate.name,
        "layout": family.layout,
        "parallelism": family.parallelism,
        "settings": dict(family.settings),
        "routing": family.routing,
        "sizes": list(candidate.sizes),
        "gpus": candidate.gpus,
        "cost_per_hour": candidate.cost,
    }


def _goal(goal: Goal, index: int, verdict: Verdict) -> Document:
    value = verdict.value(index)
    interval = None
    if value is not None and len(verdict.windows) > 1:
        _, intervals = combine([{"value": window["values"][index]} for window in verdict.windows])
        interval = intervals["value"]["confidence"]
    met = None if value is None else goal.ratio(value) <= 1
    return {"name": goal.name, "limit": goal.limit, "value": value, "interval": interval, "met": met}


def _per_million(cost: float | None, output: float | None) -> float | None:
    return None if cost is None or not output else cost / 3600 / output * 1e6


def describe_load(load: Load | None, rate: float | None) -> Document | None:
    """The headroom of a deployment."""
    if load is None:
        return None
    return {
        "rate": load.rate,
        "factor": None if rate is None else load.rate / rate,
        "binds": None if load.binds is None else load.binds.name,
        "beyond": load.reason,
    }


def ledger(search: Search, prospects: Sequence[Prospect], refused: Sequence[Refused]) -> list[Document]:
    """Every candidate with its status and reason; a family that cannot run is one entry."""
    entries: list[Document] = [
        {
            "name": each.name,
            "layout": each.family.layout,
            "parallelism": each.family.parallelism,
            "settings": dict(each.family.settings),
            "routing": each.family.routing,
            "sizes": None,
            "gpus": None,
            "cost_per_hour": None,
            "status": each.status,
            "reason": each.reason,
        }
        for each in refused
    ]
    for prospect in prospects:
        for candidate in prospect.candidates:
            status, reason = search.ledger.statuses.get(candidate.name, ("not decided", "no candidate meets the goals"))
            entries.append({**identity(candidate), "status": status, "reason": reason})
    return entries


def goals_in_words(question: Question) -> str:
    """The goals with their limits."""
    return ", ".join(
        f"{goal.name} {'≤' if goal.at_most else '≥'} {in_unit(goal, goal.limit)}" for goal in question.goals
    )


def arrivals(question: Question) -> str:
    """The process of arrivals in words."""
    section = question.document["workload"].get("arrivals") or {}
    process = section.get("process") or "replayed"
    varied = " of a rate that changes" if section.get("profile") or section.get("bursts") else ""
    return f"{'Poisson' if process == 'poisson' else str(process).replace('_', ' ')} arrivals{varied}"


def certainty(question: Question, best: Document) -> str:
    """The confidence that a deployment meets its goals, and apart from it in how many spans it does."""
    count = min(math.floor(HOURS * best["probability"]), HOURS)
    span = "hours" if question.spec.span == 3600 else f"spans of {question.spec.span:g} s"
    spans = f"in {count} of {HOURS} {span} like this one"
    if best["sure"] is None:
        return f"meets {goals_in_words(question)} {spans}, if its step times are right"
    sure = f"{100 * best['sure']:.0f} % sure that it meets {goals_in_words(question)}"
    return f"{sure}, and {spans} if its step times are as estimated"


def sentence(question: Question, best: Document | None, headroom: Document | None, miss: Document | None) -> str:
    """The recommendation in a sentence."""
    if best is None:
        none = f"No candidate meets {goals_in_words(question)}"
        if miss is None or miss["sure"] is None:
            return f"{none}."
        least = f"{none} with a confidence of {100 * question.spec.confidence:g} %"
        sure, why = f"{100 * miss['sure']:.0f} % sure", miss["reason"]
        closest = f"{miss['gpus']} GPUs ({miss['devices']}; {miss['parallelism']}), {sure}: {why}"
        return f"{least}; closest: {closest}."
    how = {"colocated": "", "afd": ", decode on AFD bundles"}.get(best["layout"], ", prefill and decode apart")
    where = best["parallelism"] + how
    varied = "".join(f", {key} {value}" for key, value in best["settings"].items())
    price = "" if best["cost_per_hour"] is None else f", {best['cost_per_hour']:.4g} an hour"
    varied += f", router {best['routing']}" if sum(best["sizes"]) > len(best["sizes"]) else ""
    load = arrivals(question)
    load = load if question.rate is None else f"{question.rate:g} requests/s, {load}"
    more = ""
    if headroom is not None and headroom["factor"] is not None:
        binds = f" before {headroom['binds']} binds" if headroom["binds"] else " before a queue grows"
        estimated = "" if best["sure"] is None else "by the best estimate "
        more = f"; {estimated}it bears {100 * (headroom['factor'] - 1):.0f} % more load{binds}"
    take = f"Take {best['gpus']} GPUs ({best['devices']}; {where}{varied}){price}, for {load}"
    return f"{take}: {certainty(question, best)}{more}."


def price_of_error(by_estimate: Document | None, best: Document | None) -> str:
    """The price of the error of the step times, in a sentence; empty if the recommendation pays nothing for it."""
    if by_estimate is None or (best is not None and best["gpus"] <= by_estimate["gpus"]):
        return ""
    count = by_estimate["gpus"]
    enough = f"{count} GPU{'s suffice' if count > 1 else ' suffices'}"
    told = f"By the best estimate of the step times {enough} ({by_estimate['devices']}; {by_estimate['parallelism']})"
    if best is None:
        told += ", but not with its error"
    else:
        told += f", and the other {best['gpus'] - count} pay for its error"
    unknown = by_estimate["costliest_unknown"]
    return f"{told}; most for: {unknown['about']}. Measure: {unknown['measure']}." if unknown else f"{told}."


def untried(question: Question) -> list[str]:
    """Lines on engines that the question leaves out although they matter for its models."""
    sections = [kind.step_time or question.document.get("step_time") or {} for kind in question.spec.engines]
    rooflines = [each for each in sections if each.get("source") == "roofline" and each.get("tensor_parallel", 1) > 1]
    spread = {section["model"] for section in rooflines if section.get("data_parallel", 1) > 1}
    lines = []
    for name in dict.fromkeys(section["model"] for section in rooflines if section["model"] not in spread):
        model = any_model(name, question.path.parent)
        if isinstance(model.ffn, ExpertFFN):
            latent = isinstance(model.attention, LatentAttention)
            why = ", of which each has a whole copy of its latent KV cache" if latent else ""
            line = (
                f"Engines with data-parallel attention and spread experts were not tried: {model.name} was split over"
            )
            lines.append(f"{line} GPUs by tensor parallelism alone{why}.")
    return lines


def nearest_miss(search: Search, shown: Sequence[Verdict], goals: Sequence[Goal]) -> Verdict | None:
    """The deployment of which it is surest that it meets the goals; else that which exceeds its worst goal least."""
    drawn = [each for each in shown if each.sure is not None]
    if drawn:
        return max(drawn, key=lambda each: (each.sure, -each.worst(goals)[0]))
    failed = [each for each in search.ledger.verdicts.values() if each.windows and not each.meets]
    return min(failed, key=lambda each: (each.saturated, each.worst(goals)[0]), default=None)


def describe_question(question: Question, found: Horizon) -> Document:
    """The question's fields in a document."""
    fields: dict[str, Any] = {
        "goals": {goal.name: goal.limit for goal in question.goals},
        "objective": question.spec.aim,
        "rate": question.rate,
        "confidence": question.spec.confidence,
        "reliability": question.spec.reliability,
        "arrivals": arrivals(question),
        "span": question.spec.span,
        "limits": question.spec.limits.model_dump(),
        "workload": question.document["workload"],
        "window": {"requests": found.long, "screening": found.short, "warmup": found.warmup},
        "seed": question.seed,
    }
    return fields
