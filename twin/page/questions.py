"""What-if questions: the knobs that set a scenario's fields, quick answers, and curves point by point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from latency_models.deployment.hugging_face import any_model
from latency_models.io.files import CommandLineText, builtin_names, is_path
from reports.afd_report import curve_per_unit
from scenarios.reading import Settings, apply
from scenarios.serving import ServingScenario, check_scenario
from twin.serving.plan.pools import describe_devices
from twin.serving.results.report import run_document, timeseries
from twin.sweeps import ratio_sweep
from twin.sweeps.one_run import read_plan, simulate
from workloads.errors import BadInput

Value = float | str
Choices = dict[str, Value]
"""The value of each knob by its name."""

LINK_BANDWIDTH = 50e9
"""Bytes/s from prefill to decode engines where a scenario without a link is taken apart: a 400 Gbit/s network."""

USUAL_GOALS = {"ttft": 1.0, "tpot": 0.05}
"""Seconds, where a scenario states no goal."""

AS_PUBLISHED = "as published"
"""The choice of weights in the format that the model is published in."""

TOGETHER, APART = "together", "apart"
GIVEN_LAYOUTS = {"colocated": TOGETHER, "disaggregated": APART}


@dataclass(frozen=True)
class Knob:
    """Something to change: a choice of options, or a number from `low` to `high` in steps of `step`.

    `name`: in links. `field`: the scenario's field that it sets alone; "" where several set a section together.
    `stated`: the scenario says the value, so that nothing is set while it stays.
    """

    name: str
    label: str
    value: Value
    options: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float = 1.0
    field: str = ""
    help: str = ""
    stated: bool = True

    def read(self, text: str) -> Value | None:
        """The value that a link states; None if it is none of this knob."""
        if self.options:
            return text if text in self.options else None
        try:
            number = float(text)
        except ValueError:
            return None
        return self.whole(number) if self.low <= number < inf else None

    def whole(self, number: float) -> float:
        """A number of this knob: a whole one where its steps are, else of the six digits that a link has."""
        return round(number) if self.step == int(self.step) else float(f"{number:.6g}")


def _number(name: str, label: str, value: float, field: str, *, integral: bool = False, factor: float = 4.0,
            help: str = "") -> Knob:  # fmt: skip
    """A slider from near 0 to several times the scenario's value."""
    step = 1.0 if integral else float(f"{value / 50:.1g}")
    low = 1.0 if integral else step
    return Knob(name, label, value, (), low, max(round(factor * value / step) * step, low + step), step, field, help)


def _workload(workload: Mapping[str, Any]) -> list[Knob]:
    arrivals, knobs = workload["arrivals"], []
    if "rate" in arrivals and isinstance(arrivals["rate"], int | float):
        knobs.append(_number("rate", "requests/s", arrivals["rate"], "workload.arrivals.rate"))
    if "concurrency" in arrivals:
        knobs.append(_number("users", "users at once", arrivals["concurrency"], "workload.arrivals.concurrency",
                             integral=True))  # fmt: skip
    for name, key, label in (("prompt", "prefill", "prompt tokens, mean"), ("answer", "decode", "answer tokens, mean")):
        lengths = workload.get(key) or {}
        if isinstance(lengths.get("mean"), int | float) and lengths.get("distribution") != "fixed":
            knobs.append(_number(name, label, lengths["mean"], f"workload.{key}.mean", integral=True))
    return knobs


def _step_time(step_time: Mapping[str, Any]) -> list[Knob]:
    """Model, device and split, where step times are computed from data sheets."""
    if step_time["source"] != "roofline":
        return []
    knobs = []
    for name, key, kind, label in (("model", "model", "models", "model"), ("gpu", "hardware", "hardware", "GPU")):
        names = builtin_names(kind)  # type: ignore[arg-type]
        value = str(step_time[key])
        knobs.append(Knob(name, label, value, tuple(dict.fromkeys([value, *names])), field=f"step_time.{key}"))
    degrees = tuple(dict.fromkeys(["1", "2", "4", "8", str(step_time["tensor_parallel"])]))
    knobs.append(Knob("tp", "tensor parallel", str(step_time["tensor_parallel"]), degrees,
                      help="GPUs that share each layer of an engine"))  # fmt: skip
    value = step_time["weights"] or AS_PUBLISHED
    weights = tuple(dict.fromkeys([value, AS_PUBLISHED, "bf16", "fp8"]))
    return [*knobs, Knob("weights", "weights", value, weights, field="step_time.weights")]


