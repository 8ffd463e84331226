"""Knobs of a what-if page: sliders and choices, and the fields that they set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from latency_models.deployment.hugging_face import any_model
from latency_models.io.builtin_files import builtin_names
from scenarios.overrides import Settings
from scenarios.serving import ServingScenario

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


def knobs_of(spec: ServingScenario) -> list[Knob]:
    """The knobs that a scenario has, with its values."""
    document = spec.model_dump(mode="json", by_alias=True)
    return [
        *_workload(document["workload"]),
        *_step_time(document["step_time"]),
        *_system(document["system"]),
        *_engine(document["engine"]),
        *_goals(document["measure"]),
        *_afd(document["step_time"]),
    ]


def settings_of(knobs: list[Knob], choices: Choices, spec: ServingScenario) -> Settings:
    """The fields of the scenario that differ from it under these choices."""
    changed = {knob.name: choices[knob.name] for knob in knobs if choices[knob.name] != knob.value}
    settings: Settings = {
        knob.field: None if choices[knob.name] == AS_PUBLISHED else choices[knob.name]
        for knob in knobs
        if knob.field and (knob.name in changed or not knob.stated)
    }
    return settings | _system_settings(changed, choices, spec)


def from_link(knobs: list[Knob], query: Mapping[str, str]) -> Choices:
    """The choices that a link states; the scenario's where it states none, or none that can be."""
    choices: Choices = {}
    for knob in knobs:
        value = knob.read(query[knob.name]) if knob.name in query else None
        choices[knob.name] = knob.value if value is None else value
    return choices


def to_link(knobs: list[Knob], choices: Choices) -> dict[str, str]:
    """The query of a link that restores these choices: those that differ from the scenario."""
    return {knob.name: str(value) for knob in knobs if (value := choices[knob.name]) != knob.value}


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


def _afd(step_time: Mapping[str, Any]) -> list[Knob]:
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
