"""Host time of a decode step of the live engine: scheduling, preparing inputs, committing output.

    python -m benchmarks.host_step [--repeat 400] [--out FILE]

The model is left out: its forward pass and the sampler return prepared results at once. The rest is the time that a GPU
would wait. Exit code 4 when a step takes longer than 30, 80 or 200 µs at batch 1, 64 or 256.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from kernels.sampling import SamplingParams
from kernels.shapes import Shape
from live import executor
from live.engine import Engine
from live.generation import make_generation
from live.models.config import ModelConfig
from live.models.decoder import Inputs, PagedCache
from schedulers.engine_config import EngineConfig

LIMITS = {1: 30e-6, 64: 80e-6, 256: 200e-6}

WARM, TURN = 20, 50
"""Steps that are not counted, and steps of one batch before its turn ends."""

CONFIG = ModelConfig("llama", Shape(1, 8, 8, 1, 1, 8, 100), max_position_embeddings=4096, tied=True)


class Instant:
    """A decoder that returns prepared results."""

    def __init__(self) -> None:
        self.config = CONFIG
        self.attention_backend = "triton"
        self.weights = SimpleNamespace(norm=torch.zeros(8), head=torch.zeros(100, 8))
        self._hidden = cache(lambda rows: torch.zeros(rows, 8))
        self._logits = cache(lambda rows: torch.zeros(rows, 100))

    def forward(self, inputs: Inputs, kv: PagedCache) -> torch.Tensor:
        """See `Decoder.forward`."""
        return self._hidden(inputs.tokens.shape[0])

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.normed`."""
        return hidden

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""
        return self._logits(normed.shape[0])


def decoding(batch: int) -> Engine:
    """An engine that decodes this many sequences, for at least a thousand steps."""
    config = EngineConfig(num_gpu_blocks=80 * batch, max_num_seqs=batch, max_num_batched_tokens=8192)
    engine = Engine(Instant(), config)  # type: ignore[arg-type]
    for i in range(batch):
        engine.submit(
            make_generation(
                i,
                np.arange(20 + i % 50),
                1000,
                sampling_params=SamplingParams(temperature=0.0),
                end_tokens=frozenset({99}),
            )
        )
    for _ in range(WARM):
        engine.step()
    return engine


def step_seconds(repeat: int) -> dict[int, float]:
    """Median seconds of a decode step, by batch. Batches alternate, so that a slow second of the machine meets all."""
    engines = {batch: decoding(batch) for batch in LIMITS}
    times: dict[int, list[float]] = {batch: [] for batch in LIMITS}
    for begin in range(0, repeat, TURN):
        for batch, engine in engines.items():
            for _ in range(min(TURN, repeat - begin)):
                start = time.perf_counter()
                engine.step()
                times[batch].append(time.perf_counter() - start)
    return {batch: statistics.median(seconds) for batch, seconds in times.items()}


def main() -> int:
    """Measure and print; exit code 4 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=400, help="steps at each batch")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args()
    if not 2 <= options.repeat <= 900:
        parser.error(f"--repeat: expected 2 to 900, found {options.repeat}")
    torch.set_num_threads(1)
    inputs = cache(lambda rows: (torch.ones(rows, dtype=torch.int64), torch.zeros(rows)))
    executor.sample = lambda logits, parameters: inputs(logits.shape[0])  # type: ignore[assignment]
    rows: list[dict[str, Any]] = []
    for batch, seconds in step_seconds(options.repeat).items():
        rows.append({"batch": batch, "seconds": seconds, "limit": LIMITS[batch]})
        print(f"batch {batch:>3}: {1e6 * seconds:6.1f} µs a step (at most {1e6 * LIMITS[batch]:g})")
    if options.out:
        document = {
            **provenance("twin.benchmark-host-step/1"),
            "torch": str(torch.__version__),
            "repeat": options.repeat,
            "steps": rows,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if any(row["seconds"] > row["limit"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