def _system(system: Mapping[str, Any]) -> list[Knob]:
    layout = GIVEN_LAYOUTS.get(system["layout"])
    if layout is None:
        return []
    prefill = system.get("prefill_replicas", 1)
    engines = system.get("replicas", system.get("decode_replicas", 1))
    return [
        Knob("layout", "prefill and decode", layout, (TOGETHER, APART),
             help="In the same engines, or in engines of their own with a link between them"),
        Knob("engines", "engines (apart: decode)", engines, (), 1, max(16, 2 * engines), 1),
        Knob("prefill", "prefill engines (apart)", prefill, (), 1, max(16, 2 * prefill), 1),
    ]  # fmt: skip


def _engine(engine: Mapping[str, Any]) -> list[Knob]:
    return [
        _number("seqs", "max_num_seqs", engine["max_num_seqs"], "engine.max_num_seqs", integral=True,
                help="Sequences that an engine runs at a time"),
        _number("chunk", "max_num_batched_tokens", engine["max_num_batched_tokens"], "engine.max_num_batched_tokens",
                integral=True, factor=2.0, help="Tokens of a step: the most of a prompt's chunk"),
    ]  # fmt: skip


def _goals(measure: Mapping[str, Any]) -> list[Knob]:
    goals = measure["slo"]
    return [
        replace(
            _number(name, f"goal: {name.upper()}, s", goals.get(name, usual), f"measure.slo.{name}",
                    help="A goal of each request"),
            stated=name in goals,
        )
        for name, usual in USUAL_GOALS.items()
    ]  # fmt: skip


def _afd_knobs(step_time: Mapping[str, Any]) -> list[Knob]:
    if step_time["source"] != "roofline":
        return []
    return [Knob("batch", "AFD: batch of an instance", 64, (), 8, 512, 8, help="Requests of a microbatch")]


def _system_settings(changed: Mapping[str, Value], choices: Choices, spec: ServingScenario) -> Settings:
    """Layout and numbers of engines, and the split of an engine: fields that depend on several knobs."""
    settings: Settings = {}
    if "tp" in changed:
        settings["step_time.tensor_parallel"] = int(choices["tp"])
    if not {"layout", "engines", "prefill"} & set(changed):
        return settings
    apart = choices["layout"] == APART
    if "layout" in changed:
        routing: Settings = {"routing": spec.system.model_dump(mode="json", by_alias=True)["routing"]}
        if apart:
            counts = {"prefill_replicas": choices["prefill"], "decode_replicas": choices["engines"]}
            return settings | {"system": {"layout": "disaggregated", **routing, **counts, "link": _link(choices)}}
        return settings | {"system": {"layout": "colocated", **routing, "replicas": choices["engines"]}}
    if apart:
        return settings | {"system.prefill_replicas": choices["prefill"], "system.decode_replicas": choices["engines"]}
    return settings | {"system.replicas": choices["engines"]}


def _link(choices: Choices) -> dict[str, float]:
    """A link for caches of the model; without a known model, of a cache of no size, which takes no time."""
    if "model" not in choices:
        return {"bandwidth": LINK_BANDWIDTH, "bytes_per_token": 0.0}
    model = any_model(str(choices["model"]), Path())
    return {"bandwidth": LINK_BANDWIDTH, "bytes_per_token": float(model.kv_bytes_per_token(2.0))}


Document = dict[str, Any]
Tell = Callable[[str, Document], None]
"""Called with a kind of answer (`draft`, `full`, `afd`, `pareto` or `error`) and the answer."""

DRAFT_REQUESTS = 300
PARETO_REQUESTS = 800
LOADS = (1.0, 0.25, 0.5, 1.5, 2.0, 3.0)
"""Loads of the Pareto chart, relative to the one chosen, which comes first."""

WARM_UP = 0.2
"""Share of the time of arrivals that a point of the Pareto chart leaves out at the begin; it ends with the arrivals."""

