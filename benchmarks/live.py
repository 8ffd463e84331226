"""Speed of the live engine, compared with the device's ceilings and with published figures.

    python -m benchmarks.live --device cuda [--out FILE]

Weights are random at real shapes. Every workload runs three ways on the same model in the same process: kernels
launched one by one, steps replayed as graphs, and graphs with the next step launched before the last is known. Figures
are medians over repeats. Floors are bytes and operations over ceilings measured in the same run. Exit code 4 when an
aim is missed. `--device cpu --tiny` goes the same way on a tiny model to see that it runs; nothing is judged there.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.kernels import MISSED, RANK, Bench, about
from kernels.cases import random_compensator
from kernels.sampling import SamplingParams
from kernels.w4_gemm import PackedWeight
from live.engine import Engine
from live.executor import Executor
from live.generation import Generation, make_generation
from live.graphs.executor import GraphExecutor
from live.models.config import read_config
from live.models.decoder import Decoder
from live.models.linear import Compensated, Matrix, Rounding
from live.models.weights import DenseFFN, Layer, Weights, random_weights
from schedulers.engine_config import EngineConfig, OneShotBudget

MODELS = Path(__file__).resolve().parents[1] / "examples" / "models"
BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)

MODES: dict[str, tuple[Callable[..., Executor], int]] = {
    "eager": (Executor, 1),
    "graphs": (GraphExecutor, 1),
    "graphs, a step ahead": (GraphExecutor, 2),
}

Metric = Literal["ttft", "tpot", "requests"]


@dataclass(frozen=True)
class Published:
    """A published figure: seconds, or requests a second."""

    system: str
    value: float
    device: str
    source: str


@dataclass(frozen=True)
class Workload:
    """A closed loop of concurrent requests with prompts and outputs of fixed lengths.

    Attributes:
        bits: of the linear layers' weights: 16, or 4 in groups of 128.
        metric: the judged figure: median seconds to the first token, median seconds a token after it, or requests a
            second. aim: of it.
        compensated: whether linear layers have error compensators of rank `RANK` (SPEAR).
    """

    name: str
    model: str
    bits: int
    prompt: int
    answer: int
    concurrency: int
    requests: int
    metric: Metric
    aim: float
    published: tuple[Published, ...] = ()
    compensated: bool = False


PRELUDE = "Prelude, tables 4 to 6; over HTTP"
SPEAR = "SPEAR, figure 8; prompt 128, 64 tokens"

WORKLOADS = [
    Workload(
        "Qwen3-0.6B, 128 in, 1 out, alone", "qwen3-0.6b", 16, 128, 1, 1, 100, "ttft", 1.5e-3,
        (Published("Prelude", 5.1e-3, "H200", PRELUDE), Published("vLLM", 13.3e-3, "H200", PRELUDE),
         Published("SGLang", 28.2e-3, "H200", PRELUDE)),
    ),
    Workload(
        "Qwen3-4B, 512 in, 1 out, 96 at once", "qwen3-4b", 16, 512, 1, 96, 400, "requests", 190.0,
        (Published("Prelude", 186.7, "H200", PRELUDE), Published("vLLM", 134.5, "H200", PRELUDE),
         Published("SGLang", 151.5, "H200", PRELUDE)),
    ),
    Workload(
        "Qwen3-4B, 512 in, 1 out, alone", "qwen3-4b", 16, 512, 1, 1, 100, "ttft", 7e-3,
        (Published("Prelude", 15.4e-3, "H200", PRELUDE), Published("vLLM", 18.1e-3, "H200", PRELUDE)),
    ),
    Workload(
        "Qwen3-0.6B, 128 in, 32 out, 4 at once", "qwen3-0.6b", 16, 128, 32, 4, 100, "tpot", 0.75e-3,
        (Published("vLLM", 1.7e-3, "H200", PRELUDE), Published("Prelude", 2.1e-3, "H200", PRELUDE)),
    ),
    Workload(
        "Llama-2-7B in 4 bits, 128 in, 64 out, alone", "llama-2-7b", 4, 128, 64, 1, 6, "tpot", 1.25e-3,
        (Published("MARLIN", 3.8e-3, "GH200", SPEAR),),
    ),
    Workload(
        "Llama-2-7B in 4 bits with compensators, 128 in, 64 out, alone", "llama-2-7b", 4, 128, 64, 1, 6, "tpot",
        1.35e-3, (Published("SPEAR", 4.7e-3, "GH200", SPEAR),), compensated=True,
    ),
    Workload(
        "Llama-3.1-8B, 128 in, 64 out, alone", "llama-3.1-8b", 16, 128, 64, 1, 6, "tpot", 3.9e-3,
        (Published("torchao", 7.44e-3, "H100", "torchao, quoted in this project's notes and not looked up again"),),
    ),
    Workload("Llama-3.1-8B in 4 bits, 128 in, 64 out, alone", "llama-3.1-8b", 4, 128, 64, 1, 6, "tpot", 1.4e-3),
]  # fmt: skip


def tiny(workload: Workload) -> Workload:
    """The same workload on a model that is small enough for a CPU."""
    return replace(
        workload, model="tiny-llama", prompt=workload.prompt // 16, answer=min(workload.answer, 4),
        concurrency=min(workload.concurrency, 3), requests=6,
    )  # fmt: skip


def model(workload: Workload, device: str, dtype: torch.dtype) -> Decoder:
    """The model, with random weights."""
    config = read_config(MODELS / f"{workload.model}.json")
    rounding = None if workload.bits == 16 else Rounding(bits=workload.bits)
    weights = random_weights(config, dtype, device, 0, rounding)
    if workload.compensated:
        weights = replace(weights, layers=[_compensated(layer, device) for layer in weights.layers])
    return Decoder(config, weights)


def _compensated(layer: Layer, device: str) -> Layer:
    """The layer with a random error compensator for each of its packed matrices."""

    def compensate(matrix: Matrix) -> Compensated:
        assert isinstance(matrix, PackedWeight)
        return Compensated(matrix, random_compensator(matrix.outputs, matrix.inputs, RANK, device))

    assert isinstance(layer.ffn, DenseFFN)
    ffn = DenseFFN(compensate(layer.ffn.gate_up), compensate(layer.ffn.down))
    return replace(layer, qkv=compensate(layer.qkv), o=compensate(layer.o), ffn=ffn)


def weight_bytes(weights: Weights) -> int:
    """Bytes of weights that every step reads: all matrices except the embedding, of which it reads rows."""
    assert weights.head is not None
    total = weights.head.nbytes
    for layer in weights.layers:
        assert isinstance(layer.ffn, DenseFFN)
        for matrix in (layer.qkv, layer.o, layer.ffn.gate_up, layer.ffn.down):
            assert isinstance(matrix, torch.Tensor | PackedWeight | Compensated)
            total += matrix.nbytes
    return total


def floor(workload: Workload, decoder: Decoder, ceilings: dict[str, float]) -> float:
    """The workload's metric if only bytes and operations took time."""
    shape, weights = decoder.config.shape, decoder.weights
    read_seconds = weight_bytes(weights) / ceilings["copy"]
    if workload.metric == "tpot":
        context = workload.prompt + workload.answer / 2
        token = 2 * shape.layers * shape.kv_heads * shape.head_dim * weights.norm.element_size()
        return read_seconds + workload.concurrency * context * token / ceilings["copy"]
    linear = 2 * shape.layers * sum(outputs * inputs for outputs, inputs in shape.linear().values())
    pairs = workload.prompt * (workload.prompt + 1) / 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    computed = (workload.prompt * linear + attention + 2 * shape.hidden * shape.vocabulary) / ceilings["matmul"]
    return max(computed, read_seconds) if workload.metric == "ttft" else 1 / computed


