"""Timings of other attention than that of grouped queries: layers of latent and sparse attention, and recurrences.

The tables of modules time a whole attention layer, projections included, by the heads of one rank. Those of linear
attention time the convolution and the recurrence apart, and projections are among the GEMMs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from latency_models.deployment.layers import LatentAttention, LinearAttention
from latency_models.deployment.models import Model, load_model
from latency_models.interpolation import Curve, Surface
from latency_models.io.files import Columns, read_columns
from workloads.errors import BadInput

MODULES = {
    "mla": ("mla_context_module", "mla_generation_module"),
    "dsa": ("dsa_context_module", "dsa_generation_module"),
}
"""Tables of prompts and of decodes by the kind of attention: latent, and latent with an indexer."""

STATES = {"gdn": "gdn", "kda": "kda", "mamba2": "mamba2"}
"""Tables by the kind of linear attention."""

COLUMNS = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")

CONVOLUTION = "causal_conv1d"
"""The begin of the names of convolutions. The other kernels are recurrences; the fastest of a shape counts."""

HOST_BOUND = {("kda", "context")}
"""Recurrences beside convolutions whose timings are mostly the host's, and are left out."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """The kind of a layer of latent attention: its shape but for heads, the heads of one rank, and formats."""

    shape: Shape
    heads: int
    cache: str
    weights: str


@dataclass(frozen=True, slots=True)
class StateTimes:
    """Seconds of linear attention in one layer: of one prompt by its tokens, and of decodes by their number."""

    context: Curve
    generation: Curve


@dataclass(frozen=True, slots=True)
class SequenceTables:
    """The timings of one folder, seconds; `states`: of linear attention, by name and the sizes of one rank."""

    context: Mapping[ModuleKind, Curve] = field(default_factory=dict)
    generation: Mapping[ModuleKind, Surface] = field(default_factory=dict)
    states: Mapping[tuple[str, Shape], StateTimes] = field(default_factory=dict)


def module_shape(model: Model) -> Shape:
    """The sizes of a layer of latent attention, but for its heads; an indexer's are 0 where there is none."""
    attention = model.attention
    assert isinstance(attention, LatentAttention)
    sizes = (
        attention.q_compressed,
        attention.kv_compressed,
        attention.rope_dim,
        attention.nope_dim,
        attention.value_dim,
    )
    indexer = attention.indexer
    return (model.hidden_size, *sizes, *((indexer.heads, indexer.head_dim, indexer.top_k) if indexer else (0, 0, 0)))


