"""Decoders with weights of 3 and 4 bits: logits are those of transformers with Ŵ; what is wrong is told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cases import random_layer
from kernels.shapes import Shape
from kernels.w4_gemm import PackedWeight, dequantise
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.linear import Compensated, Matrix, Reordered, Rounding, Stacked, linear
from live.models.weights import DenseFFN, load_weights, random_weights
from live.validation.backend import LiveBackend, model_source
from scenarios.validation import LiveModelSpec, QuantiseSpec
from tests.live.packed_checkpoints import Format, Tensors, change, gptq_words, model_of, write
from tests.live.test_engine import assert_logits_agree
from workloads.errors import BadInput

pytest.importorskip("transformers", reason="checkpoints are written from transformers' models")

FORMATS = {
    "awq": Format("gemm", 4, 128, symmetric=False, family="Qwen3"),
    "awq, whole rows": Format("gemm", 4, -1, symmetric=False),
    "awq, groups of 64": Format("gemm", 4, 64, symmetric=False),
    "gptq": Format("gptq", 4, 128, symmetric=True, family="Qwen3"),
    "gptq, zero points": Format("gptq", 4, 128, symmetric=False),
    "gptq, second format": Format("gptq_v2", 4, 128, symmetric=False, orders="alike"),
    "gptq, unlike orders": Format("gptq", 4, 128, symmetric=True, orders="unlike", family="Qwen3"),
    "gptq, groups of 32, ordered": Format("gptq", 4, 32, symmetric=False, orders="unlike"),
    "gptq, groups of 256": Format("gptq", 4, 256, symmetric=False, orders="alike"),
    "gptq, 3 bits": Format("gptq", 3, 128, symmetric=False),
    "gptq, 3 bits, whole rows": Format("gptq_v2", 3, -1, symmetric=True),
}


def read(directory: Path, dtype: torch.dtype = torch.float32, rounding: Rounding | None = None) -> Decoder:
    config = read_config(directory)
    return Decoder(config, load_weights(directory, config, dtype, "cpu", rounding))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dense_model(name: str, tmp_path: Path) -> None:
    peer = write(FORMATS[name], tmp_path)
    assert_logits_agree(read(tmp_path), peer)


@pytest.mark.parametrize(
    ("name", "qkv", "down"),
    [
        ("awq", PackedWeight, PackedWeight),
        ("awq, groups of 64", torch.Tensor, torch.Tensor),
        ("gptq, second format", Reordered, Reordered),
        ("gptq, unlike orders", Stacked, Reordered),
        ("gptq, groups of 256", PackedWeight, Reordered),  # the hidden size is one group: nothing to order
    ],
)
def test_what_layers_are_kept_as(name: str, qkv: type, down: type, tmp_path: Path) -> None:
    write(FORMATS[name], tmp_path)
    layer = read(tmp_path).weights.layers[0]
    assert isinstance(layer.qkv, qkv)
    assert isinstance(layer.ffn, DenseFFN)
    assert isinstance(layer.ffn.down, down)
    if isinstance(layer.qkv, Stacked):
        assert len(layer.qkv.parts) == 3


def test_modules_left_dense_stand_beside_packed_ones(tmp_path: Path) -> None:
    peer = write(FORMATS["awq"], tmp_path, dense=("lm_head", "k_proj", "down_proj"))
    decoder = read(tmp_path)
    layer = decoder.weights.layers[0]
    assert isinstance(layer.qkv, Stacked)
    assert [type(part) for part in layer.qkv.parts] == [PackedWeight, torch.Tensor, PackedWeight]
    assert_logits_agree(decoder, peer)


@pytest.mark.parametrize("name", ["awq", "gptq, 3 bits", "gptq, unlike orders", "gptq, groups of 32, ordered"])
def test_products_in_bfloat16(name: str, tmp_path: Path) -> None:
    peer = write(FORMATS[name], tmp_path)
    weights = read(tmp_path, torch.bfloat16).weights
    assert weights.embedding.dtype == weights.norm.dtype == torch.bfloat16
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    attention = peer.model.layers[0].self_attn
    exact = torch.cat([part(x.float()) for part in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=1)
    result = linear(x, weights.layers[0].qkv)
    assert result.dtype == torch.bfloat16
    assert (result.float() - exact).abs().max() < 2**-7 * exact.abs().max()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 128])
@pytest.mark.parametrize("bits", [3, 4])
def test_rounding_is_off_by_half_a_step_at_most(bits: int, group: int, symmetric: bool, tmp_path: Path) -> None:
    peer = model_of("Llama")
    peer.save_pretrained(tmp_path)
    decoder = read(tmp_path, rounding=Rounding(bits, group, symmetric))
    peer_layer, layer = peer.model.layers[0], decoder.weights.layers[0]
    assert isinstance(layer.ffn, DenseFFN)
    attention, ffn = peer_layer.self_attn, peer_layer.mlp
    pairs: list[tuple[Matrix, list[Any]]] = [
        (layer.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (layer.o, [attention.o_proj]),
        (layer.ffn.gate_up, [ffn.gate_proj, ffn.up_proj]),
        (layer.ffn.down, [ffn.down_proj]),
    ]
    for packed, modules in pairs:
        assert isinstance(packed, PackedWeight)
        weight, close = torch.cat([module.weight.data for module in modules]), dequantise(packed)
        assert (packed.zeros is None) == symmetric
        span = 128 if group == 128 else weight.shape[1]
        step = packed.scales[: weight.shape[1] // span, : weight.shape[0]].T.float().repeat_interleave(span, 1)
        # The scale is a float16: the outermost of 2^bits codes may be off by 2^-11 of their distance more.
        assert ((weight - close).abs() <= step * (0.5 + 2.0 ** (bits - 11))).all()
        for module, rows in zip(modules, close.split([len(module.weight) for module in modules]), strict=True):
            module.weight.data = rows
    assert torch.equal(decoder.weights.embedding, peer.model.embed_tokens.weight.data)
    assert_logits_agree(decoder, peer)


def test_random_weights_are_as_few_bits_as_the_config_says(tmp_path: Path) -> None:
    write(FORMATS["gptq, 3 bits"], tmp_path)
    config = read_config(tmp_path)
    layer = random_weights(config, torch.float32, "cpu").layers[0]
    assert isinstance(layer.qkv, PackedWeight)
    assert (layer.qkv.bits, layer.qkv.group, layer.qkv.zeros is None) == (3, 128, False)
    packed = random_weights(config, torch.float32, "cpu", rounding=Rounding(4, -1)).layers[0].qkv
    assert isinstance(packed, PackedWeight)
    assert (packed.bits, packed.group, packed.zeros) == (4, 0, None)


def test_the_backend_rounds_what_a_scenario_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_of("Llama").config.to_dict()))
    model = LiveModelSpec(path=".", weights="random", quantise=QuantiseSpec(bits=3, group=-1, symmetric=False))
    backend = LiveBackend(model_source(model, tmp_path, 0))
    weight = backend.decoder.weights.layers[0].o
    assert isinstance(weight, PackedWeight)
    assert (weight.bits, weight.group, weight.zeros is None) == (3, 0, False)


def test_zeros_for_a_bias_are_no_bias(tmp_path: Path) -> None:
    peer = write(FORMATS["gptq"], tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.down_proj.bias": torch.zeros(256).half()}))
    assert_logits_agree(read(tmp_path), peer)


def test_a_zero_point_that_is_stored_as_15_is_16(tmp_path: Path) -> None:
    write(FORMATS["gptq, zero points"], tmp_path)
    change(tmp_path, lambda tensors: tensors["model.layers.0.self_attn.o_proj.qzeros"].fill_(-1))
    weight = read(tmp_path).weights.layers[0].o
    assert isinstance(weight, PackedWeight)
    assert (dequantise(weight) < 0).all(), "every code is less than 16"


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda t: t.pop(f"{Q}.qzeros"), f"{Q}.qzeros: expected this tensor, which is missing"),
        (lambda t: t.pop(f"{Q}.qweight"), f"{Q}.weight: expected this tensor, which is missing"),
        (lambda t: t.pop(f"{Q}.g_idx"), f"{Q}.g_idx: expected this tensor, which is missing"),
        (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].T.contiguous()}), "expected shape [32, 256]"),
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:1]}), f"{Q}.scales: got [1, 256], expected shape"),
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].int()}), "got 'int32', expected float16"),
        (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}), "got 'float32', expected int32"),
        (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].float() * 1e9}), "expected values that float16 can hold"),
        (lambda t: t.update({f"{Q}.g_idx": torch.zeros(256, dtype=torch.int32)}), "expected 128 inputs in each group"),
        (lambda t: t.update({f"{Q}.bias": torch.ones(256).half()}), f"{Q}.bias: expected zeros"),
        (lambda t: t.update({"lm_head.qweight": gptq_words(torch.zeros(8, 8).long(), 4)}), "lm_head.qweight: expected"),
    ],
)  # fmt: skip
def test_a_broken_tensor_is_named(edit: Callable[[Tensors], object], expected: str, tmp_path: Path) -> None:
    write(FORMATS["gptq, second format"], tmp_path)
    change(tmp_path, edit)
    with pytest.raises(BadInput) as error:
        read(tmp_path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "awq", "bits": 3}, "quantization_config.bits: got 3, expected 4"),
        ({"quant_method": "awq", "version": "gemv"}, "quantization_config.version: got 'gemv', expected gemm"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, "checkpoint_format: got 'gptq_p', expected gptq or"),
        ({"quant_method": "gptq", "format": "marlin"}, "quantization_config.format: got 'marlin', expected gptq or"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format: got True, expected false"),
        ({"quant_method": "fp8"}, "quantization_config.quant_method: got 'fp8', expected awq or gptq"),
    ],
)
def test_formats_that_are_not_read(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    document = model_of("Llama").config.to_dict() | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(BadInput) as error:
        read_config(tmp_path)
    assert expected in str(error.value)


def test_rounding_that_cannot_be(checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    for wrong in ({"bits": 8}, {"group": 64}):
        with pytest.raises(BadInput, match=rf"quantise\.{next(iter(wrong))}: got "):
            Rounding(**wrong)
    mixture, _ = checkpoint("qwen3-moe")
    with pytest.raises(BadInput, match="no experts are served in few bits"):
        read(mixture, rounding=Rounding())
    write(FORMATS["awq"], tmp_path)
    with pytest.raises(BadInput, match="quantise: expected none: the checkpoint is awq's already"):
        read(tmp_path, rounding=Rounding())


def test_a_worker_on_another_stream_has_counters_of_its_own() -> None:
    """Kernels of two launches at once would count in each other's: a sum too early, or a wait without end."""
    config = ModelConfig("llama", Shape(1, 256, 256, 4, 2, 64, 50), max_position_embeddings=64, tied=True)
    decoder = Decoder(config, random_weights(config, torch.float32, "cpu", 0, Rounding()))
    qkv = decoder.weights.layers[0].qkv
    assert isinstance(qkv, PackedWeight)
    compensated = Compensated(qkv, random_layer(qkv.outputs, qkv.inputs, 16, 128, "cpu")[1])
    decoder.weights.layers[0] = replace(decoder.weights.layers[0], o=Stacked((qkv, compensated)))
    second = decoder.for_another_stream()
    packed, stacked = second.weights.layers[0].qkv, second.weights.layers[0].o
    assert isinstance(packed, PackedWeight)
    assert isinstance(stacked, Stacked)
    last = stacked.parts[1]
    assert isinstance(last, Compensated)
    assert packed.qweight is qkv.qweight
    assert last.compensator.down is compensated.compensator.down
    assert second.weights.embedding is decoder.weights.embedding
    counters = [qkv, packed, stacked.parts[0], last.weight, last.compensator, compensated.compensator]
    assert len({part.arrivals.data_ptr() for part in counters}) == len(counters)
