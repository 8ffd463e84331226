"""Ablation: each feature of a serving system on and off, on the same requests, alone and with the others on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ExpertFFN
from latency_models.io.files import is_path
from latency_models.sources.roofline.work import WHOLE_STEP
from latency_models.step_time import Unknown
from scenarios.reading import Settings, with_trace
from scenarios.serving import check_scenario
from twin.serving.plan.plan import Draw
from twin.serving.results.report import NOTE
from twin.serving.results.uncertainty import combine, flatten
from twin.sweeps.serving_sweep import Document, ServingSweep, Task, prepare
from workloads.errors import BadInput

SCHEMA = "twin.ablation/1"

HOST: Document = {"capacity": 400e9, "bandwidth": 50e9, "latency": 50e-6}
"""Host memory of one engine where a scenario has none: bytes, and bytes/s of PCIe 5 x16."""

DRAFTS = (1, 3, 5, 7)
"""Draft tokens that are compared where a scenario speculates."""

HIGHER_IS_BETTER = {
    "output_throughput": True, "goodput": True, "e2e.mean": False,
    "cost_per_million_output_tokens": False, "energy.joules_per_output_token": False,
}  # fmt: skip
"""Objectives: the metric by which a feature pays, and its direction."""

SHOWN = (*HIGHER_IS_BETTER, "ttft.mean", "ttft.p99", "tpot.mean", "tpot.p99")
"""Metrics whose changes are reported, as far as both runs have them."""


LAYOUT = {"step_time.tensor_parallel", "step_time.data_parallel", "step_time.expert_parallel"}
"""Fields by which the layout of an engine changes."""

LAYOUT_ERROR = 0.7
"""Deviation of a predicted over a measured change of throughput with the layout, over that of whole steps: layouts
share only a part of the error of steps. By two thirds of 895 pairs of `benchmarks.pays` (the logarithms of both)."""


Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Comparison:
    """A value of a feature, in the context `alone` (the rest as in the scenario) or `others on`.

    `on`, `off`: settings with and without it. `changes_layout`: of an engine, by one of `LAYOUT`.
    """

    feature: str
    value: str
    on: Settings
    off: Settings
    changes_layout: bool
    context: str = "alone"


@dataclass(frozen=True)
class Ablation:
    """Comparisons, the sweep of all their configurations, and features that the scenario cannot have, with reasons."""

    sweep: ServingSweep
    comparisons: Sequence[Comparison]
    objective: str
    skipped: Mapping[str, str]

    def summarise(self, documents: Mapping[str, Document]) -> Document:
        """The document `twin.ablation/1`: of each comparison the relative changes with 95 % intervals, and a verdict.

        `pays` and `costs`: the whole interval of the objective's change lies on one side of zero.
        """
        return {
            "schema": SCHEMA,
            "name": self.sweep.cases[0].plan.scenario.name,
            "simulated": True,
            "note": NOTE,
            "objective": self.objective,
            "rows": [self._row(comparison, documents) for comparison in self.comparisons],
            "skipped": dict(self.skipped),
        }

    def _row(self, comparison: Comparison, documents: Mapping[str, Document]) -> Document:
        row = {
            "feature": comparison.feature,
            "value": comparison.value,
            "context": comparison.context,
            "settings": {"on": comparison.on, "off": comparison.off},
        }
        try:
            on, off = (self._metrics(settings, documents) for settings in (comparison.on, comparison.off))
        except BadInput as error:
            return row | {"verdict": "not possible", "reason": str(error), "changes": {}}
        ratios = {key: _ratios(on[key], off[key]) for key in on if key in off}
        replications = [ratio for (draw, _), ratio in ratios.items() if draw is None]
        draws = [ratio for (draw, _), ratio in ratios.items() if draw is not None]
        if comparison.changes_layout:
            draws = with_layout_error(draws, self.sweep.cases[0].plan.unknowns())
        changes = relative_changes(replications, draws)
        return row | {"verdict": verdict(changes.get(self.objective), self.objective), "changes": changes}

    def _metrics(self, settings: Settings, documents: Mapping[str, Document]) -> dict[tuple[Draw, int], Metrics]:
        """The metrics of a configuration's runs, by draw and replication; `BadInput` if it cannot run."""
        reason = next((refusal.reason for refusal in self.sweep.infeasible if refusal.settings == settings), "")
        if not reason:
            index = next(index for index, case in enumerate(self.sweep.cases) if case.settings == settings)
            reason = self.sweep.refused(index, documents)
        if reason:
            raise BadInput(reason)
        tasks = self.sweep.tasks_of(index)
        return {(task.draw, task.replication): flatten(documents[task.key]["summary"]) for task in tasks}


