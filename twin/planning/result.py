"""The results of planning, `Plan` and `MaxLoad`, and their documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ExpertFFN, LatentAttention
from latency_models.sources.roofline.spec import RooflineSpec, board_cell
from latency_models.step_time import Unknown
from scenarios.fields import Goal
from scenarios.planning import EngineKindSpec
from twin.planning.confirming import Level
from twin.planning.cost import cost_of_nodes, costs, nodes_of
from twin.planning.family_estimates import LedgerEntry
from twin.planning.max_load import Load
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, Family
from twin.planning.windows import Horizon, Trial, in_unit
from twin.serving.results.uncertainty import combine

NOTE = "Simulated (discrete events, no hardware)."
CUT = "The CPU limit was reached: rows, headroom and changes may be missing."
HOURS = 100
"""Spans that a reliability is stated for."""


@dataclass(frozen=True)
class Stop:
    """What was decided when a plan reached its CPU limit.

    Attributes:
        cpu_limit: seconds. incumbent: the cheapest deployment found to meet the goals, which is not confirmed; None
            where there is none, or a recommendation.
        least_gpus: fewer are too few, None if that is true of all candidates. undecided: candidates not rejected.
    """

    cpu_limit: float
    incumbent: Trial | None
    least_gpus: int | None
    undecided: int

    def answer(self) -> str:
        """What was decided, in a sentence."""
        text = f"Stopped after {self.cpu_limit:g} s of CPU, before a deployment was confirmed"
        text += "" if self.least_gpus is None else f": at least {self.least_gpus} GPUs"
        if self.incumbent is None:
            return f"{text}."
        candidate, sure = self.incumbent.candidate, self.incumbent.sure
        how = "if step times are as estimated" if sure is None else f"at {100 * sure:.0f} % confidence so far"
        return f"{text}; {candidate.gpus} meet the goals {how} ({candidate.devices}; {candidate.family.parallelism})."

    def document(self, question: Question) -> Document:
        """The field `stop` of `twin.plan/1`."""
        incumbent = None if self.incumbent is None else row(question, self.incumbent, "incumbent")
        return {"cpu_limit": self.cpu_limit, "least_gpus": self.least_gpus, "undecided": self.undecided,
                "incumbent": incumbent}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The answer to a question.

    Attributes:
        best: the recommendation; None if no candidate meets the goals. rows: trials of the table, by their roles.
        by_estimate: the cheapest deployment at the best estimate of the step times; None where their error is unknown.
        costliest_unknowns: of its step times, with how far each moves it.
        nearest_miss: the closest candidate, where there is no recommendation.
        headroom: None where it was not looked for. changes: trials of the recommendation where something differs.
        curve: the cheapest deployment at each confidence. alternatives: why they lose.
        capacity: estimated rates over GPUs.
        evaluated: candidates that were simulated. simulated_requests: in all windows.
        stop: None unless the CPU limit was reached. what_if: plans of changed questions, by the change.
    """

    question: Question
    horizon: Horizon
    best: Trial | None
    rows: Sequence[tuple[str, Trial]]
    by_estimate: Trial | None
    costliest_unknowns: Sequence[tuple[Unknown, float]]
    nearest_miss: Trial | None
    headroom: Load | None
    changes: Sequence[Document]
    ledger: Sequence[LedgerEntry]
    curve: Sequence[Level]
    alternatives: Sequence[Document]
    capacity: Sequence[Document]
    evaluated: int
    simulated_requests: int
    stop: Stop | None = None
    what_if: Sequence[tuple[str, Plan]] = ()

    @property
    def feasible(self) -> bool | None:
        """True if there is a recommendation; None if the CPU limit was reached before one was confirmed."""
        return True if self.best is not None else None if self.stop is not None else False

    def document(self) -> Document:
        """The document `twin.plan/1`."""
        question, shown = self.question, self.best or self.nearest_miss
        unknown, by_estimate = self._costliest_unknown, None
        if self.by_estimate is not None:
            costliest = None if unknown is None else {"about": unknown.about, "measure": unknown.measure}
            by_estimate = row(question, self.by_estimate, "best estimate") | {"costliest_unknown": costliest}
        return {
            "schema": "twin.plan/1",
            "name": str(question.document.get("name", "plan")),
            "simulated": True,
            "note": NOTE,
            "question": describe_question(question, self.horizon),
            "answer": " ".join(filter(None, [self.answer(), self.price_of_error()])),
            "measured_like": [] if shown is None else measured_like(question, shown.candidate.family.kinds),
            "feasible": self.feasible,
            "stop": None if self.stop is None else self.stop.document(question),
            "recommendation": None if self.best is None else row(question, self.best),
            "by_best_estimate": by_estimate,
            "nearest_miss": None if self.nearest_miss is None else row(question, self.nearest_miss, "nearest miss"),
            "rows": [row(question, trial, role) for role, trial in self.rows],
            "confidence_curve": [level.document() for level in self.curve],
            "narrowing": [_narrowing(*entry) for entry in self.costliest_unknowns],
            "alternatives": self.alternatives,
            "capacity": self.capacity,
            "costs": [] if self.best is None else costs(question, [(question, self.best.candidate)], question.rate),
            "headroom": None if self.headroom is None else self.headroom.document(question.rate),
            "changes": self.changes,
            "what_if": [
                {"what": text, "feasible": plan.feasible, "answer": plan.answer()}
                | {"recommendation": None if plan.best is None else row(plan.question, plan.best)}
                for text, plan in self.what_if
            ],
            "notes": untried(question) + ([] if self.stop is None else [CUT]),
            "evaluated": self.evaluated,
            "ledger": [
                {**identity(entry.family, entry.candidate), "status": entry.status, "reason": entry.reason}
                for entry in self.ledger
            ],
            "simulated_requests": self.simulated_requests,
        }

    @property
    def _costliest_unknown(self) -> Unknown | None:
        return self.costliest_unknowns[0][0] if self.costliest_unknowns else None

    def answer(self) -> str:
        """The recommendation in a sentence."""
        if self.best is None:
            return self.stop.answer() if self.stop is not None else self._no_answer()
        question, candidate, family = self.question, self.best.candidate, self.best.candidate.family
        layout = {"colocated": "", "afd": ", decode on AFD bundles"}.get(family.layout, ", prefill and decode apart")
        settings = "".join(f", {key} {value}" for key, value in family.settings)
        settings += f", router {family.routing}" if sum(candidate.sizes) > len(candidate.sizes) else ""
        price = "" if candidate.cost is None else f", {candidate.cost:.4g} an hour"
        load = arrivals(question) if question.rate is None else f"{question.rate:g} requests/s, {arrivals(question)}"
        engines = f"{candidate.devices}; {family.parallelism}{layout}{settings}"
        note = ""
        if self.headroom is not None and question.rate is not None:
            binds = self.headroom.binds
            limit = "a queue grows" if binds is None else f"{binds.name} binds"
            estimated = "" if self.best.sure is None else "by the best estimate "
            percent = 100 * (self.headroom.rate / question.rate - 1)
            note = f"; {estimated}it bears {percent:.0f} % more load before {limit}"
        certain = certainty(question, self.best)
        nodes = " and ".join(map(str, nodes_of(question, candidate)))
        gpus = f"{candidate.gpus} GPUs{f' on {nodes}' if nodes else ''}"
        return f"Take {gpus} ({engines}){price}, for {load}: {certain}{note}."

    def _no_answer(self) -> str:
        text, miss = f"No candidate meets {goals_in_words(self.question)}", self.nearest_miss
        if miss is None or miss.sure is None:
            return f"{text}."
        candidate, sure = miss.candidate, f"{100 * miss.sure:.0f} % sure"
        engines = f"{candidate.gpus} GPUs ({candidate.devices}; {candidate.family.parallelism})"
        confidence = f"with a confidence of {100 * self.question.spec.confidence:g} %"
        return f"{text} {confidence}; closest: {engines}, {sure}: {miss.reason}."

    def price_of_error(self) -> str:
        """The price of the error of the step times, in a sentence; empty if the recommendation pays nothing for it."""
        if self.by_estimate is None:
            return ""
        candidate, unknown = self.by_estimate.candidate, self._costliest_unknown
        gpus = candidate.gpus
        if self.best is not None and self.best.candidate.gpus <= gpus:
            return ""
        if self.stop is not None and self.stop.incumbent is not None and self.stop.incumbent.candidate is candidate:
            return ""
        enough = f"{gpus} GPU{'s suffice' if gpus > 1 else ' suffices'}"
        text = f"By the best estimate of the step times {enough} ({candidate.devices}; {candidate.family.parallelism})"
        if self.best is None:
            text += ", but not with its error"
        else:
            text += f", and the other {self.best.candidate.gpus - gpus} pay for its error"
        return f"{text}; most for: {unknown.about}. Measure: {unknown.measure}." if unknown else f"{text}."


