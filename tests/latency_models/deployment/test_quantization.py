"""Formats of weights from the `quantization_config` of a config.json, as published models state them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import Formats
from latency_models.sources.roofline.spec import RooflineSpec
from tests.latency_models.deployment.test_hugging_face import CONFIGS
from workloads.errors import BadInput

DENSE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 128,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}, "ignore": []}


def config(folder: Path, section: Any, model: str = "") -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps((CONFIGS[model] if model else DENSE) | {"quantization_config": section}))
    return path


@pytest.mark.parametrize(
    ("section", "linear"),
    [
        (None, "bf16"),
        (BLOCKS, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "fp8"),
        ({"quant_algo": "NVFP4", "producer": {"name": "modelopt"}}, "fp4"),  # files of earlier versions
        (compressed(num_bits=8, type="float"), "fp8"),
        (compressed(num_bits=8, type="int"), "int8"),
        (compressed(**NVFP4), "fp4"),
    ],
)
def test_a_dense_model(section: Any, linear: str, tmp_path: Path) -> None:
    assert any_model(config(tmp_path, section)).formats().linear == linear


@pytest.mark.parametrize(
    ("model", "section", "formats"),
    [
        ("deepseek-v3", BLOCKS, Formats("fp8", "fp8")),
        (
            "gpt-oss-20b",
            {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            },
            Formats("bf16", "mxfp4"),
        ),
        # A module of another name that contains an excluded one, gate_proj, is none of it.
        ("minimax-m2.5", BLOCKS | {"modules_to_not_convert": ["gate", "lm_head"]}, Formats("fp8", "fp8")),
        (
            "minimax-m2.5",
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", *(f"model.layers.{i}.self_attn*" for i in range(62))],
            },
            Formats("bf16", "fp4"),
        ),
        (
            "qwen3-30b-a3b",
            compressed(num_bits=4, type="float", group_size=32) | {"ignore": ["re:.*self_attn.*"]},
            Formats("bf16", "mxfp4"),
        ),
        (  # Kimi-K2's, which quantises experts alone
            "qwen3-30b-a3b",
            compressed(num_bits=4, type="int", group_size=32) | {"ignore": ["re:.*self_attn.*"]},
            Formats("bf16", "int4"),
        ),
        ("qwen3-30b-a3b", BLOCKS | {"modules_to_not_convert": ["mlp.experts"]}, Formats("fp8", "bf16")),
        # The first layer alone in bf16.
        (
            "qwen3-30b-a3b",
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.0*"]},
            Formats("fp4", "fp4"),
        ),
    ],
)
def test_a_mixture_of_experts(model: str, section: dict[str, Any], formats: Formats, tmp_path: Path) -> None:
    assert any_model(config(tmp_path, section, model)).formats() == formats


def test_modelopts_own_file_beside_the_config(tmp_path: Path) -> None:
    path = config(tmp_path, None)
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert any_model(path).formats().linear == "fp8"
    assert any_model(tmp_path).formats().linear == "fp8"  # the folder


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config.quant_method: got 'awq', expected one of fp8"),
        ({"quant_method": "gptq", "bits": 4}, "quantization_config.quant_method: got 'gptq'"),
        ({"bits": 4}, "quantization_config.quant_method: expected one of fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo: got 'MIXED_PRECISION', expected"),
        (
            compressed(num_bits=4, type="int", group_size=128),
            "got '4-bit int in groups of 128', expected one of 8-bit float",
        ),
        (
            compressed(num_bits=4, type="int", group_size=32),
            "expected linear layers of one format, other than MXFP4 and",
        ),
        (compressed() | {"config_groups": {}}, "config_groups: got [], expected weights of one format"),
        (BLOCKS | {"modules_to_not_convert": ["self_attn"]}, "quant_method: got 'fp8', expected linear layers of one"),
        ({"quant_method": ["fp8"]}, "quantization_config.quant_method: got ['fp8'], expected one of fp8"),
        (compressed(num_bits=[8], type="float"), "weights: got '[8]-bit float', expected one of 8-bit float"),
        ({"quant_method": "mxfp4"}, "quant_method: got 'mxfp4', expected linear layers of one format"),
    ],
)
def test_a_format_without_step_times_is_refused_by_its_name(section: Any, message: str, tmp_path: Path) -> None:
    path = config(tmp_path, section)
    model = any_model(path)  # its shapes are known all the same
    with pytest.raises(BadInput) as error:
        model.formats()
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    spec = {"source": "roofline", "model": str(path), "hardware": "h200"}
    with pytest.raises(BadInput) as error:
        RooflineSpec.model_validate(spec).build(tmp_path)
    assert message in str(error.value)
    RooflineSpec.model_validate(spec | {"weights": "fp8"}).build(tmp_path)  # stated instead
