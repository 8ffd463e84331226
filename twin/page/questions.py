"""Computations of a what-if page: answers of a few hundredths of a second, and curves point by point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from latency_models.deployment.hugging_face import any_model
from latency_models.io.builtin_files import CommandLineText, is_path
from reports.afd_report import curve_per_unit
from scenarios.overrides import Settings, apply
from scenarios.serving import ServingScenario, check_scenario
from twin.page.knobs import AS_PUBLISHED, Choices, Knob, knobs_of, settings_of, to_link
from twin.serving.plan.pools import describe_devices
from twin.serving.results.report import run_document
from twin.serving.results.timeseries import timeseries
from twin.sweeps import ratio_sweep
from twin.sweeps.one_run import read_plan, simulate
from workloads.errors import BadInput

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
        """Everything that can be changed."""
        return knobs_of(self.spec)

    def changed(self, choices: Choices) -> Document:
        """The scenario under these choices, as `twin simulate` reads it from the same folder."""
        spec = self.spec
        document = apply(self.document, settings_of(self.knobs, choices, spec))
        check_scenario(document, {}, self.path)
        result: Document = _plain(document)
        return result

    def link(self, choices: Choices) -> dict[str, str]:
        """The query that restores these choices."""
        return to_link(self.knobs, choices)


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
        spec, knobs = inquiry.spec, inquiry.knobs
        settings = settings_of(knobs, choices, spec)
        requests = min(inquiry.requests, _requests(spec, inquiry.path))
        if requests > DRAFT_REQUESTS:
            tell("draft", _simulated(inquiry, settings, DRAFT_REQUESTS))
        tell("full", _simulated(inquiry, settings, requests))
    except BadInput as error:
        tell("error", {"text": str(error)})
        return
    tell("afd", _afd(inquiry, knobs, choices))
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


def _afd(inquiry: Inquiry, knobs: list[Knob], choices: Choices) -> Document:
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
