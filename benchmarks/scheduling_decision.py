"""Cost of one scheduling decision, with chunks under a latency goal and with chunks of a fixed size.

    python -m benchmarks.scheduling_decision [--repeat 15] [--json] [--out FILE]

Alone: `SloChunks.max_prefill_tokens`, which SPEAR calls "negligible µs-scale overhead" (4.3), on the tables of
examples/spear-slo.yaml and on a table of 128 points. In place: `EngineCore.begin_step` and `end_step` of a step with 1,
64 and 256 decodes beside a prompt that is under way. `StaticChunks` with the same number of tokens is the baseline;
both take turns in this process, and a ratio is the median over turns of that turn's ratio. Exit code 4 when an
allowance takes more than 20 µs in the median.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from latency_models.sources.ec_tables import EcTables
from scenarios.reading import read_scenario
from scenarios.serving import check_scenario
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.step_policies import ChunkPolicy, SloChunks, StaticChunks
from workloads.request import Request

EXAMPLE = Path(__file__).parent.parent / "examples" / "spear-slo.yaml"
LIMIT = 20e-6
"""Limit of an allowance, seconds."""

DECODES = (1, 64, 256)
GOALS = (0.022, 0.016)
CALLS, STEPS = 2000, 400
"""Allowances and steps of one turn."""

PROMPT = 1_000_000
"""Tokens of the prompt: more than all chunks of a turn together."""


def tables() -> dict[str, tuple[list[int], list[float]]]:
    """Token counts and seconds: the example's, and the same line by line at every 4th of 512 tokens."""
    scenario = check_scenario(read_scenario(EXAMPLE, "serving"), {}, EXAMPLE)
    model = scenario.step_time.build(EXAMPLE.parent)
    assert isinstance(model, EcTables)
    tokens = [1, *range(8, 513, 4)]
    return {"example": model.chunk_table(), "fine": (tokens, [model.at(token) for token in tokens])}


def seconds_a_call(policy: ChunkPolicy, decodes: int) -> float:
    """Seconds of a call, the mean of `CALLS` calls without the loop around them."""
    allowance, rounds = policy.max_prefill_tokens, range(CALLS)
    start = time.perf_counter()
    for _ in rounds:
        allowance(decodes)
    middle = time.perf_counter()
    for _ in rounds:
        pass
    return (2 * middle - start - time.perf_counter()) / CALLS


def seconds_a_step(policy: ChunkPolicy, decodes: int) -> tuple[float, float]:
    """Seconds of `begin_step` and of `end_step`, medians."""
    engine, now = engine_with(decodes), time.perf_counter
    engine.chunk_policy = policy
    engine.submit(Request(id=decodes, arrival=0.0, prompt_tokens=PROMPT, max_tokens=1), 0.0)
    begun, ended = [], []
    for _ in range(STEPS):
        start = now()
        batch = engine.begin_step(0.0)
        middle = now()
        assert batch is not None
        engine.end_step(batch, (), 0.0)
        begun.append(middle - start)
        ended.append(now() - middle)
        assert batch.n_decodes == decodes
        assert batch.prefill_tokens > 0
    return statistics.median(begun), statistics.median(ended)


def engine_with(decodes: int) -> EngineCore:
    """An engine in which `decodes` sequences decode, with enough blocks for a whole turn."""
    config = EngineConfig(
        num_gpu_blocks=1_000_000, max_num_batched_tokens=8192, max_num_seqs=512, enable_prefix_caching=False
    )
    engine = EngineCore(config)
    for number in range(decodes):
        engine.submit(Request(id=number, arrival=0.0, prompt_tokens=16, max_tokens=10_000), 0.0)
    while engine.num_decodes < decodes:
        batch = engine.begin_step(0.0)
        assert batch is not None
        engine.end_step(batch, (), 0.0)
    return engine