def engine(workload: Workload, decoder: Decoder, mode: str) -> Engine:
    """An engine with room for all concurrent requests. A request for one token keeps no cache."""
    blocks = -(-(workload.prompt + workload.answer) // BLOCK) + 1
    config = EngineConfig(
        num_gpu_blocks=workload.concurrency * blocks, block_size=BLOCK, max_num_seqs=workload.concurrency,
        max_num_batched_tokens=8192, enable_prefix_caching=False,
        one_shot=OneShotBudget() if workload.answer == 1 else None,
    )  # fmt: skip
    make, depth = MODES[mode]
    return Engine(decoder, config, make_executor=make, depth=depth)


def requests(workload: Workload, vocabulary: int, seed: int) -> list[Generation]:
    """Requests that are all different, and not in the engine's cache."""
    prompts = np.random.default_rng(seed).integers(vocabulary, size=(workload.requests, workload.prompt))
    return [make_generation(i, prompt, workload.answer, sampling_params=GREEDY) for i, prompt in enumerate(prompts)]


def serve(engine: Engine, workload: Workload, seed: int) -> dict[str, float]:
    """Serve the requests once: medians of seconds to the first token and between tokens, and requests a second."""
    generations = requests(workload, engine.executor.decoder.config.shape.vocabulary, seed)
    waiting = iter(generations)
    begin = time.perf_counter()
    for _ in range(workload.concurrency):
        engine.submit(next(waiting))
    while (result := engine.step()) is not None:
        for _ in result.finished:
            if (following := next(waiting, None)) is not None:
                engine.submit(following)
    elapsed = time.perf_counter() - begin
    figures = {
        "ttft": statistics.median(generation.first_token - generation.submitted for generation in generations),
        "requests": len(generations) / elapsed,
    }
    if workload.answer > 1:
        figures["tpot"] = statistics.median((g.last_token - g.first_token) / (workload.answer - 1) for g in generations)
    return figures


def measure(workload: Workload, decoder: Decoder, mode: str, repeats: int) -> dict[str, Any]:
    """Medians over repeats, after two runs in which kernels are compiled and graphs captured."""
    gc.collect()  # what the mode before has left on the device
    if decoder.weights.norm.is_cuda:
        torch.cuda.empty_cache()
    serving = engine(workload, decoder, mode)
    for seed in (1, 2):
        serve(serving, workload, seed)
    serving.executor.freeze_graphs()
    gc.disable()  # a pause of its own in the middle of a step
    try:
        runs = [serve(serving, workload, 10 + seed) for seed in range(repeats)]
    finally:
        gc.enable()
    values = [run[workload.metric] for run in runs]
    medians: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return medians | {"spread": (max(values) - min(values)) / medians[workload.metric]}


def rows(
    bench: Bench, workloads: list[Workload], repeats: int, names: Sequence[str] = tuple(MODES)
) -> Iterator[dict[str, Any]]:
    """One row for each workload: floor, the figures of each named mode, and whether the aim was met."""
    loaded = functools.lru_cache(maxsize=1)(lambda name, bits, workload: model(workload, bench.device, bench.dtype))
    for workload in sorted(workloads, key=lambda workload_: (workload_.model, workload_.bits, workload_.compensated)):
        print(f"benchmarks.live: {workload.name}", file=sys.stderr, flush=True)
        decoder = loaded(workload.model, workload.bits, replace(workload, name="", requests=0))
        best = floor(workload, decoder, bench.ceilings)
        modes = {}
        for mode in names:
            modes[mode] = measure(workload, decoder, mode, repeats)
            value = modes[mode][workload.metric]
            modes[mode]["of_floor"] = value / best if workload.metric == "requests" else best / value
        yield {**asdict(workload), "floor": best, "modes": modes, "met": met(workload, modes)}


def met(workload: Workload, modes: dict[str, dict[str, Any]]) -> bool:
    """True if the best of the modes reaches the aim."""
    values = [figures[workload.metric] for figures in modes.values()]
    return bool(max(values) >= workload.aim if workload.metric == "requests" else min(values) <= workload.aim)


def table_row(row: dict[str, Any], judged: bool) -> str:
    """One line of the table."""
    metric, scale, unit = row["metric"], *((1.0, "req/s") if row["metric"] == "requests" else (1e3, "ms"))
    modes = ", ".join(
        f"{mode} {scale * result[metric]:.2f} ({result['of_floor']:.0%})" for mode, result in row["modes"].items()
    )
    published = ", ".join(f"{result['system']} {scale * result['value']:g}" for result in row["published"])
    verdict = "" if not judged else "met: " if row["met"] else "MISSED: "
    return (
        f"{verdict}{row['name']}, {metric} in {unit}: {modes}; floor {scale * row['floor']:.2f}, "
        f"aim {scale * row['aim']:g}{f'; published: {published}' if published else ''}"
    )


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of the real ones")
    parser.add_argument("--only", default="", help="workloads whose names contain this")
    parser.add_argument("--mode", choices=list(MODES), help="default: all, one after another")
    parser.add_argument("--repeats", type=int, default=5, help="of every workload")
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, expected a device that is here")
    workloads = [workload for workload in WORKLOADS if options.only in workload.name]
    if not workloads:
        parser.error(f"--only: got {options.only!r}, expected part of a workload's name")
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, expected at least 1")
    bench = Bench(options.device)
    judged = options.device == "cuda" and not options.tiny
    document = about(bench, "twin.benchmark-live/1") | {"judged": judged}
    document_rows = []
    workloads = [tiny(workload) for workload in workloads] if options.tiny else workloads
    for row in rows(bench, workloads, options.repeats, [options.mode] if options.mode else tuple(MODES)):
        document_rows.append(row)
        print(table_row(row, judged), flush=True)
        if options.out:  # after each, so that a run that is cut short leaves what it had
            options.out.write_text(
                json.dumps(document | {"workloads": document_rows}, indent=1) + "\n", encoding="utf-8"
            )
    return MISSED if judged and not all(row["met"] for row in document_rows) else 0


if __name__ == "__main__":
    sys.exit(main())