class PairedSweep(ServingSweep):
    """A sweep whose configurations are compared run by run: no unknown is varied alone."""

    def tasks_of(self, index: int) -> list[Task]:
        return [task for task in super().tasks_of(index) if not isinstance(task.draw, tuple)]

    def label(self, task: Task) -> str:
        return f"configuration {task.case + 1} of {len(self.cases)}"


def _ratios(on: Metrics, off: Metrics) -> Metrics:
    ratios = {}
    for name in SHOWN:
        above, below = on.get(name), off.get(name)
        ratios[name] = above / below if above and below else None
    return ratios


def with_layout_error(draws: Sequence[Metrics], unknowns: Iterable[Unknown]) -> list[Metrics]:
    """Ratios of draws, varied at quantiles of a normal distribution by `LAYOUT_ERROR`: what is faster costs less."""
    whole = max((unknown.deviation or 0.0 for unknown in unknowns if unknown.name == WHOLE_STEP), default=0.0)
    varied = []
    for draw, ratios in enumerate(draws):
        factor = math.exp(LAYOUT_ERROR * whole * NormalDist().inv_cdf((draw + 0.5) / len(draws)))
        varied.append({
            name: ratio and (ratio * factor if HIGHER_IS_BETTER.get(name) else ratio / factor)
            for name, ratio in ratios.items()
        })  # fmt: skip
    return varied


def verdict(change: Document | None, objective: str) -> str:
    """What an interval of the objective's relative change says; None: the objective is missing in a run."""
    if change is None:
        return "undecided"
    low, high = change["low"], change["high"]
    if low == high == 0:
        return "no effect"
    if low <= 0 <= high:
        return "undecided"
    return "pays" if (low > 0) == HIGHER_IS_BETTER[objective] else "costs"


def relative_changes(replications: Sequence[Document], draws: Sequence[Document]) -> dict[str, Document]:
    """The mean relative change of each metric and the ends of its interval, of no width for a single certain run.

    Args:
        replications: ratios of metrics with to without the change, of each seed.
        draws: the same of each draw of what is not known of step times.
    """
    means, intervals = combine(replications, draws)
    changes = {}
    for name, mean in means.items():
        if mean is None:
            continue
        ends = intervals[name]["confidence"] if name in intervals else (mean, mean)
        changes[name] = {"change": mean - 1, "low": ends[0] - 1, "high": ends[1] - 1}
    return changes


def prepare_ablation(
    document: Document,
    path: Path,
    *,
    names: Iterable[str] | None = None,
    more: Mapping[str, Sequence[Any]] | None = None,
    objective: str | None = None,
    trace: Path | None = None,
    replications: int = 5,
    draws: int | None = None,
) -> Ablation:
    """Check all configurations of an ablation: features of `FEATURES` (None: all possible), and values of fields.

    `objective`: None: goodput where the scenario has goals; output_throughput in a closed loop; else e2e.mean. Raises
    `BadInput` for what cannot be used, and where there is nothing to compare.
    """
    requested = list(FEATURES) if names is None else list(names)
    if unknown := [name for name in requested if name not in FEATURES]:
        raise BadInput(f"expected of {', '.join(FEATURES)}", field="--features", value=unknown[0])
    document = with_trace(document, trace)
    check_scenario(document, {}, path)
    objective = objective or _objective(document)
    if objective not in HIGHER_IS_BETTER:
        raise BadInput(f"expected one of {', '.join(HIGHER_IS_BETTER)}", field="--objective", value=objective)
    alone, skipped = _alone(document, path, dict.fromkeys(requested), more or {})
    if not alone:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise BadInput(f"expected a feature that the scenario can have ({reasons})", field="--features", file=path)

    def possible(settings: Settings) -> bool:
        try:
            check_scenario(document, settings, path)
        except BadInput:
            return False
        return True

    infeasible = [refusal.settings for refusal in prepare(document, path, _settings(alone)).infeasible]
    feasible = [comparison for comparison in alone if comparison.on not in infeasible]
    together = [(change, *_with_others(change, feasible, possible)) for change in feasible]
    comparisons = [*alone, *(
        replace(change, on=on, off=off, context="others on")
        for change, on, off in together if (on, off) != (change.on, change.off)
    )]  # fmt: skip
    sweep = prepare(document, path, _settings(comparisons), None, replications, draws)
    paired = PairedSweep(sweep.cases, sweep.replications, sweep.draws, sweep.infeasible)
    return Ablation(paired, comparisons, objective, skipped)


