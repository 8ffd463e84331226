"""From a running server to a scenario: its settings, some minutes of requests, and step times that these correct."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.hugging_face import any_model
from latency_models.io.config_io import write_yaml
from latency_models.io.files import name_on_command_line
from scenarios.engine import EngineSpec
from scenarios.reading import Settings, apply
from schedulers.engine_config import NULL_BLOCKS
from twin.recording.run_writer import RunWriter, require_empty
from twin.recording.server_pages import (
    LiveServer,
    Scrape,
    Upstream,
    between,
    key_headers,
    read_scrapes,
    read_server,
    record_scrapes,
)
from twin.recording.traffic import Target, play
from twin.refinement.question import REQUESTS, STEP_TIME, MeasuredRun, Question, read_measured_run
from twin.refinement.refine import Refinement, refine
from workloads.errors import BadInput
from workloads.lengths import LogNormal
from workloads.trace import Trace
from workloads.traces import read_trace

Document = dict[str, Any]
Note = Callable[[str], object]

CPU = "cpu"
"""In place of a GPU: a device without a data sheet, whose step times are a line that the run alone teaches."""

SPREAD = 1.0
"""Deviation of each coefficient of that line before the run, as a logarithm."""

PROBES, IN_FLIGHT = 5, 2.0
"""Single requests that are sent before and after, of one token and of mean lengths, and requests in flight on average
when nothing says the rate."""

STEADY = 0.05
"""Relative difference of these from before to after that other programs, or a hot device, explain."""

PROMPT, ANSWER = 512, 128
"""Mean lengths in tokens where neither flags nor the server's metrics say any, at most an eighth of the context."""

MOST_REQUESTS, MOST_FITTED = 1000, 250
"""Requests of a replay, and of its first half those that are learned from."""

ROOM = 1.25
"""Goals of the question over what was measured."""

GROWTH = 4
"""The question's rate over that of the run."""

GIB = 2**30
DEFAULTS = ((160 * GIB, (1024, 16384)), (70 * GIB, (1024, 8192)), (0, (256, 2048)))
"""vLLM's `max_num_seqs` and `max_num_batched_tokens` of a server, by the least memory of a GPU."""

CPU_DEFAULTS = (128, 2048)

SCHEDULERS = ((0, 33, "vllm-0.33"), (0, 20, "vllm-0.32"), (0, 0, "vllm-0.19"))
"""Names of `engine.scheduler` by the first version of vLLM that they stand for."""


@dataclass(frozen=True)
class AdoptionOptions:
    """The flags of `twin adopt`; None where one is not given."""

    gpu: str | None = None
    model: str | None = None
    model_config: str | None = None
    observe: float | None = None
    replay: float | None = None
    requests: Path | None = None
    rate: float | None = None
    prompt_tokens: float | None = None
    answer_tokens: float | None = None
    vocabulary: int = 1000
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class _Session:
    """A server under measurement, a folder for its runs, and functions that print a line and count a request."""

    live: LiveServer
    target: Target
    folder: Path
    note: Note
    advance: Note


@dataclass(frozen=True)
class Adoption:
    """What a server says of itself, what the run taught, and the question's requests a second."""

    server: LiveServer
    refinement: Refinement
    rate: float