@dataclass(frozen=True)
class MaxLoad:
    """The maximum sustainable load of a deployment.

    `horizon`: None where nothing was simulated. `load`: None if the goals are missed at every rate, for this `reason`.
    """

    question: Question
    deployment: Candidate
    horizon: Horizon | None
    load: Load | None
    reason: str
    simulated_requests: int

    @property
    def feasible(self) -> bool:
        """True if some rate meets the goals."""
        return self.load is not None

    def document(self) -> Document:
        """The document `twin.max-load/1`."""
        question, load = self.question, self.load
        at = question if load is None else question.at_rate(load.rate)
        fields: Document = {"rate": None, "interval": None, "factor": None, "binds": None, "beyond": self.reason}
        if load is not None:
            fields |= load.document(question.rate) | {"interval": load.interval and list(load.interval)}
        return {
            "schema": "twin.max-load/1",
            "name": str(question.document.get("name", "max-load")),
            "simulated": True,
            "note": NOTE,
            "question": None if self.horizon is None else describe_question(at, self.horizon),
            "answer": self.answer(),
            "feasible": self.feasible,
            **fields,
            "deployment": None if load is None else row(at, load.trial),
            "simulated_requests": self.simulated_requests,
        }

    def answer(self) -> str:
        """The load in a sentence."""
        devices, load = self.deployment.devices, self.load
        if load is None or load.interval is None:
            return f"{devices} meets {goals_in_words(self.question)} at no rate: {self.reason}."
        low, high = load.interval
        certain = certainty(self.question, load.trial)
        return (
            f"{devices} bears {load.rate:.4g} requests/s, {arrivals(self.question)}: {certain}. "
            f"It just meets them in the long run at {low:.4g} to {high:.4g} requests/s."
        )