def _alone(
    document: Document, path: Path, features: Iterable[str], more: Mapping[str, Sequence[Any]]
) -> tuple[list[Comparison], dict[str, str]]:
    """Comparisons of features and of values of fields, and the features that cannot be, with reasons."""
    values: list[tuple[str, str, Settings, Settings]] = []
    skipped: dict[str, str] = {}
    located = _with_model_from(path.parent, document)
    for name in features:
        entries = FEATURES[name](located)
        if isinstance(entries, str):
            skipped[name] = entries
        else:
            values += [(name, *entry) for entry in entries]
    for field, choices in more.items():
        stated = _get(document, field)
        own = {} if stated is None else {field: stated}
        values += [(field, str(value), {field: value}, own) for value in choices]
    return [Comparison(*entry, bool(LAYOUT & entry[2].keys())) for entry in values], skipped


def _settings(comparisons: Iterable[Comparison]) -> list[Settings]:
    """The configurations of comparisons, each once."""
    distinct: list[Settings] = []
    for comparison in comparisons:
        distinct += [settings for settings in (comparison.on, comparison.off) if settings not in distinct]
    return distinct


def _with_others(
    change: Comparison, feasible: Iterable[Comparison], possible: Callable[[Settings], bool]
) -> tuple[Settings, Settings]:
    """The settings with and without a change, with the first value of each other feature that goes with it on."""
    extra: Settings = {}
    seen = {change.feature}
    for candidate in feasible:
        if candidate.feature in seen or _overlap([*extra, *change.on], candidate.on):
            continue
        if all(possible(extra | candidate.on | settings) for settings in (change.on, change.off)):
            extra |= candidate.on
            seen.add(candidate.feature)
    return extra | change.on, extra | change.off


def _overlap(fields: Iterable[str], settings: Settings) -> bool:
    """True if a setting is of one of these fields, or of a part of one."""
    return any(
        f"{field}.".startswith(f"{key}.") or f"{key}.".startswith(f"{field}.") for field in fields for key in settings
    )


def _objective(document: Document) -> str:
    if document.get("measure", {}).get("slo"):
        return "goodput"
    closed = document["workload"]["arrivals"]["process"] == "closed_loop"
    return "output_throughput" if closed else "e2e.mean"


def _get(document: Document, field: str) -> Any:
    """The value of a dotted field; None where it is left out."""
    value: Any = document
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _with_model_from(base: Path, document: Document) -> Document:
    """The document, whose model, if it is a file, is found from here."""
    step_time = document.get("step_time") or {}
    if not is_path(str(step_time.get("model", ""))):
        return document
    return document | {"step_time": step_time | {"model": str(base / step_time["model"])}}


Values = list[tuple[str, Settings, Settings]] | str
"""Values of a feature with the fields that have it and that do not; or the reason why a scenario cannot have it."""


def _shares_prompts(document: Document) -> bool:
    return bool({"sessions", "prefixes", "trace"} & document["workload"].keys())


def _kv_bytes(document: Document) -> float | None:
    """Bytes of KV cache a token of one device, as far as the step times name a model."""
    step_time = document["step_time"]
    if step_time.get("source") != "roofline" or "model" not in step_time:
        return None
    wide = {"fp8": 1.0}.get(step_time.get("cache", ""), 2.0)
    return any_model(step_time["model"]).kv_bytes_per_token(wide)


def _prefix_caching(document: Document) -> Values:
    if not _shares_prompts(document):
        return "prompts share nothing"
    field = "engine.enable_prefix_caching"
    return [("on", {field: True}, {field: False})]


def _async_scheduling(document: Document) -> Values:
    field = "engine.async_scheduling"
    return [("on", {field: True}, {field: False})]


def _speculation(document: Document) -> Values:
    section = document["engine"].get("speculative_config")
    if not section:
        return "engine.speculative_config says how often drafts are right"
    field, shares = "engine.speculative_config", section.get("acceptance_by_position")
    values = []
    for n in DRAFTS:
        if not shares:
            values.append(section | {"num_speculative_tokens": n})
        elif n <= len(shares):
            values.append(section | {"num_speculative_tokens": n, "acceptance_by_position": shares[:n]})
    return [(f"{value['num_speculative_tokens']} drafts", {field: value}, {field: None}) for value in values]


