"""Timings of linear attention and of the indexers of sparse attention, from aiconfigurator's tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.kernel_timings import Timings, make_timings, number_shapes, source_of
from latency_models.deployment.hardware import Hardware
from latency_models.deployment.layers import Indexer, LinearAttention
from latency_models.io.files import Columns
from latency_models.sources.aiconfigurator.tables import recurrent_layers
from latency_models.sources.roofline.efficiency import Kind
from latency_models.sources.roofline.step_kernels import attended_pairs
from latency_models.sources.roofline.work import state_shape


def linear_attention(table: Columns, hardware: Hardware) -> list[Timings]:
    """Timings of prompts and of decodes: the convolution and the recurrence of a layer together."""
    name, layers, timings = table.text("op_name")[0], recurrent_layers(table), []
    for phase, part in (("context", "prompt"), ("generation", "decode")):
        if phase in layers:
            kind: Kind = f"{part}_{name}"  # type: ignore[assignment]
            timings.append(_of_phase(kind, layers[phase], hardware, source_of(table)))
    return timings


def _seconds(table: Columns) -> list[float]:
    return [milliseconds * 1e-3 for milliseconds in table.numbers("latency")]


def _of_phase(
    kind: Kind, seconds: Mapping[tuple[int, int, tuple[int, ...]], float], hardware: Hardware, source: str
) -> Timings:
    part, _, name = kind.partition("_")
    flops, size = [], []
    for batch, tokens, (keys, values, key_dim, value_dim) in seconds:
        linear = LinearAttention.model_validate(
            {"kind": name, "layers": 1, "key_heads": keys, "value_heads": values, "key_dim": key_dim,
             "value_dim": value_dim}
        )  # fmt: skip
        shape = state_shape(linear)
        if part == "prompt":
            flops.append(batch * tokens * shape.prompt_flops)
            size.append(batch * (tokens * shape.prompt_bytes + shape.sequence_bytes))
        else:
            flops.append(batch * shape.decode_flops)
            size.append(batch * shape.sequence_bytes)
    columns = np.array([shape for _, _, shape in seconds], dtype=np.float64)
    return make_timings(
        kind, hardware, source, np.array(flops), np.array(size), np.array(list(seconds.values())),
        shape=number_shapes(*columns.T),
    )  # fmt: skip


GLM5_INDEXER = Indexer(heads=32, head_dim=128, top_k=2048)
"""The indexer whose kernels the tables time."""


def prompt_indexers(scores: Columns, choice: Columns, hardware: Hardware) -> Timings:
    """Timings of GLM-5's indexer for prompts: scores of the tokens that they see, and the choice among them."""
    chosen: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for key, seconds in zip(_sizes(choice), _seconds(choice), strict=True):
        chosen[key].append(seconds)
    both = {
        key: seconds + float(np.mean(chosen[key]))
        for key, seconds in zip(_sizes(scores), _seconds(scores), strict=True)
        if key in chosen and key[1] > 1
    }
    pairs = np.array([batch * attended_pairs(tokens, context, 0) for batch, tokens, context in both])
    keys = np.array([batch * (context + tokens) for batch, tokens, context in both], dtype=np.float64)
    return make_timings(
        "prompt_index", hardware, source_of(scores), 2.0 * GLM5_INDEXER.heads * GLM5_INDEXER.head_dim * pairs,
        keys * GLM5_INDEXER.cached_bytes, np.array(list(both.values())),
        shape=number_shapes(np.array([batch for batch, _, _ in both])), weights="fp8",
    )  # fmt: skip


def decode_indexers(sparse: Columns, latent: Columns, hardware: Hardware) -> Timings:
    """Timings of indexers for decodes: what they add to a layer of latent attention.

    Behind few tokens it is the difference of DeepSeek-V3.2's and DeepSeek-V3's layers, which are alike otherwise.
    Behind more than `top_k` tokens attention takes no longer, and GLM-5's layers say what contexts add to that.
    """
    layers, dense = _layers(sparse), _layers(latent)
    added = {
        key[1:]: contexts[FEW] - dense["deepseek-ai/DeepSeek-V3", *key[1:]][FEW]
        for key, contexts in layers.items()
        if key[0] == "deepseek-ai/DeepSeek-V3.2"
        and FEW in contexts
        and FEW in dense.get(("deepseek-ai/DeepSeek-V3", *key[1:]), {})
    }
    points = [(key[0], key[0] * FEW, seconds) for key, seconds in added.items() if seconds > 0]
    top = GLM5_INDEXER.top_k
    for (model, *key), contexts in layers.items():
        if model != "zai-org/GLM-5" or added.get(tuple(key), 0.0) <= 0 or top not in contexts:
            continue
        for step, seconds in contexts.items():
            if step >= 8 * top and seconds > contexts[top]:
                points.append((key[0], key[0] * step, seconds - contexts[top] + added[tuple(key)]))
    batches, keys, seconds_more = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    return make_timings(
        "decode_index", hardware, source_of(sparse), 2.0 * GLM5_INDEXER.heads * GLM5_INDEXER.head_dim * keys,
        keys * GLM5_INDEXER.cached_bytes, seconds_more, padding=batches * GLM5_INDEXER.cached_bytes,
        shape=number_shapes(batches), weights="fp8",
    )  # fmt: skip


FEW = 512
"""Cached tokens of each decode behind which dense and sparse attention do the same."""


def _layers(modules: Columns) -> dict[tuple[Any, ...], dict[int, float]]:
    """Seconds of decodes by model, number, formats and heads; then by cached tokens."""
    texts = (modules.text(name) for name in ("model", "kv_cache_dtype", "gemm_type"))
    rows = zip(*texts, modules.wholes("num_heads", low=1), _sizes(modules), _seconds(modules), strict=True)
    layers: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for model, cache, weights, heads, (batch, _, step), seconds in rows:
        layers[model, batch, cache, weights, heads][step] = seconds
    return layers


def _sizes(table: Columns) -> list[tuple[int, int, int]]:
    """Sequences, tokens of each, and cached tokens before them."""
    names = (("batch_size", 1), ("isl", 1), ("step", 0))
    return list(zip(*(table.wholes(name, low=low) for name, low in names), strict=True))