def state_shape(linear: LinearAttention, width: int) -> Shape:
    """Heads of one of `width` ranks, and sizes of keys and values."""
    return (linear.key_heads // width, linear.value_heads // width, linear.key_dim, linear.value_dim)


def read_sequence_tables(paths: Mapping[str, Path]) -> SequenceTables:
    """Read those of MODULES and STATES that are there."""
    context: dict[ModuleKind, Curve] = {}
    generation: dict[ModuleKind, Surface] = {}
    for prompts, decodes in MODULES.values():
        if prompts in paths and decodes in paths:
            context |= _module_prompts(read_columns(paths[prompts]))
            generation |= _module_decodes(read_columns(paths[decodes]))
    states: dict[tuple[str, Shape], StateTimes] = {}
    for name, table in STATES.items():
        if table in paths:
            states |= {(name, shape): times for shape, times in _states(read_columns(paths[table])).items()}
    return SequenceTables(context, generation, states)


def recurrent_layers(table: Columns) -> dict[str, dict[tuple[int, int, Shape], float]]:
    """Seconds by phase, then by sequences, tokens of each and shape: convolution and recurrence together.

    Shapes without a recurrence are left out: all of Mamba-2's, whose tables time the convolution alone.
    """
    name = table.text("op_name")[0]
    if any(column not in table.names for column in COLUMNS):
        return {}
    shapes = zip(*(table.wholes(column, low=1) for column in COLUMNS), strict=True)
    sizes = zip(table.wholes("batch_size", low=1), table.wholes("seq_len", low=1), shapes, strict=True)
    kernels: dict[tuple[str, tuple[int, int, Shape]], dict[str, float]] = defaultdict(dict)
    rows = zip(table.text("phase"), sizes, table.text("kernel_source"), table.numbers("latency"), strict=True)
    for phase, size, kernel, milliseconds in rows:
        kernels[phase, size][kernel] = milliseconds * 1e-3
    layers: dict[str, dict[tuple[int, int, Shape], float]] = defaultdict(dict)
    for (phase, size), parts in kernels.items():
        recurrences = [seconds for kernel, seconds in parts.items() if not kernel.startswith(CONVOLUTION)]
        convolutions = [seconds for kernel, seconds in parts.items() if kernel.startswith(CONVOLUTION)]
        if recurrences and convolutions:
            first = 0.0 if (name, phase) in HOST_BOUND else min(convolutions)
            layers[phase][size] = first + min(recurrences)
    return dict(layers)


def _states(table: Columns) -> dict[Shape, StateTimes]:
    layers = recurrent_layers(table)
    prompts: dict[Shape, dict[float, float]] = defaultdict(dict)
    decodes: dict[Shape, dict[float, float]] = defaultdict(dict)
    for (batch, tokens, shape), seconds in layers.get("context", {}).items():
        if batch == 1:
            prompts[shape][tokens] = seconds
    for (batch, _, shape), seconds in layers.get("generation", {}).items():
        decodes[shape][batch] = seconds
    return {
        shape: StateTimes(Curve(points.items()), Curve(decodes[shape].items()))
        for shape, points in prompts.items()
        if shape in decodes
    }


def _module_kinds(table: Columns) -> list[ModuleKind | None]:
    """The kind of each row; None for layers of models that no model file describes."""
    shapes: dict[str, Shape | None] = {}
    for name in set(table.text("model")):
        try:
            shapes[name] = module_shape(load_model(name))
        except BadInput:
            shapes[name] = None
    formats = (
        ["float16" if text == "bfloat16" else text for text in table.text(name)]
        for name in ("kv_cache_dtype", "gemm_type")
    )
    rows = zip(table.text("model"), table.wholes("num_heads", low=1), *formats, strict=True)
    kinds: list[ModuleKind | None] = []
    for model, heads, cache, weights in rows:
        shape = shapes[model]
        kinds.append(None if shape is None else ModuleKind(shape, heads, cache, weights))
    return kinds


def _module_prompts(table: Columns) -> dict[ModuleKind, Curve]:
    """Layers of single prompts without cached tokens."""
    points: dict[ModuleKind, dict[float, float]] = defaultdict(dict)
    for kind, batch, tokens, cached, seconds in _module_rows(table):
        if batch == 1 and not cached:
            points[kind][tokens] = seconds
    return {kind: Curve(curve.items()) for kind, curve in points.items()}


def _module_decodes(table: Columns) -> dict[ModuleKind, Surface]:
    """Layers of decodes. Cached tokens of each are `isl` + `step`, its new one included."""
    points: dict[ModuleKind, dict[int, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for kind, batch, tokens, cached, seconds in _module_rows(table):
        points[kind][batch][tokens + cached] = seconds
    return {
        kind: Surface({count: Curve(curve.items()) for count, curve in curves.items()})
        for kind, curves in points.items()
    }


def _module_rows(table: Columns) -> list[tuple[ModuleKind, int, int, int, float]]:
    """Kind, sequences, new and cached tokens of each, and seconds, of each row that a model file describes."""
    names = (("batch_size", 1), ("isl", 1), ("step", 0))
    sizes = (table.wholes(name, low=low) for name, low in names)
    rows = zip(_module_kinds(table), *sizes, table.numbers("latency", above=0.0), strict=True)
    return [
        (kind, batch, tokens, cached, 1e-3 * time) for kind, batch, tokens, cached, time in rows if kind is not None
    ]