def _offload(document: Document) -> Values:
    field, section = "engine.kv_offloading", document["engine"].get("kv_offloading")
    if not section:
        bytes_per_token = _kv_bytes(document)
        if bytes_per_token is None:
            return "engine.kv_offloading says how many bytes a token has"
        if not _shares_prompts(document):
            return "prompts share nothing"
        section = {"bytes_per_token": bytes_per_token, "host": HOST}
    return [("on", {field: section}, {field: None})]


def _routing(document: Document) -> Values:
    system = document.get("system", {})
    if system.get("replicas", 1) < 2 or system.get("layout", "colocated") != "colocated":
        return "there is one engine"
    if not _shares_prompts(document):
        return "prompts share nothing"
    values = ["prefix_aware", *(["session_affinity"] if "sessions" in document["workload"] else [])]
    return [(value, {"system.routing": value}, {"system.routing": "least_loaded"}) for value in values]


def _parallelism(document: Document) -> Values:
    """Twice the tensor parallelism on half the engines, and the reverse, on the same devices."""
    if reason := _unknown_layouts(document):
        return reason
    step_time, system = document["step_time"], document.get("system", {})
    ranks, replicas = step_time.get("tensor_parallel", 1), system.get("replicas", 1)
    devices = _get(document, "system.device.count")

    def layout(ranks: int, replicas: int) -> Settings:
        stated = {} if devices is None else {"system.device.count": ranks * step_time.get("data_parallel", 1)}
        return {"step_time.tensor_parallel": ranks, "system.replicas": replicas} | stated

    shapes = [(ranks * 2, replicas // 2)] * (replicas % 2 == 0) + [(ranks // 2, replicas * 2)] * (ranks % 2 == 0)
    if not shapes:
        return "there is one device"
    return [(f"{n} x TP {tp}", layout(tp, n), layout(ranks, replicas)) for tp, n in shapes]


def _data_parallel(document: Document) -> Values:
    """Attention in replicas that share experts, against ranks, on the devices of each engine."""
    if reason := _unknown_layouts(document):
        return reason
    step_time = document["step_time"]
    devices = step_time.get("tensor_parallel", 1) * step_time.get("data_parallel", 1)
    if devices == 1:
        return "an engine has one device"
    if not isinstance(any_model(step_time["model"]).ffn, ExpertFFN):
        return "the model has no experts"
    fields = ("step_time.tensor_parallel", "step_time.data_parallel", "engine.data_parallel_size")
    on, off = (dict(zip(fields, (ranks, dp, dp), strict=True)) for ranks, dp in ((1, devices), (devices, 1)))
    return [(f"DP {devices}", on, off)]


def _unknown_layouts(document: Document) -> str:
    """The reason why engines cannot have other layouts; "" if they can."""
    system = document.get("system", {})
    if document["step_time"].get("source") != "roofline" or system.get("layout", "colocated") != "colocated":
        return "step times of other parallelism need source roofline, and one pool of engines"
    if "pools" in system or system.get("autoscaling"):
        return "engines are in pools of their own, or autoscaled"
    return ""


def _disaggregate(document: Document) -> Values:
    system = document.get("system", {})
    replicas, bytes_per_token = system.get("replicas", 1), _kv_bytes(document)
    if replicas < 2 or {"layout", "pools", "autoscaling"} & system.keys():
        return "prefill and decode need two engines of one pool"
    if bytes_per_token is None:
        return "the size of a cache is known where step times are of source roofline"
    link = {"bandwidth": HOST["bandwidth"], "bytes_per_token": bytes_per_token}
    plain = {"system": system}
    device = {"device": system["device"]} if "device" in system else {}
    return [
        (f"{n}P {replicas - n}D", {"system": device | {
            "layout": "disaggregated", "prefill_replicas": n, "decode_replicas": replicas - n, "link": link,
        }}, plain)
        for n in range(1, replicas)
    ]  # fmt: skip


FEATURES = {
    "prefix_caching": _prefix_caching,
    "offload": _offload,
    "routing": _routing,
    "speculation": _speculation,
    "async_scheduling": _async_scheduling,
    "parallelism": _parallelism,
    "data_parallel": _data_parallel,
    "disaggregate": _disaggregate,
}
"""Features by name: functions of a scenario that say which values it can have."""
