"""Timings of the all-to-alls of wide expert parallelism, from tables of aiconfigurator.

`python -m benchmarks.roofline_efficiency --tables DATA --all-to-all` fits them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.kernel_timings import Timings, make_timings, number_shapes, source_of
from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.io.files import Columns, read_columns
from latency_models.sources.roofline.efficiency import Kind
from latency_models.sources.roofline.work import DISPATCHED_BYTES, sent_copies

DISPATCH_SMS = 20
"""Multiprocessors that engines give DeepEP's kernels of high throughput."""

NODE = 8
"""Devices of a node in DeepEP's tables. How many those of GB200 and GB300 have is not stated, and they are not read."""

PARTS = ("alltoall_prepare", "alltoall_dispatch", "alltoall_combine")
"""Kernels of TensorRT-LLM's exchange in one NVLink domain."""


def all_to_alls(tables: Path, systems: Mapping[str, str]) -> dict[Kind, list[Timings]]:
    """Timings by kind, of devices by system."""
    by_kind: dict[Kind, list[Timings]] = defaultdict(list)
    for system, device in systems.items():
        hardware, comm = load_hardware(device), tables / system / "comm"
        deep_ep = [] if system.startswith("gb") else sorted(comm.glob("sglang/*/wideep_deepep_*_perf.parquet"))
        parts = [part for path in deep_ep for part in _deep_ep(read_columns(path), hardware)]
        for path in comm.glob("trtllm/*/trtllm_alltoall_perf.parquet"):
            parts.append(_nvlink(read_columns(path), hardware))
        for timings in parts:
            if len(timings):
                by_kind[timings.kind].append(timings)
    return by_kind


def _deep_ep(table: Columns, hardware: Hardware) -> list[Timings]:
    """Dispatch and combine together, in a node or over nodes."""
    latency = "dispatch_avg_t_us" in table.names
    kernel = "{}_avg_t_us" if latency else "{}_transmit_us"
    nodes, hidden, rows, chosen, there, back = (
        np.array(table.numbers(name))
        for name in (
            "node_num", "hidden_size", "num_token", "num_topk", kernel.format("dispatch"), kernel.format("combine"),
        )
    )  # fmt: skip
    usual = np.array(
        [latency or sms == DISPATCH_SMS for sms in table.numbers("node_num" if latency else "dispatch_sms")]
    )
    network, results = hardware.network, []
    for name, here, link in (
        ("all_to_all", usual & (nodes == 1), network.intra_node),
        ("all_to_all_nodes", usual & (nodes > 1), network.inter_node),
    ):
        places = np.where(nodes == 1, NODE, nodes)[here]
        copies = [sent_copies(place, top, each_expert=latency) for place, top in zip(places, chosen[here], strict=True)]
        size = np.array(copies) * rows[here] * hidden[here] * DISPATCHED_BYTES["fp8"]
        kind = cast("Kind", f"{name}_ll" if latency else name)
        shape = number_shapes(hidden[here], chosen[here], places)
        results.append(
            make_timings(
                kind, hardware, source_of(table), 0 * size, size, (there + back)[here] * 1e-6, shape=shape,
                bandwidth=link,
            )
        )  # fmt: skip
    return results


def _nvlink(table: Columns, hardware: Hardware) -> Timings:
    """The exchange of FP8 rows in one NVLink domain."""
    seconds: dict[tuple[float, ...], float] = defaultdict(float)
    numbers = (table.numbers(name) for name in ("moe_ep_size", "hidden_size", "num_tokens", "topk", "latency"))
    texts = (table.text(name) for name in ("op_name", "kernel_source", "moe_dtype"))
    for devices, hidden, rows, chosen, latency, part, way, form in zip(*numbers, *texts, strict=True):
        if part in PARTS and (way, form) == ("NVLinkTwoSided", "fp8"):
            seconds[devices, hidden, rows, chosen] += latency * 1e-3
    size = np.array(
        [
            sent_copies(devices, chosen, each_expert=False) * rows * hidden * DISPATCHED_BYTES["fp8"]
            for devices, hidden, rows, chosen in seconds
        ]
    )
    shape = number_shapes(np.array([devices for devices, *_ in seconds]))
    return make_timings(
        "all_to_all", hardware, source_of(table), 0 * size, size, np.array(list(seconds.values())), shape=shape,
        bandwidth=hardware.network.intra_node,
    )  # fmt: skip
