"""One model's kernels on one rank, added up over its layers into a few curves.

A layer's GEMMs, experts and all-reduces depend only on the rows of a batch (prompt tokens and decodes), so they form
one curve. Prompt attention, decode attention and the output head are separate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ROUTER, ExpertFFN, GroupedQueryAttention, Model
from latency_models.interpolation import Curve, Surface, weighted_sum
from latency_models.sources.aiconfigurator.tables import (
    BALANCED,
    AttentionKind,
    ExpertKind,
    KernelTables,
    ModuleKind,
    module_shape,
)
from latency_models.step_time import Origin
from workloads.errors import BadInput
from workloads.json_files import read_json_object

ELEMENT_BYTES = {"float16": 2.0, "fp8": 1.0}
"""Bytes of a KV cache element, by format."""

HEAD_FORMAT = "float16"
"""Format of the output head and of the routers of MoE layers, for any format of the other weights."""

NO_BANDWIDTH = (
    "kv_token is 0, no bound on decode attention: no file in ../systems is named as the folder begins, so the memory "
    "bandwidth is not known"
)

SCHEMA = "twin.kernels/1"

EXPERT_ROWS = {"vllm": 256}
"""The fewest tokens in the cost of a MoE layer, by the engine of the tables; 1 for others. vLLM's tables time few
tokens at few experts, whereas every expert's weights are read in service; TensorRT-LLM's tables read them all. Kernels
alone, nothing fitted, of Qwen3-235B-A22B: a median error of 6.7 % for vLLM's rows (38 % without), 6.8 % for
TensorRT-LLM's (27 % with)."""