def adopt(url: str, folder: Path, options: AdoptionOptions, note: Note, advance: Note = lambda text: None) -> Adoption:
    """Read a server, measure it, refine step times, and write the scenario and the question into a folder.

    Raises `BadInput` for a server that does not answer, and for what it does not publish, by the flag that says it.
    """
    require_empty(folder, "--into")
    server = Upstream.of(url, "URL")
    live = read_server(server, key_headers(), options.model)
    note(f"{live.engine} {live.version} serves {live.weights}")
    gpu = _gpu(live, options.gpu)
    target = Target(server, live.model, key_headers(), options.vocabulary)
    session = _Session(live, target, folder, note, advance)
    document: Document = {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": f"adopted-{Path(live.weights).name.lower()}",
        "engine": _engine(live, gpu, note),
    }
    section = None if gpu == CPU else _roofline(live, gpu, options.model_config)
    if options.observe is not None:
        sections, run = _observe(session, section, options.observe)
    else:
        sections, run = _replay(session, section, options)
    document |= sections
    document = apply(document, options.settings)
    path = folder / "scenario.yaml"
    first = None
    if (run / REQUESTS).exists():
        first = max(min(len(read_measured_run(run)) // 2, MOST_FITTED), 2)
    refinement = refine(Question(path, document, options.settings, run, first, spread=first is not None), advance)
    for text in refinement.notes:
        note(text)
    (folder / "refined.yaml").write_text(write_yaml({"folder": ".", **refinement.file}), encoding="utf-8")
    return Adoption(live, refinement, _write(document, path, run, gpu, section or {}))


def _gpu(live: LiveServer, flag: str | None) -> str:
    """The hardware of the catalogue, a file's path, or CPU."""
    if flag == CPU or (flag is None and live.device == CPU):
        return CPU
    if flag is not None:
        return name_on_command_line("hardware", "--gpu", flag)
    if not live.gpu:
        raise BadInput("expected the server's GPU, which it does not publish: h100, a file, or cpu", field="--gpu")
    return live.gpu


def _engine(live: LiveServer, gpu: str, note: Note) -> Document:
    """The section `engine`: settings that are published, and vLLM's defaults of those that are not."""
    engine: Document = {name: live.settings[name] for name in EngineSpec.model_fields if name in live.settings}
    if "num_gpu_blocks" in engine:
        engine["num_gpu_blocks"] -= NULL_BLOCKS
    if engine.get("scheduling_policy", "fcfs") not in ("fcfs", "priority"):
        engine.pop("scheduling_policy")
    if live.engine == "SGLang":
        return engine | {"scheduler": "sglang"}
    if "max_num_seqs" not in engine:
        memory = 0.0 if gpu == CPU else load_hardware(gpu).memory_capacity
        sizes = CPU_DEFAULTS if gpu == CPU else next(sizes for least, sizes in DEFAULTS if memory >= least)
        defaults = dict(zip(("max_num_seqs", "max_num_batched_tokens"), sizes, strict=True))
        defaults["async_scheduling"] = live.engine == "vLLM" and gpu != CPU
        engine |= defaults
        text = ", ".join(f"engine.{name}={str(value).lower()}" for name, value in defaults.items())
        note(f"not published, and taken to be vLLM's defaults: {text}; others by --set")
    if live.engine == "vLLM":
        numbers = [int(part) for part in live.version.split(".")[:2] if part.isdecimal()] or [1]
        engine["scheduler"] = next(name for *least, name in SCHEDULERS if numbers >= least)
    return engine


def _roofline(live: LiveServer, gpu: str, config: str | None) -> Document:
    """The section `step_time` of a GPU: from its data sheet, with the server's parallelism and formats."""
    name = live.weights if config is None else name_on_command_line("models", "--model-config", config)
    try:
        model = any_model(name)
    except BadInput as error:
        expected = f"expected the config.json of {live.weights}, whose shapes are not known here: {error.expected}"
        raise BadInput(expected, field="--model-config", value=config) from None
    section: Document = {"source": "roofline", "model": name, "hardware": gpu}
    usual = {"enable_expert_parallel": False}
    for theirs, ours in STEP_TIME.items():
        if live.settings.get(theirs, usual.get(theirs, 1)) != usual.get(theirs, 1):
            section[ours] = live.settings[theirs]
    if str(live.settings.get("cache_dtype", "")).startswith("fp8"):
        section["cache"] = "fp8"
    if "fp8" in str(live.settings.get("quantization", "")) and str(model.published_formats) == "bf16":
        section["weights"] = "fp8"
    return section


def _linear(ttft: float, prompt: float, tpot: float) -> Document:
    """The section `step_time` of a device without a data sheet: a line through a lone request's ttft and tpot."""
    per_token = max((ttft - tpot) / prompt, tpot / 1000)
    return {
        "source": "linear",
        "overhead": _digits(max(tpot - per_token, tpot / 2)),
        "per_token": _digits(per_token),
        "per_kv_token": _digits(tpot / 1e5),
        "spread": SPREAD,
    }


def _observe(session: _Session, section: Document | None, seconds: float) -> tuple[Document, Path]:
    """Metrics pages of some minutes; returns workload and step times by what they say, and their folder."""
    pages, target = session.folder / "pages", session.target
    every = seconds / 4
    session.note(f"reading /metrics every {every:g} s for {seconds:g} s")
    record_scrapes(target.server, pages, target.headers, every=every, duration=seconds)
    scrapes = read_scrapes(pages)
    work = between(scrapes[0], scrapes[-1])
    means = work.means
    if section is None:
        tpot = means.get("itl.mean") or means.get("tpot.mean")
        if tpot is None or "ttft.mean" not in means:
            raise BadInput("expected a page with time to first token and inter-token latency", field="--observe")
        section = _linear(means["ttft.mean"], means["prompt_tokens"], tpot)
    workload = {
        "requests": max(min(work.finished, MOST_REQUESTS), 100),
        "prefill": {"distribution": "lognormal", "mean": _digits(means["prompt_tokens"]), "cv": 1.0},
        "decode": {"distribution": "lognormal", "mean": _digits(means["output_tokens"]), "cv": 1.0},
        "arrivals": {"process": "poisson", "rate": _digits(means["request_throughput"])},
    }
    return {"workload": workload, "step_time": section}, pages


def _replay(session: _Session, section: Document | None, options: AdoptionOptions) -> tuple[Document, Path]:
    """Requests that are sent for some minutes; returns the sections that replay them, and the folder of their times."""
    live, target, folder = session.live, session.target, session.folder
    if live.busy and options.replay is None:
        expected = f"expected --observe SECONDS, or --replay SECONDS to send more: {live.busy} requests are running"
        raise BadInput(expected, field="URL")
    seconds = 300.0 if options.replay is None else options.replay
    trace = None if options.requests is None else _until(read_trace(options.requests), seconds, options.requests)
    prompt, answer = _mean_lengths(live, options)
    lengths = round(prompt), max(round(answer), 2)
    short, probe = _probe(target, folder / "probe-short", 1, 2), _probe(target, folder / "probe", *lengths)
    latency = _latency(probe)
    tpot = float(np.median(probe.decoding / (probe.answers - 1)))
    # A prompt of one token takes a step like any other; what is left is the server's, outside of steps.
    route = max(float(np.median(short.ttft)) - tpot, 0.0)
    if section is None:
        section = _linear(float(np.median(probe.ttft)) - route, float(probe.prompts.mean()), tpot)
    trace = trace or _trace(seconds, prompt, answer, options.rate or IN_FLIGHT / latency, live)
    session.note(f"sending {len(trace)} requests in {seconds:g} s; one alone took {latency:.3g} s")
    run = folder / "run"
    meta = {"source": "twin adopt", "upstream": f"{target.server.host}:{target.server.port}", "model": live.model}
    with closing(RunWriter(run, {**meta, "engine_effective": dict(live.settings)})) as writer:
        late = play(trace, target, writer, advance=session.advance)
    change = _latency(_probe(target, folder / "probe-after", *lengths)) / latency - 1
    if abs(change) > STEADY:
        session.note(f"the server's speed has changed: a request alone takes {change:+.0%} longer than before")
    if writer.skipped:
        session.note(f"{writer.skipped} of {len(trace)} requests failed: {_first_failure(run)}")
    if late > 0.05:
        session.note(f"requests were sent up to {late:.2f} s late: this machine could not keep up")
    workload = {"trace": {"path": f"run/{REQUESTS}"}, "arrivals": {"process": "replay"}}
    system = {"layout": "colocated", "replicas": 1, "frontend": {"route": _digits(route)}}
    return {"workload": workload, "step_time": section, "system": system}, run


def _mean_lengths(live: LiveServer, options: AdoptionOptions) -> tuple[float, float]:
    """Mean tokens of prompts and answers: by flags, by what the server has answered until now, or the defaults."""
    means: Mapping[str, float] = {} if live.page is None else _means(live.page)
    share = (live.max_model_len or 8 * PROMPT) // 8
    prompt = options.prompt_tokens or means.get("request_prompt_tokens") or min(PROMPT, share)
    answer = options.answer_tokens or means.get("request_generation_tokens") or min(ANSWER, share)
    return prompt, answer


def _means(page: Scrape) -> dict[str, float]:
    """Means of histograms since the server started, of those with 20 requests or more."""
    names = ("request_prompt_tokens", "request_generation_tokens")
    counts = {name: page.values.get(f"vllm:{name}_count", 0.0) for name in names}
    return {name: page.values[f"vllm:{name}_sum"] / count for name, count in counts.items() if count >= 20}


def _probe(target: Target, folder: Path, prompt: int, answer: int) -> MeasuredRun:
    with closing(RunWriter(folder, {"source": "twin adopt"})) as writer:
        for i in range(PROBES):
            alone = Trace("probe", np.zeros(1), np.array([max(prompt - i, 1)]), np.array([answer]))
            play(alone, target, writer)
    if writer.skipped:
        raise BadInput(f"expected a server that completes token ids: {_first_failure(folder)}", field="URL")
    return read_measured_run(folder)


def _latency(probe: MeasuredRun) -> float:
    return float(np.median(probe.last - probe.start))


def _first_failure(folder: Path) -> str:
    line = (folder / "skipped.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return str(json.loads(line)["why"])


def _trace(seconds: float, prompt: float, answer: float, rate: float, live: LiveServer) -> Trace:
    count = max(min(round(rate * seconds), MOST_REQUESTS), 4)
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    most = (live.max_model_len or 2**20) // 2 - 1
    prompts, answers = (LogNormal(mean, 1.0).sample(rng, count) for mean in (prompt, answer))
    return Trace("adopt", arrivals - arrivals[0], np.minimum(prompts, most), np.minimum(np.maximum(answers, 2), most))


def _until(trace: Trace, seconds: float, file: Path) -> Trace:
    if trace.arrivals is None:
        raise BadInput("expected a trace with arrival times", field="--requests", file=file)
    count = min(int(np.searchsorted(trace.arrivals, seconds, side="right")), MOST_REQUESTS)
    if count < 4:
        raise BadInput(f"expected 4 requests or more in {seconds:g} s", field="--requests", file=file, value=count)
    return Trace(trace.name, trace.arrivals[:count], trace.prefill_tokens[:count], trace.decode_tokens[:count])


def _write(document: Document, path: Path, run: Path, gpu: str, section: Document) -> float:
    """Write the scenario and the question; returns the rate of the question."""
    width = math.prod(section.get(name, 1) for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"))
    device = {"type": gpu if "/" not in gpu else Path(gpu).stem, "count": width}
    scenario = {**document, "step_time": {"source": "refined", "path": "refined.yaml"}}
    pool = {"name": "engine", "role": "both", "replicas": 1, "device": device}
    frontend = {name: value for name, value in document.get("system", {}).items() if name == "frontend"}
    system = {"layout": "pools", **frontend, "pools": [pool]}
    path.write_text(write_yaml({**scenario, "system": system}), encoding="utf-8")
    goals, rate = _goals(run)
    higher = _digits(GROWTH * rate)
    plan = {"goals": goals, "engines": [{"name": "today", "device": device}], "layouts": ["colocated"]}
    workload = {**document["workload"], "arrivals": {"process": "poisson", "rate": higher}}
    workload.pop("requests", None)
    question = {**scenario, "name": f"plan-{document['name']}", "workload": workload, "plan": plan}
    question.pop("system", None)  # which the plan chooses
    path.with_name("plan.yaml").write_text(write_yaml(question), encoding="utf-8")
    return higher


def _goals(run: Path) -> tuple[Document, float]:
    """Goals with some room above what was measured, and requests a second."""
    if not (run / REQUESTS).exists():
        scrapes = read_scrapes(run)
        work = between(scrapes[0], scrapes[-1])
        means = {f"{name}_mean": work.means.get(f"{name}.mean") for name in ("ttft", "itl")}
        return {name: _digits(ROOM * value) for name, value in means.items() if value}, work.means["request_throughput"]
    times = read_measured_run(run)
    several = times.answers > 1
    tpot = times.decoding[several] / (times.answers[several] - 1)
    goals = {"ttft_p99": np.percentile(times.ttft, 99), "tpot_p99": np.percentile(tpot, 99)}
    duration = float(times.start[-1] - times.start[0])
    return {name: _digits(ROOM * float(value)) for name, value in goals.items()}, (len(times) - 1) / duration


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def next_commands(folder: Path, adoption: Adoption) -> list[str]:
    """The commands that use the files."""
    place = relpath(folder)
    return [
        f"twin simulate {place}/scenario.yaml",
        f"twin plan {place}/plan.yaml --rate {adoption.rate:g} --write {place}/deployment",
    ]
