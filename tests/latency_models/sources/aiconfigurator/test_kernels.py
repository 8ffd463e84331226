"""A model's kernels, added up by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from latency_models.deployment.models import Model, load_model
from latency_models.sources.aiconfigurator.kernels import ModelKernels, Placement, compose
from latency_models.sources.aiconfigurator.tables import read_tables
from tests.latency_models.sources.aiconfigurator.small_tables import (
    all_reduce_time,
    context_time,
    expert_time,
    gemm_time,
    generation_time,
)
from workloads.errors import BadInput

DENSE = {"kind": "dense", "intermediate_size": 512}
EXPERTS = {"kind": "moe", "intermediate_size": 128, "experts": 8, "experts_per_token": 2}


def model(ffn: dict[str, Any] = DENSE, **fields: Any) -> Model:
    return Model.model_validate(
        {
            "schema": "twin.model/1",
            "name": "small",
            "hidden_size": 256,
            "layers": 3,
            "vocabulary": 1000,
            "tied_embeddings": True,
            "attention": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 64},
            "ffn": ffn,
            "source": "made up",
        }
        | fields
    )


def test_a_dense_model_on_one_device(tables: Path) -> None:
    kernels = compose(read_tables(tables), model(), Placement())
    assert kernels.layers == 3
    for rows in (1, 77, 8192):
        layer = (
            gemm_time(rows, 512, 256)  # (4 + 2·2) heads of 64
            + gemm_time(rows, 256, 256)
            + gemm_time(rows, 1024, 256)
            + gemm_time(rows, 256, 512)
        )
        assert kernels.rows.at(rows) == pytest.approx(3 * layer)
    assert kernels.head.at(5) == pytest.approx(gemm_time(5, 1000, 256))
    assert kernels.context.at(300) == pytest.approx(3 * context_time(300))
    assert kernels.generation.at(20, 900) == pytest.approx(3 * generation_time(20, 900))
    assert kernels.kv_token == pytest.approx(3 * 2 * 2 * 64 * 2 / 1e12)  # layers, K and V, heads, dim, bytes


def test_two_devices_halve_the_shapes_and_reduce_twice_a_layer(tables: Path) -> None:
    kernels = compose(read_tables(tables), model(), Placement(tensor_parallel=2))
    for rows in (1, 77, 8192):
        layer = (
            gemm_time(rows, 256, 256)
            + gemm_time(rows, 256, 128)
            + gemm_time(rows, 512, 256)
            + gemm_time(rows, 256, 256)
            + 2 * all_reduce_time(max(256 * rows, 128))
        )
        assert kernels.rows.at(rows) == pytest.approx(3 * layer)
    assert kernels.head.at(5) == pytest.approx(gemm_time(5, 500, 256))


def test_experts_take_the_place_of_the_ffn(tables: Path) -> None:
    kernels = compose(read_tables(tables), model(EXPERTS), Placement())
    for rows in (1, 50, 8192):
        layer = gemm_time(rows, 512, 256) + gemm_time(rows, 256, 256) + gemm_time(rows, 64, 256) + expert_time(rows)
        assert kernels.rows.at(rows) == pytest.approx(3 * layer)  # a router of 8 columns takes what 64 do


def test_attention_replicas_feed_their_rows_to_one_set_of_experts(tables: Path) -> None:
    kernels = compose(read_tables(tables), model(EXPERTS), Placement(expert_parallel=2))
    layer = gemm_time(50, 512, 256) + gemm_time(50, 256, 256) + gemm_time(50, 64, 256) + expert_time(100)
    assert kernels.rows.at(50) == pytest.approx(3 * (layer + all_reduce_time(2 * 50 * 256)))


def test_an_expert_layer_of_vllm_takes_at_least_what_256_rows_take(tables: Path) -> None:
    content = read_tables(tables)
    trtllm, vllm = (
        compose(replace(content, origin=replace(content.origin, engine=engine)), model(EXPERTS), Placement())
        for engine in ("trtllm", "vllm")
    )
    for rows in (1, 255, 256, 500):
        more = 3 * (expert_time(max(rows, 256)) - expert_time(rows))
        assert vllm.rows.at(rows) - trtllm.rows.at(rows) == pytest.approx(more, abs=1e-12)


def test_leading_dense_layers_and_shared_experts(tables: Path) -> None:
    ffn = EXPERTS | {"shared_experts": 1, "dense_layers": 1, "dense_intermediate_size": 512}
    kernels = compose(read_tables(tables), model(ffn), Placement())
    attention = gemm_time(9, 512, 256) + gemm_time(9, 256, 256)
    sparse = gemm_time(9, 64, 256) + expert_time(9) + gemm_time(9, 256, 256) + gemm_time(9, 256, 128)
    dense = gemm_time(9, 1024, 256) + gemm_time(9, 256, 512)
    assert kernels.rows.at(9) == pytest.approx(3 * attention + 2 * sparse + dense)


def test_shapes_between_those_measured_are_noted(tables: Path) -> None:
    notes = compose(read_tables(tables), model(), Placement()).notes
    assert [note.partition(":")[0] for note in notes] == [
        "output head (1000 by 256)",
        "qkv (512 by 256)",
        "output (256 by 256)",
        "gate_up (1024 by 256)",
        "down (256 by 512)",
    ]


def test_kernels_come_back_from_their_document(tables: Path) -> None:
    kernels = compose(read_tables(tables), model(), Placement(tensor_parallel=2))
    assert ModelKernels.from_document(json.loads(json.dumps(kernels.document()))) == kernels


def test_a_document_of_something_else_is_refused(tables: Path) -> None:
    document = compose(read_tables(tables), model(), Placement()).document()
    with pytest.raises(BadInput, match=r"schema: got 'twin.model/1', expected twin.kernels/1"):
        ModelKernels.from_document(document | {"schema": "twin.model/1"})
    del document["context"]
    with pytest.raises(BadInput, match=r"kernels: expected the document of a ModelKernels: KeyError\('context'\)"):
        ModelKernels.from_document(document)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(tensor_parallel=3), r"tensor_parallel: got 3, expected a divisor of the heads \(4\)"),
        (Placement(cache="int4"), r"cache: got 'int4', expected one of float16, fp8"),
        (Placement(weights="fp8"), r"weights: got 'fp8', expected one of float16"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(tables: Path, placement: Placement, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        compose(read_tables(tables), model(), placement)


def test_experts_on_fewer_ranks_than_attention_are_refused(tables: Path) -> None:
    with pytest.raises(BadInput, match=r"got 1, expected a multiple of tensor_parallel \(2\)"):
        compose(read_tables(tables), model(EXPERTS), Placement(tensor_parallel=2))


def test_latent_attention_without_its_tables_names_them(tables: Path) -> None:
    with pytest.raises(BadInput, match=r"mla_context_module: got ModuleKind.*, expected one of none"):
        compose(read_tables(tables), load_model("deepseek-v3"), Placement())