DEGREES = ("1", "2", "4", "8")
FFN_CARDS = (1, 2, 4, 8)
RATIOS = "1/2,1,2,4,8,16,32"


@dataclass(frozen=True)
class Inquiry:
    """A scenario as written, its file, and the most requests that an answer simulates."""

    document: Document
    path: Path
    requests: int = 2000

    @cached_property
    def spec(self) -> ServingScenario:
        return check_scenario(self.document, {}, self.path)

    @cached_property
    def knobs(self) -> list[Knob]:
        """Everything that can be changed, with the scenario's values."""
        document = self.spec.model_dump(mode="json", by_alias=True)
        return [
            *_workload(document["workload"]),
            *_step_time(document["step_time"]),
            *_system(document["system"]),
            *_engine(document["engine"]),
            *_goals(document["measure"]),
            *_afd_knobs(document["step_time"]),
        ]

    def settings(self, choices: Choices) -> Settings:
        """The fields of the scenario that differ from it under these choices."""
        changed = {knob.name: choices[knob.name] for knob in self.knobs if choices[knob.name] != knob.value}
        settings: Settings = {
            knob.field: None if choices[knob.name] == AS_PUBLISHED else choices[knob.name]
            for knob in self.knobs
            if knob.field and (knob.name in changed or not knob.stated)
        }
        return settings | _system_settings(changed, choices, self.spec)

    def changed(self, choices: Choices) -> Document:
        """The scenario under these choices, as `twin simulate` reads it from the same folder."""
        document = apply(self.document, self.settings(choices))
        check_scenario(document, {}, self.path)
        result: Document = _plain(document)
        return result

    def choices(self, query: Mapping[str, str]) -> Choices:
        """The choices that a link states; the scenario's where it states none, or none that can be."""
        choices: Choices = {}
        for knob in self.knobs:
            value = knob.read(query[knob.name]) if knob.name in query else None
            choices[knob.name] = knob.value if value is None else value
        return choices

    def link(self, choices: Choices) -> dict[str, str]:
        """The query of a link that restores these choices: those that differ from the scenario."""
        return {knob.name: str(value) for knob in self.knobs if (value := choices[knob.name]) != knob.value}


