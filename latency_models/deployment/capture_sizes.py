"""Batch sizes for which vLLM captures CUDA graphs."""

from __future__ import annotations

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""vLLM's default sizes. A batch runs in the smallest graph that holds it; larger batches run without a graph."""


def vllm_capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """vLLM's default sizes for an engine: up to twice `max_num_seqs`, at most 512."""
    return tuple(size for size in GRAPH_SIZES if size <= min(2 * max_num_seqs, GRAPH_SIZES[-1]))
