"""Every node of one replayed decode step: its name, its time, and the gap before it, by PyTorch's profiler.

    python -m benchmarks.gpu_turn.nodes --device cuda [--tiny] --out FILE

On a CPU the nodes are PyTorch's operations.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import live
from benchmarks.gpu_turn.stages import stage_parser
from benchmarks.provenance import provenance
from live.device import device_name, versions
from live.engine import Engine
from live.models.decoder import Decoder

STEPS_BEFORE = 24
"""Steps behind the last prompt and before the profile: shapes are captured in them."""

MOST_PRINTED = 8

SITUATIONS = [
    live.Workload(
        f"{name}, {bits} bits{' with compensators' * compensated}, {batch} at once", name, bits, prompt, 64,
        concurrency=batch, requests=batch, metric="tpot", aim=0.0, compensated=compensated,
    )
    for name, bits, compensated, batch, prompt in (
        ("llama-2-7b", 4, False, 1, 128), ("llama-2-7b", 4, True, 1, 128), ("qwen3-0.6b", 16, False, 4, 128),
        ("llama-3.1-8b", 16, False, 1, 128), ("llama-3.1-8b", 16, False, 64, 1000),
    )
]  # fmt: skip


def decoding_engine(workload: live.Workload, decoder: Decoder) -> Engine:
    """An engine in the middle of the answers to all requests of a workload, with its graphs captured."""
    engine = live.engine(workload, decoder, "graphs")
    for generation in live.requests(workload, decoder.config.shape.vocabulary, 1):
        engine.submit(generation)
    decode_steps = 0
    while decode_steps < STEPS_BEFORE:
        result = engine.step()
        assert result is not None, "answers are longer than the steps before the profile"
        decode_steps += len(result.advanced) == workload.concurrency and len(result.advanced[-1].output) > 1
    return engine


def nodes(engine: Engine, device: str) -> list[dict[str, Any]]:
    """The nodes of one step in the order of their beginning: name, microseconds, and microseconds idle before."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        engine.step()
        if on_gpu:
            torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in profiler.events() or [] if event.device_type == kind]
    events = sorted(events, key=lambda event: event.time_range.start)
    rows: list[dict[str, Any]] = []
    end = events[0].time_range.start if events else 0
    for event in events:
        gap = max(event.time_range.start - end, 0.0)
        rows.append({"name": event.name, "us": event.time_range.elapsed_us(), "gap_us": gap})
        end = max(end, event.time_range.end)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    options = stage_parser(__doc__).parse_args(arguments)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    situations = SITUATIONS
    if options.tiny:
        situations = [replace(SITUATIONS[2], model="tiny-llama", prompt=20, concurrency=1, requests=1)]
    head = {**provenance("twin.gpu-nodes/1"), "device": device_name(options.device), "versions": versions()}
    steps: list[dict[str, Any]] = []
    for workload in situations:
        decoder = live.model(workload, options.device, dtype)
        seconds = live.measure(workload, decoder, "graphs, a step ahead", 1)["tpot"]
        rows = nodes(decoding_engine(workload, decoder), options.device)
        steps.append({"situation": workload.name, "seconds_per_token": seconds, "nodes": rows})
        options.out.write_text(json.dumps({**head, "steps": steps}) + "\n", encoding="utf-8")
        print_step(steps[-1])
    return 0


def print_step(step: dict[str, Any]) -> None:
    """A step's figures, and its nodes by name, those that take longest first."""
    rows = step["nodes"]
    busy, idle = sum(row["us"] for row in rows), sum(row["gap_us"] for row in rows)
    print(f"{step['situation']}: {1e3 * step['seconds_per_token']:.3f} ms a token; "
          f"{len(rows)} nodes, {busy:.0f} µs busy, {idle:.0f} µs idle", flush=True)  # fmt: skip
    times: Counter[str] = Counter()
    for row in rows:
        times[row["name"]] += row["us"]
    for name, microseconds in times.most_common(MOST_PRINTED):
        count = sum(row["name"] == name for row in rows)
        print(f"  {microseconds:8.0f} µs in {count:3} {name[:90]}")


if __name__ == "__main__":
    sys.exit(main())
