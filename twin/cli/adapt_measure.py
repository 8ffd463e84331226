"""`twin adapt measure`: quality, memory and time per token of language models, and the predicted time, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from twin.cli.adapt_options import SOURCES, TorchOptions
from twin.cli.options import FLAG, Json
from workloads.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from scenarios.validation import ValidationScenario

SCHEMA = "twin.quality-and-latency/1"

SHOWN = ("tpot.mean", "ttft.mean", "output_throughput")
"""Metrics of a validation that are taken over."""

REPEATS = 2

LONGEST = 240
"""Tokens of a profiled prompt and answer, at most; prompts of the workload have up to half, answers up to a quarter."""


def measure(
    models: Annotated[list[Path], FLAG],
    /,
    *,
    load: float = 0.7,
    requests: int = 60,
    concurrency: int = 8,
    rounds: int = 20,
    sources: SOURCES = None,
    seed: int = 0,
    json: Json = False,
    runs: Path = Path("runs"),
) -> int:
    """Measure quality, memory and speed of language models, and predict the speed by the twin.

    The models are one model at several precisions: as `twin adapt text` writes it, and as `twin adapt quantise` and
    `twin adapt compensate` do. Each is served by one engine at a share of its own capacity. Time is the CPU time of the
    engine's own computation, on one thread. The twin's prediction is made beforehand, from a profile of the engine:
    each run folder has the whole comparison, as of `twin validate`.

    Args:
        models: Model directories; divergence is from the first.
        load: Requests per second, as a share of the engine's predicted capacity.
        requests: Requests of each of two repeats, at a load of 1.
        concurrency: Sequences of a batch, at most.
        rounds: Rounds of profiling.
        seed: Seed of the requests.
        runs: Parent of the run folders.
    """
    if not 0 < load < 1:
        raise BadInput("expected a number between 0 and 1", field="--load", value=load)
    TorchOptions(seed).start(requests=(requests, 4), concurrency=(concurrency, 1), rounds=(rounds, 10))
    from live.adaptation.compensation.measures import text_quality
    from reports.adaptation import measured_report
    from twin.cli.console import note, print_result

    quality = text_quality(models, sources)
    rows = []
    for directory, row in zip(models, quality, strict=True):
        scenario = _scenario(directory, load, requests, concurrency, rounds, seed)
        rows.append({"model": str(directory), **row, **_latency(scenario, directory, runs, note)})
    document = {"schema": SCHEMA, "load": load, "concurrency": concurrency, "seed": seed, "models": rows}
    print_result(document, measured_report, as_json=json)
    return 0


def _scenario(
    directory: Path, load: float, requests: int, concurrency: int, rounds: int, seed: int
) -> ValidationScenario:
    """The validation of one engine that serves a model on one CPU thread."""
    from live.models.config import read_config
    from scenarios.validation import check_validation

    longest = min(LONGEST, read_config(directory).max_position_embeddings // 2)
    document = {
        "schema": "twin.scenario/1",
        "kind": "validation",
        "name": "adapt-measure",
        "seed": seed,
        "model": {"path": str(directory.resolve())},
        "workload": {
            "requests": requests,
            "prefill": {"distribution": "uniform", "low": longest // 30, "high": longest // 2},
            "decode": {"distribution": "uniform", "low": longest // 30, "high": longest // 4},
            "arrivals": {"process": "poisson"},
        },
        "engine": {"num_gpu_blocks": 1024, "max_num_seqs": concurrency, "max_num_batched_tokens": 128},
        "loads": [load],
        "repeats": REPEATS,
        "profiling": {
            "rounds": rounds, "max_steps": 50, "max_prompt_tokens": longest, "max_output_tokens": longest,
        },
    }  # fmt: skip
    return check_validation(document, {}, directory / "scenario.yaml").on_device("cpu")


def _latency(scenario: ValidationScenario, directory: Path, runs: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measured and predicted metrics of an engine, and its predicted capacity in requests per second."""
    from live.validation.backend import LiveBackend, model_source
    from reports.records.run_directory import fingerprint, open_run
    from twin.api.run_folder import complete, manifest
    from twin.validation.run import EngineValidation

    engine = LiveBackend(model_source(scenario.model, directory, scenario.seed), clock="direct")
    described = scenario.model_dump(mode="json", by_alias=True)
    content = manifest({"scenarios": [described]})
    paths = sorted([*directory.glob("*.safetensors"), directory / "config.json"])
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    identity = fingerprint([described, content["version"], files])
    with open_run(runs, "adapt-measure", identity, content, resume=True) as run:
        document = EngineValidation(engine, scenario, directory, None, run, note).document()
        document = complete(run, document | {"missed": [], "tolerance": 1.0}, figures=True)
    metrics = document["loads"][0]["metrics"]
    rows = {name: {key: metrics[name][key] for key in ("measured", "predicted", "error")} for name in SHOWN}
    return {"capacity": document["capacity"], "metrics": rows, "run": document["run"]}
