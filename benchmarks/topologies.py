"""A bundle whose workers share one GPU, compared with one engine of the same slots: tokens a second and time per token.

    python -m benchmarks.topologies --device cuda [--model FILE] [--ratio 2] [--batch-size 32] [--out FILE]

Weights are random at the model's shapes. Every request has the same prompt and output lengths, and all slots are full.
The bundle runs four ways: its roles on one CUDA stream or on one each, and its stages kernel by kernel or as graphs.
Times are on the wall. A bundle on one GPU cannot beat the engine: the benchmark shows what its messages, turns and
launches cost, and how much of that streams and graphs take back. `--device cpu` goes the same way without either.

The tokens of every run are compared with those of one engine that runs kernel by kernel. They may differ first where
that engine's two most likely tokens are nearly equal, since batches of other sizes round otherwise. Exit code 4 if they
differ elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from kernels.sampling import SamplingParams
from live.device import device_name, versions
from live.engine import Engine
from live.executor import Executor
from live.generation import Generation, make_generation
from live.graphs.executor import GraphExecutor
from live.loaded_model import LoadedSource
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.local import LocalTopology, RoleStreams
from live.topologies.processes import BundleDeployment
from scenarios.afd import parse_ratios
from schedulers.engine_config import EngineConfig

MODEL = Path(__file__).parents[1] / "examples" / "models" / "qwen3-0.6b.json"

BLOCK = 16

SCHEMA = "twin.benchmark-topologies/2"

DIFFERENT = 4
NEARLY_EQUAL = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Difference of two log-probabilities up to which rounding may exchange their tokens, by the type of the weights."""