# -- parts of documents ----------------------------------------------------------------------------------------------


def row(question: Question, trial: Trial, role: str = "recommended") -> Document:
    """One deployment: its cost, its metrics and its goals; `role`: the reason why it is shown."""
    candidate, summary = trial.candidate, trial.summary
    nodes = nodes_of(question, candidate)
    output = summary.get("output_throughput")
    tpot = (summary.get("tpot") or {}).get("mean")
    per_million = None if candidate.cost is None or not output else candidate.cost / 3600 / output * 1e6
    return {
        **identity(candidate.family, candidate),
        "role": role,
        "devices": candidate.devices,
        "nodes": [asdict(group) for group in nodes],
        "gpus_of_nodes": sum(group.count * group.size for group in nodes) or None,
        "nodes_cost_per_hour": cost_of_nodes(question, candidate),
        "cost_per_million_output_tokens": per_million,
        "output_throughput": output,
        "tokens_per_second_per_gpu": None if output is None else output / candidate.gpus,
        "tokens_per_second_per_user": None if not tpot else 1 / tpot,
        "goals": [_goal(goal, i, trial) for i, goal in enumerate(question.goals)],
        **{name: getattr(trial, name) for name in ("probability", "sure", "meets", "saturated", "reason")},
        "windows": len(trial.windows),
        "requests_a_window": trial.windows[0]["requests"] if trial.windows else None,
        "draws": trial.draws,
        "seed": question.seed if trial.seed is None else trial.seed,
        "summary": summary,
        "intervals": trial.intervals,
    }


def identity(family: Family, candidate: Candidate | None) -> Document:
    """The fields that tell a candidate, or a family, from others."""
    size: Document = {"sizes": None, "gpus": None, "cost_per_hour": None}
    if candidate is not None:
        size = {"sizes": list(candidate.sizes), "gpus": candidate.gpus, "cost_per_hour": candidate.cost}
    return {
        "name": (candidate or family).name,
        "layout": family.layout,
        "parallelism": family.parallelism,
        "settings": dict(family.settings),
        "routing": family.routing,
        **size,
    }