def _plain(value: Any) -> Any:
    """A document as a file has it: paths given on the command line are absolute, so that they do not depend on it."""
    if isinstance(value, CommandLineText):
        return str(Path(value).absolute()) if is_path(value) or Path(value).is_file() else str(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def answer(inquiry: Inquiry, choices: Choices, tell: Tell) -> None:
    """Answer what if: a draft of few requests first, then all of them, then the curves; or an error of one line."""
    try:
        settings = inquiry.settings(choices)
        requests = min(inquiry.requests, _requests(inquiry.spec, inquiry.path))
        if requests > DRAFT_REQUESTS:
            tell("draft", _simulated(inquiry, settings, DRAFT_REQUESTS))
        tell("full", _simulated(inquiry, settings, requests))
    except BadInput as error:
        tell("error", {"text": str(error)})
        return
    tell("afd", _afd(inquiry, choices))
    for name, degree, load in _pareto_points(choices):
        tell("pareto", _pareto_point(inquiry, settings, name, degree, load, choices))


def _requests(spec: ServingScenario, path: Path) -> int:
    """The requests of a scenario: those that it states, or the rows of its trace."""
    if spec.workload.requests is not None:
        return spec.workload.requests
    trace = spec.workload.read_trace(path.parent)
    assert trace is not None, "a workload without a trace states its requests"
    return len(trace)


def _simulated(inquiry: Inquiry, settings: Settings, requests: int) -> Document:
    changed = {**settings, "workload.requests": requests, "detail": True}
    result = simulate(read_plan(inquiry.document, inquiry.path, changed))
    document = run_document(result.plan, changed, result.report)
    document["series"] = timeseries(result.run, result.plan.scenario.measure)
    return document


def _pareto_points(choices: Choices) -> list[tuple[str, str | None, float]]:
    """Lines of the Pareto chart, as (name, tensor parallelism, load): the chosen split first."""
    if "tp" not in choices:
        return [("as chosen", None, load) for load in LOADS]
    degree = str(choices["tp"])
    degrees = [degree, *(option for option in DEGREES if option != degree)]
    return [(f"TP {degree}", degree, load) for degree in degrees for load in LOADS]


def _pareto_point(
    inquiry: Inquiry, settings: Settings, name: str, degree: str | None, load: float, choices: Choices
) -> Document:
    """Output tokens/s of a GPU and of a user at one load of each GPU; None of an overloaded system."""
    field, rate = _load_field(choices)
    point: Document = {"name": name, "load": load, "user": None, "gpu": None, "rate": None}
    if field is None:
        return point | {"reason": "no other loads: arrivals are recorded"}
    ratio = 1.0 if degree is None else int(degree) / int(choices["tp"])
    value: float = load * ratio * rate
    value = max(1, round(value)) if field.endswith("concurrency") else value
    changed = settings | {field: value, "workload.requests": PARETO_REQUESTS, "detail": False}
    if field.endswith("rate"):
        span = PARETO_REQUESTS / value
        changed |= {"measure.after": WARM_UP * span, "measure.before": span}
    if degree is not None:
        changed["step_time.tensor_parallel"] = int(degree)
    try:
        result = simulate(read_plan(inquiry.document, inquiry.path, changed))
    except BadInput as error:
        return point | {"reason": error.expected.removeprefix("expected ")}
    if result.report["overload"] is not None:
        return point | {"rate": value, "reason": f"overloaded at {value:.3g}"}
    summary = result.report["summary"]
    tpot, total = summary["tpot"], (describe_devices(result.plan.pools) or {}).get("total", 1)
    return point | {
        "user": 1 / tpot["mean"] if tpot else None,
        "gpu": summary["output_throughput"] / total if summary["output_throughput"] else None,
        "rate": value,
    }


def _load_field(choices: Choices) -> tuple[str | None, float]:
    if "rate" in choices:
        return "workload.arrivals.rate", float(choices["rate"])
    if "users" in choices:
        return "workload.arrivals.concurrency", float(choices["users"])
    return None, 0.0


def _afd(inquiry: Inquiry, choices: Choices) -> Document:
    """Closed forms of an AFD bundle of the chosen model, GPU and lengths, or the reason why there are none."""
    if "batch" not in choices or not {"prompt", "answer"} <= set(choices):
        return {"reason": "no AFD curve: it needs step times of source roofline, and lengths with a mean"}
    workload = inquiry.spec.model_dump(mode="json", by_alias=True)["workload"]
    lengths = {
        key: {name: value for name, value in {**workload[key], "mean": choices[knob]}.items() if value is not None}
        for key, knob in (("prefill", "prompt"), ("decode", "answer"))
    }
    reason, stated = "", choices["weights"]
    try:
        model = any_model(str(choices["model"]), inquiry.path.parent)
        published = model.formats().linear
    except BadInput as error:
        return {"reason": f"no AFD curve: {error}"}
    precision = "fp8" if (published if stated == AS_PUBLISHED else stated) == "fp8" else "bf16"
    for cards in FFN_CARDS:
        document = {
            "schema": "twin.scenario/1",
            "kind": "afd-bundle",
            "name": "bundle",
            "calibration": {
                "hardware": choices["gpu"],
                "model": choices["model"],
                "deployment": {"precision": precision, "ffn_cards": cards, "link": "intra_node"},
            },
            "batch_size": int(choices["batch"]),
            "microbatches": 3,
            "workload": lengths,
        }
        try:
            sweep = ratio_sweep.prepare(document, inquiry.path, RATIOS)
        except BadInput as error:
            reason = error.expected.removeprefix("expected ")
            continue
        theory, per_instance = sweep.theory[0]
        cards_of = sweep.cases[0].plan.cards
        bundle: Document = {"curves": per_instance, "cards": {"attention": cards_of.attention, "ffn": cards_of.ffn}}
        curves = {name: curve_per_unit(bundle, name, "card") for name in ("theory", "barrier")}
        return {**bundle, "curves": {"ratio": per_instance["ratio"], **curves}, "theory": theory}
    return {"reason": f"no AFD curve: {reason}"}