GEMMS, EXPERTS, COLLECTIVES = "gemms", "experts", "collectives"
"""Kinds of kernels whose time depends on rows alone."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a model on the ranks of one engine. Formats have the tables' names.

    `expert_tensor_parallel` ranks share each expert, and experts are spread over `expert_parallel`; their product over
    `tensor_parallel` is the number of attention replicas that feed one set of experts. `attention`: format in which
    prompt attention is computed. `expert_load`: how the tables spread tokens over experts.
    """

    tensor_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert_parallel: int = 1
    weights: str = "float16"
    cache: str = "float16"
    attention: str = "float16"
    expert_load: str = BALANCED

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one set of experts."""
        return self.expert_tensor_parallel * self.expert_parallel


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """Kernel seconds of a whole forward pass on one rank.

    `rows`: all linear layers, experts and all-reduces, by rows; `experts`, `collectives`: the share that these take
    (None without them, and in files of earlier versions). `head`: by sequences that sample. `context`: attention of one
    prompt by its tokens; `generation`: of decodes, by number and cached tokens of each. `kv_token`: seconds to read one
    at the memory's bandwidth; 0: not known.
    """

    layers: int
    rows: Curve
    head: Curve
    context: Curve
    generation: Surface
    kv_token: float = 0.0
    experts: Curve | None = None
    collectives: Curve | None = None
    notes: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)

    def document(self) -> dict[str, Any]:
        """Content of the file. `from_document` reads it as an equal object."""
        return {
            "schema": SCHEMA,
            "origin": self.origin.document(),
            "layers": self.layers,
            "rows": self.rows.document(),
            "head": self.head.document(),
            "context": self.context.document(),
            "generation": self.generation.document(),
            "kv_token": self.kv_token,
            **{name: curve.document() for name in (EXPERTS, COLLECTIVES) if (curve := getattr(self, name)) is not None},
            "notes": list(self.notes),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ModelKernels:
        """Kernels from the content of a file."""
        if document.get("schema") != SCHEMA:
            raise BadInput(f"expected {SCHEMA}", field="schema", value=document.get("schema"))
        try:
            return cls(
                layers=document["layers"],
                generation=Surface.from_document(document["generation"]),
                kv_token=document["kv_token"],
                **{name: Curve.from_document(document[name]) for name in ("rows", "head", "context")},
                **{name: Curve.from_document(document[name]) for name in (EXPERTS, COLLECTIVES) if name in document},
                notes=tuple(document["notes"]),
                origin=Origin(**document.get("origin", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"expected the document of a ModelKernels: {error!r}", field="kernels") from None


def compose(tables: KernelTables, model: Model, placement: Placement) -> ModelKernels:
    _check(model, placement)
    formats = tables.tables["gemm"]
    if HEAD_FORMAT not in formats:
        expected = f"expected GEMMs in {HEAD_FORMAT} too: the output head and routers run in it whatever the weights"
        raise BadInput(f"{expected}, found {', '.join(sorted(formats))}", field="gemm_dtype", file=tables.folder)
    width = placement.tensor_parallel
    notes = list(tables.notes)
    head, measured = tables.gemm(HEAD_FORMAT, model.vocabulary // width, model.hidden_size)
    if not measured:
        notes.append(_stretched("output head", model.vocabulary // width, model.hidden_size))
    if tables.device is None:
        notes.append(NO_BANDWIDTH)
    context, generation = attention_times(tables, model, placement)
    parts = list(_row_parts(tables, model, placement, notes))
    return ModelKernels(
        layers=model.layers,
        rows=weighted_sum((times, curve) for _, times, curve in parts),
        experts=_part(parts, EXPERTS),
        collectives=_part(parts, COLLECTIVES),
        head=head,
        context=context,
        generation=generation,
        kv_token=0.0 if (device := tables.device) is None else _read_bytes(model, placement) / device.memory_bandwidth,
        notes=tuple(notes),
        origin=tables.origin.completed(Origin(model=model.name, tensor_parallel=width)),
    )


def attention_times(tables: KernelTables, model: Model, placement: Placement) -> tuple[Curve, Surface]:
    """Seconds of attention in all layers: of one prompt by its tokens, of decodes by number and cached tokens.

    Latent and sparse attention contain their projections. Linear attention costs the same whatever the context.
    """
    prompts: list[tuple[int, Curve]] = []
    decodes: list[tuple[int, Surface]] = []
    for times, names, kinds in _attention_kinds(model, placement):
        prompts.append((times, tables.find(names[0], kinds[0])))
        decodes.append((times, tables.find(names[1], kinds[1])))
    linear = model.linear_attention
    if linear is not None:
        context, generation = tables.states(linear, placement.tensor_parallel)
        prompts.append((linear.layers, context))
        curves = decodes[0][1].curves
        level = {count: Curve((x, generation.at(count)) for x in curve.x) for count, curve in curves.items()}
        decodes.append((linear.layers, Surface(level)))
    counts = {count for _, surface in decodes for count in surface.curves}
    by_count = {count: weighted_sum((layers, _at(surface, count)) for layers, surface in decodes) for count in counts}
    return weighted_sum(prompts), Surface(by_count)


def _attention_kinds(
    model: Model, placement: Placement
) -> Iterator[tuple[int, tuple[str, str], tuple[Hashable, Hashable]]]:
    """Numbers of layers, the tables of their prompts and decodes, and the kinds of kernel in each."""
    attention, width = model.attention, placement.tensor_parallel
    if not isinstance(attention, GroupedQueryAttention):
        kind = ModuleKind(module_shape(model), attention.heads // width, placement.cache, placement.weights)
        name = "dsa" if attention.indexer else "mla"
        yield model.attention_layers, (f"{name}_context_module", f"{name}_generation_module"), (kind, kind)
        return
    heads = *_heads(attention, placement), attention.head_dim
    windows = ((0, model.attention_layers - model.windowed_layers), (attention.window, model.windowed_layers))
    formats = (placement.attention, "float16")  # decode kernels were timed computing in 16 bits whatever the cache
    for window, times in windows:
        if times:
            prompts, decodes = (AttentionKind(compute, placement.cache, *heads, window) for compute in formats)
            yield times, ("context_attention", "generation_attention"), (prompts, decodes)


def _heads(attention: GroupedQueryAttention, placement: Placement) -> tuple[int, int]:
    width = placement.tensor_parallel
    return attention.heads // width, max(attention.kv_heads // width, 1)


def cached_bytes(model: Model, placement: Placement) -> float:
    """Bytes of a cached token in one layer on one rank."""
    attention = model.attention
    elements = attention.cached_elements
    if isinstance(attention, GroupedQueryAttention):
        elements = 2 * _heads(attention, placement)[1] * attention.head_dim
    return elements * ELEMENT_BYTES[placement.cache]


def _read_bytes(model: Model, placement: Placement) -> float:
    """Bytes that a decode reads of each cached token: all of them, or an indexer's keys, and nothing behind windows."""
    if model.indexer is not None:
        return model.indexer_layers * model.indexer.cached_bytes
    return (model.attention_layers - model.windowed_layers) * cached_bytes(model, placement)