def _narrowing(unknown: Unknown, severity: float) -> Document:
    """An unknown, what to measure, and the command that learns it from measurements."""
    tables = unknown.measure.startswith("kernel tables")
    command = "twin calibrate import" if tables else "twin observe, then twin calibrate refine"
    excess = severity if math.isfinite(severity) else None
    return {"about": unknown.about, "measure": unknown.measure, "command": command, "excess": excess}


def _goal(goal: Goal, index: int, trial: Trial) -> Document:
    value, interval = trial.value(index), None
    if value is not None and len(trial.windows) > 1:
        _, intervals = combine([{"value": window["values"][index]} for window in trial.windows])
        interval = intervals["value"]["confidence"]
    is_met = None if value is None else goal.ratio(value) <= 1
    return {"name": goal.name, "limit": goal.limit, "value": value, "interval": interval, "met": is_met}


def describe_question(question: Question, horizon: Horizon) -> Document:
    """The question's fields in a document."""
    return {
        "goals": {goal.name: goal.limit for goal in question.goals},
        "objective": question.spec.aim,
        "rate": question.rate,
        "confidence": question.spec.confidence,
        "reliability": question.spec.reliability,
        "arrivals": arrivals(question),
        "span": question.spec.span,
        "limits": question.spec.limits.model_dump(),
        "workload": question.document["workload"],
        "window": {"requests": horizon.long, "screening": horizon.short, "warmup": horizon.warmup},
        "seed": question.seed,
    }


def goals_in_words(question: Question) -> str:
    """The goals with their limits."""
    signs = {True: "≤", False: "≥"}
    return ", ".join(f"{goal.name} {signs[goal.at_most]} {in_unit(goal, goal.limit)}" for goal in question.goals)


def arrivals(question: Question) -> str:
    """The process of arrivals in words."""
    section = question.document["workload"].get("arrivals") or {}
    process = section.get("process") or "replayed"
    varied = " of a rate that changes" if section.get("profile") or section.get("bursts") else ""
    return f"{'Poisson' if process == 'poisson' else str(process).replace('_', ' ')} arrivals{varied}"


def certainty(question: Question, trial: Trial) -> str:
    """The confidence that a deployment meets its goals, and apart from it in how many spans it does."""
    count = min(math.floor(HOURS * trial.probability), HOURS)
    span = "hours" if question.spec.span == 3600 else f"spans of {question.spec.span:g} s"
    spans = f"in {count} of {HOURS} {span} like this one"
    if trial.sure is None:
        return f"meets {goals_in_words(question)} {spans}, if its step times are right"
    sure = f"{100 * trial.sure:.0f} % sure that it meets {goals_in_words(question)}"
    return f"{sure}, and {spans} if its step times are as estimated"


def measured_like(question: Question, kinds: Sequence[EngineKindSpec]) -> list[str]:
    """How far predictions were off measured rows like some engines, in sentences."""
    sentences = []
    for kind in kinds:
        section = kind.step_time or question.document.get("step_time") or {}
        if section.get("source") != "roofline":
            continue
        spec = RooflineSpec.model_validate(section)
        model = any_model(spec.model, question.path.parent)
        hardware = load_hardware(spec.hardware, question.path.parent)
        cell = board_cell(model, hardware.name, spec.placement(model))
        if cell is not None:
            sentences.append(f"{cell.sentence()[:1].upper()}{cell.sentence()[1:]}.")
    return list(dict.fromkeys(sentences))


def untried(question: Question) -> list[str]:
    """Lines on engines that the question leaves out although they matter for its models."""
    sections = [kind.step_time or question.document.get("step_time") or {} for kind in question.spec.engines]
    rooflines = [section for section in sections if section.get("source") == "roofline"]
    spread = {section["model"] for section in rooflines if section.get("data_parallel", 1) > 1}
    split = dict.fromkeys(section["model"] for section in rooflines if section.get("tensor_parallel", 1) > 1)
    lines = []
    for name in (name for name in split if name not in spread):
        model = any_model(name, question.path.parent)
        if isinstance(model.ffn, ExpertFFN):
            latent = isinstance(model.attention, LatentAttention)
            why = ", of which each has a whole copy of its latent KV cache" if latent else ""
            line = f"Engines with data-parallel attention and spread experts were not tried: {model.name} was split"
            lines.append(f"{line} over GPUs by tensor parallelism alone{why}.")
    return lines
