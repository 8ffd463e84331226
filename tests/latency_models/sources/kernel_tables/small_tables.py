"""Kernel tables small enough to work out by hand.

Microseconds. Linear layers: 10 and so much a row; attention: straight in every axis but where a test needs more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

from latency_models.deployment.models import Model
from latency_models.sources.kernel_tables.settings import KernelTableSettings
from latency_models.sources.kernel_tables.spec import KernelTableStepTime, load_kernel_tables
from schedulers.batches import Batch, Chunk
from schedulers.sequence import Sequence
from workloads.request import Request

CHUNKS, CONTEXTS, COUNTS, HISTORIES = (16, 64, 256), (0, 128, 512), (1, 4, 8), (16, 128, 1024)
PER_ROW = {
    "embedding": 0.01,
    "layernorm": 0.02,
    "qkv_proj": 0.3,
    "qk_norm": 0.04,
    "o_proj": 0.2,
    "gate_up_proj": 0.5,
    "act_fn": 0.05,
    "down_proj": 0.25,
    "final_layernorm": 0.03,
}

META = """\
profiler_version: 1.0.0
vllm_version: 0.19.0
gpu: Some GPU
profiled_at: '2026-04-24T12:44:27+00:00'
model: lab/tiny
measurement_iterations: 3
"""


def dense_time(layer: str, rows: int) -> float:
    return 10 + PER_ROW[layer] * rows


def head_time(sequences: int) -> float:
    return 20 + 2 * sequences


def decode_time(count: float, history: float) -> float:
    return 5 + 1.5 * count + 0.01 * count * history


def prefill_time(chunk: float, context: float) -> float:
    return 8 + 0.02 * chunk * (context + chunk / 2)


def mixed_time(chunk: float, context: float, count: float, history: float) -> float:
    return 9 + 0.5 * chunk + 0.01 * chunk * context + 0.02 * count * history + 0.001 * chunk * count


def write(path: Path, header: str, rows: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")


def attention_rows() -> list[str]:
    """All three regimes, every combination."""
    return [
        *(f"0,0,{n},{kv},{decode_time(n, kv)}" for n, kv in product(COUNTS, HISTORIES)),
        *(f"{c},{k},0,0,{prefill_time(c, k)}" for c, k in product(CHUNKS, CONTEXTS)),
        *(
            f"{c},{k},{n},{kv},{mixed_time(c, k, n, kv)}"
            for c, k, n, kv in product(CHUNKS, CONTEXTS, COUNTS, HISTORIES)
        ),
    ]


def make_tables(folder: Path, layers: Mapping[str, float] = PER_ROW, rows: Iterable[int] = (1, 32, 64, 512)) -> Path:
    """A folder without skew and experts; returns it."""
    rows = list(rows)
    dense = (f"{layer},{n},{dense_time(layer, n)}" for layer in layers for n in rows)
    write(folder / "dense.csv", "layer,tokens,time_us", dense)
    heads = (f"{layer},{n},{head_time(n)}" for layer in ("lm_head", "sampler") for n in (1, 64))
    write(folder / "per_sequence.csv", "layer,sequences,time_us", heads)
    write(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention_rows())
    (folder / "meta.yaml").write_text(META)
    return folder


TINY = Model.model_validate(
    {
        "schema": "twin.model/1",
        "name": "tiny",
        "hidden_size": 100,
        "layers": 3,
        "vocabulary": 1000,
        "tied_embeddings": True,
        "attention": {"kind": "gqa", "heads": 2, "kv_heads": 1, "head_dim": 50},
        "ffn": {"kind": "dense", "intermediate_size": 200},
        "source": "made up",
    }
)


def experts_of(model: Model, *, experts: int = 8, per_token: int = 2, dense_layers: int = 0) -> Model:
    """The model with experts in place of its FFN."""
    ffn = {
        "kind": "moe",
        "intermediate_size": 200,
        "experts": experts,
        "experts_per_token": per_token,
        "dense_layers": dense_layers,
        "dense_intermediate_size": 200 if dense_layers else 0,
    }
    return Model.model_validate({**model.model_dump(by_alias=True), "ffn": ffn})


def load(folder: Path, model: Model = TINY, **settings: object) -> KernelTableStepTime:
    """Step times of a folder, with 3 layers and no overhead."""
    return load_kernel_tables(folder, KernelTableSettings.model_validate({"model": "tiny", **settings}), model)


def batch(chunks: Iterable[tuple[int, int]] = (), lengths: Iterable[int] = ()) -> Batch:
    """A batch of (tokens, context) chunks, none the last of its prompt, and of decodes that attend to these lengths."""
    sequence, lengths = Sequence(Request(0, 0.0, 1, 1), 0, False), list(lengths)
    result = [Chunk(sequence, tokens, context, False) for tokens, context in chunks]
    decodes = [sequence] * len(lengths)
    return Batch(result, decodes, sum(lengths), max(lengths, default=0))


def rows_seconds(rows: int, layers: int = 3) -> float:
    """Linear layers of a step, by hand."""
    once = sum(dense_time(layer, rows) for layer in ("embedding", "final_layernorm"))
    item = ("qkv_proj", "qk_norm", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    layer = sum(dense_time(name, rows) for name in item) + 2 * dense_time("layernorm", rows)
    return 1e-6 * (once + layers * layer)


def head_seconds(sequences: int) -> float:
    return 1e-6 * 2 * head_time(sequences)
