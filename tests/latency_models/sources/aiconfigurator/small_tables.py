"""Kernel tables small enough to work out by hand: each kernel's time is a formula, straight in every size."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

SYSTEM = "gpu:\n  mem_bw: 1000000000000\n  mem_capacity: 80000000000\nmisc:\n  other_mem: 4000000000\n"


def gemm_time(m: int, n: int, k: int) -> float:
    """Seconds; a straight line in each size, so that whatever lies between sizes is exact too."""
    return 1e-6 + 1e-15 * n * k + 2e-16 * m * n * k


def context_time(tokens: int) -> float:
    return 2e-6 + 1e-9 * tokens


def generation_time(count: int, cached: int) -> float:
    return 3e-6 + 1e-8 * count + 5e-10 * count * cached


def expert_time(tokens: int) -> float:
    return 4e-6 + 1e-8 * tokens


def all_reduce_time(elements: int) -> float:
    return 5e-6 + 1e-12 * elements


def write(path: Path, header: str, rows: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join([header, *map(str, rows)]).encode()))


ATTENTION = "batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype,step,latency"

HEADERS = {
    "gemm": "gemm_dtype,m,n,k,latency",
    "context_attention": ATTENTION,
    "generation_attention": ATTENTION,
    "moe": "moe_dtype,num_tokens,hidden_size,inter_size,topk,num_experts,moe_tp_size,moe_ep_size,distribution,latency",
    "custom_allreduce": "num_gpus,message_size,latency,backend",
}


def make_tables(
    folder: Path,
    heads: Iterable[tuple[int, int, int]] = ((4, 2, 64), (2, 1, 64)),
    formats: Iterable[str] = ("float16",),
) -> Path:
    """A folder of tables by the functions above, in milliseconds, with a system file beside it."""
    sizes = (64, 1024, 65536)
    rows: dict[str, list[str]] = {name: [] for name in HEADERS}
    for dtype in formats:
        rows["gemm"] += [
            f"{dtype},{m},{n},{k},{gemm_time(m, n, k) * 1e3!r}" for m in (1, 8192) for n in sizes for k in sizes
        ]
    for larger, smaller, dim in heads:
        kind = f"{larger},{smaller},{dim},float16,float16"
        rows["context_attention"] += [
            f"1,{tokens},{kind},0,{context_time(tokens) * 1e3!r}" for tokens in (16, 16384)
        ] + [f"2,16,{kind},0,99.0", f"1,16,{kind},128,99.0"]  # batches and prefixes, which steps are not made of
        rows["generation_attention"] += [
            f"{count},1,{kind},{cached - 1},{generation_time(count, cached) * 1e3!r}"
            for count in (1, 8, 256)
            for cached in (2, 65536)
        ]
    for ranks, parallel in ((1, 1), (1, 2), (2, 1)):
        rows["moe"] += [
            f"float16,{tokens},256,128,2,8,{ranks},{parallel},power_law_1.01,{expert_time(tokens) * 1e3!r}"
            for tokens in (1, 16384)
        ]
    for devices in (2, 4):
        rows["custom_allreduce"] += [
            f"{devices},{size},{all_reduce_time(size) * 1e3!r},graph" for size in (128, 1 << 26)
        ] + [f"{devices},128,99.0,eager"]
    for name, header in HEADERS.items():
        write(folder / f"{name}_perf.txt.gz", header, rows[name])
    systems = folder.parent / "systems"
    systems.mkdir(exist_ok=True)
    (systems / "lab.yaml").write_text(SYSTEM)
    return folder
