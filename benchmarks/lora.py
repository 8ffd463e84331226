"""Cost of LoRA adapters in a step of the live engine on one CPU thread, and the error of five numbers that state it.

    python -m benchmarks.lora [--model examples/models/small-llama.json] [--steps 40] [--out cost.yaml]

Decode steps with adapters take turns with decode steps of as many rows without any, on two engines that share their
weights, so that a change of the machine's speed meets both. The difference of their median CPU times is what adapters
add. The cost

    step + adapters · (adapter + adapter_rank · rank) + rows · (row + row_rank · rank)

is fitted to every second combination of ranks, adapters and rows by least squares with no negative term, and compared
with the others. `--out` writes it as `twin.lora-cost/1`, which `engine.lora_config.cost` of a scenario names.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from benchmarks.provenance import provenance
from latency_models.io.config_io import write_yaml
from live.engine import Engine
from live.executor import LoRAExecutor
from live.generation import make_generation
from live.loaded_model import LoadedModel, ModelSource
from live.models.config import ModelConfig
from live.models.lora import JOINED, Adapter, AdapterPart
from schedulers.engine_config import EngineConfig
from schedulers.model_slots import SlotsConfig

SCHEMA = "twin.lora-cost/1"
EXAMPLE = Path(__file__).parents[1] / "examples" / "models" / "small-llama.json"
RANKS, ADAPTERS, ROWS = (8, 16, 32, 64), (1, 2, 4, 8), (8, 16, 32)
TERMS = ("step", "adapter", "adapter_rank", "row", "row_rank")
PROMPT = 32


class Measured(NamedTuple):
    """Median seconds of a step without adapters and with this many of a rank."""

    rank: int
    adapters: int
    rows: int
    without: float
    seconds: float

    @property
    def terms(self) -> list[float]:
        """The factors of `TERMS`."""
        return [1.0, self.adapters, self.adapters * self.rank, self.rows, self.rows * self.rank]


def random_adapter(name: str, rank: int, config: ModelConfig) -> Adapter:
    """An adapter of every layer. Its values do not matter to the time."""
    sizes = config.shape.linear()
    parts: dict[str, list[AdapterPart]] = {}
    for layer, key in itertools.product(range(config.shape.layers), JOINED):
        outputs, inputs = sizes[key]
        keys = config.shape.kv_heads * config.shape.head_dim
        widths = [outputs - 2 * keys, keys, keys] if key == "qkv" else [outputs // len(JOINED[key])] * len(JOINED[key])
        starts = [sum(widths[:i]) for i in range(len(widths))]
        parts[f"{layer}.{key}"] = [
            AdapterPart(torch.randn(rank, inputs) * 1e-3, torch.randn(size, rank) * 1e-3, start)
            for size, start in zip(widths, starts, strict=True)
        ]
    return Adapter(name, rank, parts)


def decoding(model: LoadedModel, adapters: list[Adapter], count: int, rows: int, steps: int) -> Engine:
    """An engine that decodes so many requests; request i has adapter i modulo `count`, or none where that is 0."""
    config = EngineConfig(
        2048, max_num_seqs=rows, max_num_batched_tokens=2048, enable_prefix_caching=False,
        model_slots=SlotsConfig(max(count, 1), base="base"),
    )  # fmt: skip
    engine = Engine(model.decoder, config, make_executor=partial(LoRAExecutor, adapters=adapters))
    for i in range(rows):
        named = adapters[i % count].name if count else "base"
        engine.submit(make_generation(i, [1 + i] * PROMPT, 4 * steps, model=named))
    while engine.core.num_decodes < rows:
        engine.step()
    return engine


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call on this thread."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(model: LoadedModel, rank: int, count: int, rows: int, steps: int) -> Measured:
    """One combination: steps with adapters and without take turns."""
    config = model.decoder.config
    adapters = [random_adapter(f"adapter-{i}", rank, config) for i in range(count)]
    with_adapters, without = decoding(model, adapters, count, rows, steps), decoding(model, [], 0, rows, steps)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        for which, engine in enumerate((without, with_adapters)):
            seconds = cpu_seconds(engine.step)
            if step >= 3:
                times[which].append(seconds)
    result = Measured(rank, count, rows, *map(statistics.median, times))
    added = 1e3 * (result.seconds - result.without)
    print(
        f"rank {rank:3d}, {count} adapters, {rows:2d} rows: {1e3 * result.without:.2f} ms + {added:.2f} ms", flush=True
    )
    return result


def fit(measured: list[Measured]) -> dict[str, float]:
    """The cost, with equal weight on relative errors of whole steps."""
    weights = np.array([1 / point.seconds for point in measured])
    terms = np.array([point.terms for point in measured]) * weights[:, None]
    added = np.array([point.seconds - point.without for point in measured]) * weights
    scales = np.abs(terms).max(axis=0)
    return dict(zip(TERMS, (nnls(terms / scales, added)[0] / scales).tolist(), strict=True))


def errors(cost: dict[str, float], measured: list[Measured]) -> list[float]:
    """Relative errors of whole steps: predicted, less measured, over measured."""
    deviations = []
    for point in measured:
        added = sum(cost[name] * value for name, value in zip(TERMS, point.terms, strict=True))
        deviations.append((point.without + added) / point.seconds - 1)
    return deviations


def main(arguments: list[str] | None = None) -> int:
    """Measure, fit, compare, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE, help="a config.json, whose weights are random")
    parser.add_argument("--steps", type=int, default=40, help="steps of each combination")
    parser.add_argument("--out", type=Path, help="write the cost to this file")
    options = parser.parse_args(arguments)
    model = LoadedModel(ModelSource(options.model, random=True, dtype="float32", device="cpu", threads=1))
    combinations = [
        combination for combination in itertools.product(RANKS, ADAPTERS, ROWS) if combination[1] <= combination[2]
    ]
    measured = [measure(model, *combination, options.steps) for combination in combinations]
    cost = fit(measured[::2])
    for name, part in (("fitted", measured[::2]), ("held out", measured[1::2])):
        sizes = [abs(combination) for combination in errors(cost, part)]
        print(f"{name}: {len(part)} combinations, step times off by {np.mean(sizes):.1%}, at most {max(sizes):.1%}")
    added = [combination.seconds / combination.without - 1 for combination in measured]
    print(f"adapters add {min(added):.0%} to {max(added):.0%} to a step; without the cost a prediction lacks them")
    print(", ".join(f"{name} {value:.3g}" for name, value in cost.items()))
    if options.out:
        held_out = [abs(combination) for combination in errors(cost, measured[1::2])]
        about = {
            **{name: value for name, value in provenance(SCHEMA).items() if name != "schema"},
            "model": str(options.model),
            "held_out_error": {"mean": float(np.mean(held_out)), "max": float(max(held_out))},
        }
        document = {"schema": SCHEMA, "cost": cost, "about": about}
        options.out.write_text(write_yaml(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