def _check(model: Model, placement: Placement) -> None:
    attention, width = model.attention, placement.tensor_parallel
    linear = model.linear_attention
    if linear is not None and linear.key_heads % max(width, 1):
        expected = f"expected a divisor of the key heads of linear attention ({linear.key_heads})"
        raise BadInput(expected, field="tensor_parallel", value=width)
    if placement.cache not in ELEMENT_BYTES:
        raise BadInput(f"expected one of {', '.join(ELEMENT_BYTES)}", field="cache", value=placement.cache)
    if width < 1 or attention.heads % width:
        expected = f"expected a divisor of the heads ({attention.heads})"
        raise BadInput(expected, field="tensor_parallel", value=width)
    if isinstance(model.ffn, ExpertFFN) and (placement.expert_ranks < 1 or placement.expert_ranks % width):
        expected = f"expected a multiple of tensor_parallel ({width})"
        raise BadInput(expected, field="expert_tensor_parallel·expert_parallel", value=placement.expert_ranks)


def _row_parts(
    tables: KernelTables, model: Model, placement: Placement, notes: list[str]
) -> Iterator[tuple[str, float, Curve]]:
    ffn, hidden, width = model.ffn, model.hidden_size, placement.tensor_parallel
    for times, (name, *sizes) in model.projections(width):
        if name.startswith("mla"):  # tables of modules have the projections of latent attention
            continue
        columns, inner = map(int, sizes)
        curve, measured = tables.gemm(HEAD_FORMAT if name == ROUTER else placement.weights, columns, inner)
        if not measured:
            notes.append(_stretched(name, columns, inner))
        yield GEMMS, times, curve
        if name == ROUTER and isinstance(ffn, ExpertFFN):
            yield EXPERTS, times, _experts(tables, ffn, hidden, placement)
    ranks = placement.expert_ranks if isinstance(ffn, ExpertFFN) else width
    for times, devices, rows in ((model.mixers, width, 1), (model.layers_with_ffn, ranks, ranks // width)):
        if devices > 1:
            by_elements: Curve = tables.find("custom_allreduce", devices, "devices")
            points = zip(by_elements.x, by_elements.y, strict=True)
            yield COLLECTIVES, times, Curve((size / (hidden * rows), seconds) for size, seconds in points)


def _part(parts: Iterable[tuple[str, float, Curve]], kind: str) -> Curve | None:
    terms = [(times, curve) for part_kind, times, curve in parts if part_kind == kind]
    return weighted_sum(terms) if terms else None


def _experts(tables: KernelTables, ffn: ExpertFFN, hidden: int, placement: Placement) -> Curve:
    """Seconds of a MoE layer by the rows of one attention replica. All replicas have as many rows."""
    kind = ExpertKind(
        placement.weights,
        hidden,
        ffn.intermediate_size,
        ffn.experts_per_token,
        ffn.experts,
        placement.expert_tensor_parallel,
        placement.expert_parallel,
        placement.expert_load,
    )
    replicas = placement.expert_ranks // placement.tensor_parallel
    by_tokens: Curve = tables.find("moe", kind)
    minimum = float(EXPERT_ROWS.get(tables.origin.engine, 1))
    tokens = [minimum, *(size for size in by_tokens.x if size > minimum)]
    return Curve((size / replicas, by_tokens.at(size)) for size in tokens)


def _at(surface: Surface, count: int) -> Curve:
    low, high, share = surface.between(count)
    return weighted_sum([(1.0 - share, low), (share, high)]) if share else low


def _stretched(name: str, n: int, k: int) -> str:
    return f"{name} ({n} by {k}): a straight line between measured shapes, or in proportion beyond them"


def model_and_format(name: str) -> tuple[Model, str]:
    """A model and the format of its weights: as published, or as its name or `quantization_config` says."""
    model = any_model(name)
    formats = model.formats()
    if str(formats) not in ("bf16", "fp8"):
        expected = "expected weights in bf16 or fp8; --weights names another format as the tables do"
        raise BadInput(expected, field="--model", value=f"{name} ({formats})")
    if formats.linear == "bf16":
        return model, "float16"
    section = read_json_object(Path(name)).get("quantization_config") if name.endswith(".json") else None
    blocks = isinstance(section, dict) and section.get("weight_block_size")
    return model, "fp8_block" if isinstance(model.ffn, ExpertFFN) or blocks else "fp8"
