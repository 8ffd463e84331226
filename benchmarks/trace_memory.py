"""Memory and time of reading a large trace.

    python -m benchmarks.trace_memory [--rows 1000000] [--format mooncake] [--out FILE]

A generated file of the format (`azure`, `burstgpt`, `mooncake`, `bailian` or `openai`) is read by a process of its own,
whose largest resident memory is measured, Python and numpy included. Rows of `mooncake` have 24 prefix ids on average,
as those of the published conversation trace; rows of `bailian` have 60. Exit code 4 above 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance

LIMIT = 1 << 30
"""Bytes."""

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def prompts(rows: int, block_tokens: int, mean_ids: int) -> Iterator[tuple[int, list[int]]]:
    """Prompt lengths and block ids; half of the ids are those of an earlier row."""
    rng = np.random.default_rng(1)
    fresh = 0
    before: list[int] = []
    for count in rng.geometric(1 / mean_ids, rows).tolist():
        shared = min(count // 2, len(before))
        ids = before[:shared] + list(range(fresh, fresh + count - shared))
        fresh += count - shared
        yield count * block_tokens, ids
        before = ids


def mooncake(rows: int) -> Iterator[str]:
    for i, (tokens, ids) in enumerate(prompts(rows, 512, 24)):
        yield json.dumps({"timestamp": i * 3, "input_length": tokens, "output_length": 100, "hash_ids": ids})


def bailian(rows: int) -> Iterator[str]:
    for i, (tokens, ids) in enumerate(prompts(rows, 16, 60)):
        row = {"chat_id": i, "parent_chat_id": i - 1 if i % 4 else -1, "timestamp": i / 100, "type": "text"}
        yield json.dumps({**row, "turn": i % 4 + 1, "input_length": tokens, "output_length": 100, "hash_ids": ids})


def azure(rows: int) -> Iterator[str]:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for i in range(rows):
        yield f"{EPOCH + timedelta(milliseconds=10 * i):%Y-%m-%d %H:%M:%S.%f}+00:00,{1000 + i % 999},{1 + i % 500}"


def burstgpt(rows: int) -> Iterator[str]:
    yield "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
    for i in range(rows):
        yield f"{i / 10},{i // 4:032x},2.5,ChatGPT,{100 + i % 999},{1 + i % 500},0,Conversation log"


def openai(rows: int) -> Iterator[str]:
    for i in range(rows):
        usage = {"prompt_tokens": 100 + i % 999, "completion_tokens": 1 + i % 500, "total_tokens": 0}
        yield json.dumps(
            {"id": f"chatcmpl-{i}", "object": "chat.completion", "created": 17 * 10**8 + i, "usage": usage}
        )


FORMATS: dict[str, Callable[[int], Iterator[str]]] = {
    "azure": azure, "burstgpt": burstgpt, "mooncake": mooncake, "bailian": bailian, "openai": openai,
}  # fmt: skip


def read(file: str, format: str) -> dict[str, Any]:
    """Read a trace, in a process of its own."""
    from workloads.traces import read_trace

    begun = time.process_time()
    trace = read_trace(file, format)
    seconds = time.process_time() - begun
    ids = 0 if trace.prefix_blocks is None else sum(len(blocks) for blocks in trace.prefix_blocks)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rows": len(trace), "ids": ids, "cpu_seconds": seconds, "memory": memory}


def main() -> int:
    """Read a trace of each format that was asked for, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=[*FORMATS], action="append")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(*arguments.read)))
        return 0
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.format or FORMATS:
            file = Path(folder) / name
            with file.open("w") as opened:
                opened.writelines(f"{line}\n" for line in FORMATS[name](arguments.rows))
            command = [sys.executable, "-m", "benchmarks.trace_memory", "--read", str(file), name]
            result = subprocess.run(command, capture_output=True, text=True, check=True)
            results[name] = {"bytes": file.stat().st_size, **json.loads(result.stdout)}
            file.unlink()
            print(f"{name:9} {results[name]['rows']:,} rows, {results[name]['ids']:,} ids:", end=" ")
            print(f"{results[name]['memory'] / 2**20:.0f} MiB, {results[name]['cpu_seconds']:.1f} s of CPU")
    if arguments.out:
        arguments.out.write_text(
            json.dumps(provenance("twin.benchmark-trace-memory/1") | {"formats": results}, indent=1) + "\n"
        )
    return 4 if any(row["memory"] > LIMIT for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