def in_turns(repeat: int, measures: list[Callable[[], float | tuple[float, ...]]]) -> list[list[Any]]:
    """Results by measure. Every turn has all of them, with garbage collection off."""
    results: list[list[Any]] = [[] for _ in measures]
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        for values, measure in zip(results, measures, strict=True):
            values.append(measure())
        gc.enable()
    return results


def allowances(repeat: int) -> list[dict[str, Any]]:
    """Allowances for every table, goal and number of decodes."""
    rows = []
    for name, (tokens, seconds) in tables().items():
        for goal in GOALS:
            for decodes in DECODES:
                slo = SloChunks(tokens, seconds, goal, max_tokens=512)
                chunk = slo.max_prefill_tokens(decodes)
                static = StaticChunks(chunk, exclude_decodes=True)
                ours, baseline = in_turns(
                    repeat,
                    [lambda p=slo, d=decodes: seconds_a_call(p, d), lambda p=static, d=decodes: seconds_a_call(p, d)],  # type: ignore[misc]
                )
                rows.append(
                    {"table": name, "points": len(tokens), "goal": goal, "decodes": decodes, "chunk": chunk}
                    | compare(ours, baseline)
                )
    return rows


def steps(repeat: int) -> list[dict[str, Any]]:
    """`begin_step` and `end_step`, on the example's table and the wider goal."""
    tokens, seconds = tables()["example"]
    rows = []
    for decodes in DECODES:
        slo = SloChunks(tokens, seconds, GOALS[0], max_tokens=512)
        static = StaticChunks(slo.max_prefill_tokens(decodes), exclude_decodes=True)
        ours, baseline = in_turns(
            repeat,
            [lambda p=slo, d=decodes: seconds_a_step(p, d), lambda p=static, d=decodes: seconds_a_step(p, d)],  # type: ignore[misc]
        )
        for index, call in enumerate(("begin_step", "end_step")):
            pair = ([turn[index] for turn in ours], [turn[index] for turn in baseline])
            rows.append({"call": call, "decodes": decodes, "chunk": slo.max_prefill_tokens(decodes)} | compare(*pair))
    return rows


def compare(ours: list[float], baseline: list[float]) -> dict[str, float]:
    """Medians over turns, seconds, and the median of the turns' ratios."""
    return {
        "slo": statistics.median(ours),
        "static": statistics.median(baseline),
        "ratio": statistics.median(a / b for a, b in zip(ours, baseline, strict=True)),
        "slo_slowest_turn": max(ours),
    }


def show(document: dict[str, Any]) -> None:
    """Print a table in microseconds."""
    print(f"{document['machine']['device']}, Python {document['python']}, medians of {document['repeat']} turns")
    for row in document["allowance"]:
        print(
            f"allowance, table of {row['points']:>3}, goal {1e3 * row['goal']:.0f} ms, {row['decodes']:>3} decodes ->"
            f" {row['chunk']:>3} tokens: {1e6 * row['slo']:6.2f} µs, static {1e6 * row['static']:5.2f} µs,"
            f" × {row['ratio']:.0f}"
        )
    for row in document["step"]:
        print(
            f"{row['call']:>10}, {row['decodes']:>3} decodes beside {row['chunk']:>3} prompt tokens:"
            f" {1e6 * row['slo']:6.2f} µs, static {1e6 * row['static']:6.2f} µs, × {row['ratio']:.2f}"
        )
    print(f"worst allowance {1e6 * document['worst']:.2f} µs, limit {1e6 * LIMIT:.0f} µs")


def main() -> int:
    """Measure and print; exit code 4 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="turns")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat: expected at least 1, found {options.repeat}")
    by_itself = allowances(options.repeat)
    document = {
        **provenance("twin.benchmark-scheduling-decision/1"),
        "repeat": options.repeat,
        "limit": LIMIT,
        "worst": max(row["slo"] for row in by_itself),
        "allowance": by_itself,
        "step": steps(options.repeat),
    }
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        show(document)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if document["worst"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
