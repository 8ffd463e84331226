"""A scenario and a measured run that corrects it: the question, and what a run must give as its evidence.

A run is the times of the requests of a real engine, from the files that engines and load generators write.
"""

from __future__ import annotations

import json
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
from twin.serving.plan.plan import ServingPlan, make_plan
from twin.serving.results.report import compare
from twin.serving.results.uncertainty import combine
from workloads.errors import BadInput, readable
from workloads.json_files import number_lines
from workloads.trace import Trace

Floats = NDArray[np.float64]

REQUESTS, META = "requests.jsonl", "meta.json"

_NEEDED = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True, eq=False)
class RequestTimes:
    """Times of requests in order of arrival, seconds of one clock: when each began, and its first and last token."""

    start: Floats
    first: Floats
    last: Floats

    def __len__(self) -> int:
        return len(self.start)

    @property
    def ttft(self) -> Floats:
        """Seconds from the start to the first token."""
        return self.first - self.start

    @property
    def decoding(self) -> Floats:
        """Seconds from the first to the last token; 0 for answers of one token."""
        return self.last - self.first


@dataclass(frozen=True, eq=False)
class MeasuredRun(RequestTimes):
    """Requests of one run, which begin when the engine queued them, or were sent (`by_client`, with the network).

    `meta`: the engine's settings beside the file.
    """

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    source: Path
    by_client: bool = False
    meta: dict[str, Any] | None = None

    @property
    def trace(self) -> Trace:
        """Arrivals and lengths, as a workload."""
        return Trace(self.source.stem, self.start - self.start[0], self.prompts, self.answers)


def read_measured_run(path: Path) -> MeasuredRun:
    """Read a run: a folder with `requests.jsonl`, such a file, or the result of `vllm bench serve --save-detailed`.

    A line has input_toks, output_toks, queued_ts, first_token_ts, last_token_ts in seconds of one clock.
    """
    file = path / REQUESTS if path.is_dir() else path
    with readable(file):
        text = file.read_text(encoding="utf-8")
    document, meta = _whole_document(text), read_meta(file.parent)
    table = _requests(file, text) if document is None else _benchmark(file, document)
    start, first, last, prompts, answers = table[:, np.argsort(table[0], kind="stable")]
    by_client = document is not None or bool(meta and meta.get("times") == "client")
    run = MeasuredRun(start, first, last, prompts.astype(np.int64), answers.astype(np.int64), file, by_client, meta)
    if not (np.isfinite(last).all() and (run.ttft > 0).all() and (run.decoding >= 0).all()):
        raise BadInput("expected first tokens after their requests, and finite times", file=file)
    return run


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The settings in a run's `meta.json`; None if there is none."""
    file = folder / META
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"expected a JSON document ({error})", file=file) from None
    if not isinstance(document, dict):
        raise BadInput("expected a JSON object", file=file)
    return document


def _whole_document(text: str) -> dict[str, Any] | None:
    """The result of a benchmark, if the text is that and not a line for each request."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "input_lens" in document else None


def _requests(file: Path, text: str) -> Floats:
    """Start, first and last token, prompt and output tokens of each line, shape (5, n)."""
    rows: list[tuple[float, ...]] = []
    for line, row in number_lines(file, text, _NEEDED):
        prompt, answer, queued, first, last = row
        if not (np.isfinite(row).all() and queued <= first <= last):
            raise BadInput("expected queued_ts, first_token_ts and last_token_ts in this order", file=file, line=line)
        if prompt < 0 or answer < 1 or not (prompt.is_integer() and answer.is_integer()):
            raise BadInput("expected input_toks of 0 or more and output_toks of 1 or more", file=file, line=line)
        rows.append((queued, first, last, prompt, answer))
    return np.array(rows).T


def _benchmark(file: Path, document: dict[str, Any]) -> Floats:
    """The same of the result of vLLM's benchmark: its client's times."""
    names = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
    for name in names:
        if not isinstance(document.get(name), list) or len(document[name]) != len(document["input_lens"]):
            expected = "expected a list with an entry for each request, as vllm bench serve --save-detailed writes it"
            raise BadInput(expected, file=file, field=name)
    if not document["input_lens"]:
        raise BadInput("expected at least one request", file=file, field="input_lens")
    for i, error in enumerate(document.get("errors") or []):
        if error:
            raise BadInput("expected no failed request", file=file, field=f"errors[{i}]", value=error)
    try:
        table = [[float(sum(value)) if name == "itls" else float(value) for value in document[name]] for name in names]
    except (TypeError, ValueError):
        raise BadInput("expected numbers, and lists of numbers in itls", file=file) from None
    prompts, answers, starts, ttfts, decoding = np.array(table)
    first = starts + ttfts
    return np.array([starts, first, first + decoding, prompts, answers])


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


Advance = Callable[[str], object]


def factor_names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated text; none for all factors."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


MAX_FITTED = 600
"""Durations that a fit takes at most: its time grows with their cube."""


@dataclass(frozen=True)
class Question:
    """A scenario, by its path, content and changed fields, and the file or folder of a measured run.

    `first`: requests or steps to fit; None: `SHARE` of them. `factors`: names of the unknowns to learn; empty: all.
    `spread`: requests to fit are spread over the run in place of the first ones, so that a drift of the machine is in
    both parts. `since`: seconds since 1970 before which metrics pages are left out.
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
        metric: the row of errors whose held-out part tells how far a refined engine is from itself later; `min_drift`:
            lower bound of that deviation.
        scenario: with the settings of the run. step_time: of all its pools. notes: on what was read or assumed.
    """

    kind: ClassVar[str]
    metric: str
    noise_kinds: ClassVar[Sequence[str]] = ("step",)
    min_drift: ClassVar[float] = 0.005
    scenario: ServingScenario
    step_time: StepTime
    notes: list[str]

    @abstractmethod
    def estimate(self, names: Sequence[str]) -> Posterior:
        """Scores of unknowns, from the part of the run that is fitted."""

    def mean_factor(self, typical: RefinedStepTime) -> tuple[float, float] | None:
        """Logarithm of the factor from typical step times, of the estimated scores, to their means; its deviation.

        Both are 0 where means are learned from. None if the fit is worse than the step times before it.
        """
        return 0.0, 0.0

    @abstractmethod
    def errors(self, refined: RefinedStepTime) -> dict[str, Any]:
        """Errors before and after the refinement, of the part that is fitted (`fit`) and of the others (`rest`)."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The fields of the document on what was read and fitted."""


def read_settings(question: Question, meta: Mapping[str, Any], source: str) -> tuple[Settings, Settings, list[str]]:
    """The engine's own settings (`meta`, from `source`) in place of the scenario's, unless the question states others.

    Returns all changed fields of the scenario, those that were read, and a note on each of them.
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


def plan_of(question: Question, settings: Settings) -> ServingPlan:
    """The plan of the scenario with these settings."""
    scenario, base = check_scenario(question.document, settings, question.path), question.path.parent
    return make_plan(scenario, base, scenario.workload.read_trace(base))


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
    """Measured metrics with predictions before and after, and with intervals by draws of the refined model."""
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
