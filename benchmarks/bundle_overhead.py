"""The cost of a bundle beyond its computation: Python between the stages, for each layer and microbatch.

    python -m benchmarks.bundle_overhead [--model FILE] [--ratio 2] [--batch-size 16] [--steps 60] [--json]

All workers run in this process. From the CPU time of the steps, what one colocated engine does too is subtracted: both
stages of the layers, scheduling, index arrays, sampling, and the commit of tokens. Messages, slots and turns remain.
Packing and unpacking, which messages between processes need besides, are measured apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from kernels.sampling import SamplingParams
from live.engine import Engine
from live.executor import Executor
from live.generation import make_generation
from live.loaded_model import LoadedSource
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder, FFNRows
from live.models.weights import random_weights
from live.topologies.bundle import workers
from live.topologies.bundle.coordinator import OUTPUT, ROWS, BundleLayout
from live.topologies.local import LocalTopology
from live.topologies.processes import BundleDeployment
from live.topologies.transport import Message, pack, unpack
from scenarios.afd import parse_ratios
from schedulers.engine_config import EngineConfig

MODEL = Path(__file__).parents[1] / "examples" / "models" / "small-llama.json"

PROMPT = 64
"""Prompt tokens of a request."""

COMPUTE = (
    (Decoder, "embed"), (Decoder, "attention_stage"), (workers, "ffn_stage"), (Executor, "step_inputs"),
    (Executor, "output"), (Engine, "schedule"), (Engine, "commit"),
)  # fmt: skip
"""Work that one colocated engine does too."""


class Stopwatch:
    """CPU seconds of this thread within some functions, which must not call each other."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


def measure(config: ModelConfig, layout: BundleLayout, steps: int) -> dict[str, float]:
    """Seconds a step of a microbatch, and seconds of overhead for each layer, microbatch and attention instance."""
    decoder, ended = Decoder(config, random_weights(config, torch.float32, "cpu")), list[int]()
    deployment = BundleDeployment(LoadedSource.of(decoder), layout)
    bundle = LocalTopology(deployment, on_progress=lambda progress: ended.append(1))
    slots = layout.attention_instances * layout.microbatches * layout.batch_size

    def run(first: int, tokens: int) -> None:
        for i in range(slots):
            prompt = torch.randint(0, config.shape.vocabulary, (PROMPT,)).tolist()
            sampling = SamplingParams(temperature=0.0)
            bundle.submit(make_generation(first + i, prompt, tokens, sampling_params=sampling))
        bundle.run()

    run(0, 4)
    watch, before = Stopwatch(), len(ended)
    originals = [(owner, name, getattr(owner, name)) for owner, name in COMPUTE]
    for owner, name, function in originals:
        setattr(owner, name, watch.wrap(function))
    try:
        begin = time.thread_time()
        run(slots, steps)
        total = time.thread_time() - begin
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    count = len(ended) - before
    visits = count * config.shape.layers * layout.attention_instances
    overhead = total - watch.seconds
    return {"step": total / count, "overhead": overhead / visits, "share": overhead / total, "steps": count}


def packing_seconds(config: ModelConfig, layout: BundleLayout, repeat: int = 300) -> float:
    """CPU seconds to pack and unpack the rows of one attention instance on their way to the FFN and back."""
    rows, top_k = layout.batch_size, config.shape.experts_per_token
    hidden = torch.zeros(rows, config.shape.hidden)
    parts = FFNRows(hidden)
    if top_k:
        parts = FFNRows(hidden, torch.zeros(rows, top_k), torch.zeros(rows, top_k, dtype=torch.int32))
    forms = layout.forms(config, torch.float32)
    there = Message(ROWS, (0, 0), tuple(part for part in parts if part is not None))
    back = Message(OUTPUT, (0, 0), (hidden,))
    begin = time.thread_time()
    for _ in range(repeat):
        unpack(pack(there), forms)
        unpack(pack(back), forms)
    return (time.thread_time() - begin) / repeat


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json")
    parser.add_argument("--ratio", default="2", help="attention instances for each FFN instance")
    parser.add_argument("--batch-size", type=int, default=16, help="requests of an attention instance in a microbatch")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="decode steps of each microbatch")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config, topology = read_config(options.model), parse_ratios(options.ratio)[0]
    blocks = options.batch_size * -(-(PROMPT + options.steps + 1) // 16)
    engine = EngineConfig(
        num_gpu_blocks=blocks, max_num_seqs=options.batch_size, max_num_batched_tokens=max(2048, options.batch_size)
    )
    layout = BundleLayout(topology.attention_instances, topology.ffn_instances, options.microbatches, engine)
    result = measure(config, layout, options.steps)
    packing = packing_seconds(config, layout)
    if options.json:
        print(json.dumps({**provenance("twin.benchmark-bundle-overhead/1"), **result, "packing": packing}, indent=1))
        return 0
    print(
        f"{topology}, {options.microbatches} microbatches of {options.batch_size}: {1e3 * result['step']:.2f} ms a step"
    )
    print(
        f"overhead: {1e6 * result['overhead']:.0f} µs a layer, microbatch and attention instance, {result['share']:.1%}"
    )
    print(f"between processes also {1e6 * packing:.0f} µs to pack and unpack")
    return 0


if __name__ == "__main__":
    sys.exit(main())