class Bench:
    """One model and layout, and the requests that fill its slots.

    Args:
        prompt, output: tokens of each request.
    """

    def __init__(
        self, config: ModelConfig, ratio: tuple[int, int], batch_size: int, device: str, prompt: int, output: int
    ) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.config = config
        self.device = device
        self.prompt = prompt
        self.output = output
        self.decoder = Decoder(config, random_weights(config, dtype, device))
        blocks = batch_size * -(-(prompt + output) // BLOCK)
        engine = EngineConfig(
            num_gpu_blocks=blocks, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=batch_size,
            max_num_batched_tokens=max(2048, batch_size), enable_prefix_caching=False,
        )  # fmt: skip
        self.layout = BundleLayout(*ratio, microbatches=2, engine=engine)
        self.slots = ratio[0] * 2 * batch_size
        self._reference: list[Generation] = []

    def bundle(self, *, streams: bool, graphs: bool) -> Callable[[list[Generation]], None]:
        """A bundle that runs requests to their end."""
        roles = RoleStreams() if streams else None
        deployment = BundleDeployment(LoadedSource.of(self.decoder), self.layout, graphs=graphs)
        bundle = LocalTopology(deployment, timekeeper=roles, handover=roles)

        def run(generations: list[Generation]) -> None:
            for generation in generations:
                bundle.submit(generation)
            bundle.run()

        return run

    def engine(self, make: Callable[..., Executor] | None = None) -> Callable[[list[Generation]], None]:
        """One engine with as many slots and blocks as the bundle. `make`: its executor, by default with graphs."""
        one = self.layout.engine
        parts = self.layout.attention_instances * self.layout.microbatches
        config = EngineConfig(
            num_gpu_blocks=one.num_gpu_blocks * parts, block_size=BLOCK, prefix_id_tokens=BLOCK,
            max_num_seqs=self.slots, max_num_batched_tokens=max(2048, self.slots), enable_prefix_caching=False,
        )  # fmt: skip
        usual = Executor if self.device == "cpu" else GraphExecutor
        engine = Engine(self.decoder, config, make_executor=make or usual)

        def run(generations: list[Generation]) -> None:
            for generation in generations:
                engine.submit(generation)
            while engine.step() is not None:
                pass

        return run

    def measure(self, run: Callable[[list[Generation]], None], repeats: int) -> dict[str, float]:
        """Medians over runs after one to warm up: output tokens a second, and seconds per output token.

        "different": over all runs, requests whose tokens differ from one engine's where these are not nearly equal.
        "exchanged": requests whose tokens differ first where they are.
        """
        run(self.requests())
        rates = []
        gaps = []
        differences = Counter[str]()
        for _ in range(repeats):
            generations = self.requests()
            begin = time.perf_counter()
            run(generations)
            rates.append(self.slots * self.output / (time.perf_counter() - begin))
            spans = [(generation.last_token - generation.first_token) / (self.output - 1) for generation in generations]
            gaps.append(statistics.mean(spans))
            differences.update(self.differences(generations))
        counts = {name: differences[name] for name in ("different", "exchanged")}
        return {"tokens_per_second": statistics.median(rates), "tpot": statistics.median(gaps), **counts}

    def differences(self, generations: list[Generation]) -> list[str]:
        """For each request the kind of its first difference from one engine's tokens; "" for none."""
        if not self._reference:
            self._reference = self.requests(logprobs=2)
            self.engine(Executor)(self._reference)
        limit = NEARLY_EQUAL[self.decoder.weights.norm.dtype]
        return [first_difference(a.output, b, limit) for a, b in zip(generations, self._reference, strict=True)]

    def requests(self, logprobs: int = -1) -> list[Generation]:
        """One request for each slot, of random tokens."""
        rng, greedy = np.random.default_rng(0), SamplingParams(temperature=0.0)
        prompts = rng.integers(self.config.shape.vocabulary, size=(self.slots, self.prompt))
        return [
            make_generation(i, row, self.output, sampling_params=greedy, logprobs=logprobs)
            for i, row in enumerate(prompts)
        ]


def first_difference(tokens: list[int], reference: Generation, limit: float) -> str:
    """The first difference of greedy tokens from a request's with log-probabilities of its two most likely tokens.

    Returns:
        "" if there is none; "exchanged" if it is the second most likely token, less likely by at most `limit`; else
        "different".
    """
    assert len(tokens) == len(reference.output), "both have all tokens"
    for token, expected, top in zip(tokens, reference.output, reference.top_logprobs, strict=True):
        if token != expected:
            likely = dict(top)
            return "exchanged" if likely[expected] - likely.get(token, -math.inf) <= limit else "different"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json")
    parser.add_argument("--ratio", default="2", help="attention instances for each FFN instance")
    parser.add_argument("--batch-size", type=int, default=32, help="requests of an attention instance in a microbatch")
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens of a request")
    parser.add_argument("--output", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the results to this file, too")
    options = parser.parse_args(arguments)
    topology = parse_ratios(options.ratio)[0]
    ratio = topology.attention_instances, topology.ffn_instances
    bench = Bench(read_config(options.model), ratio, options.batch_size, options.device, options.prompt, options.output)
    on_gpu = options.device == "cuda"
    runs: dict[str, Any] = {"one engine": bench.measure(bench.engine(), options.repeats)}
    for streams in (False, True) if on_gpu else (False,):
        for graphs in (False, True):
            name = f"{topology}, {'a stream each' if streams else 'one stream'}, {'graphs' if graphs else 'kernels'}"
            runs[name] = bench.measure(bench.bundle(streams=streams, graphs=graphs), options.repeats)
    for name, run in runs.items():
        rate, tpot = run["tokens_per_second"], run["tpot"]
        share = rate / runs["one engine"]["tokens_per_second"]
        differences = f"{run['different']} different, {run['exchanged']} exchanged"
        print(f"{name:44} {rate:9.0f} tokens/s ({share:5.1%})  {1e3 * tpot:7.2f} ms a token; {differences}", flush=True)
    if options.out:
        settings = {"model": options.model.name, "batch_size": options.batch_size, "prompt": options.prompt}
        document = {
            **provenance(SCHEMA),
            "device": device_name(options.device),
            "versions": versions(),
            "settings": settings,
            "runs": runs,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return DIFFERENT if any(run["different"] for run in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
