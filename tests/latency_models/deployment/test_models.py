"""Model files hold the published shapes: the parameters they imply are the published ones, to the last weight."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from latency_models.deployment.models import Formats, load_model
from latency_models.io.files import FOLDER, Kind, builtin_names, find_data, is_path
from workloads.errors import BadInput

# Weights of each public checkpoint, without an MTP module; and the non-embedding figure of its card, if there is one.
PUBLISHED = {
    "deepseek-v3": (671_026_419_200, None),
    "llama-2-7b": (6_738_415_616, None),
    "llama-2-13b": (13_015_864_320, None),
    "llama-2-70b": (68_976_648_192, None),
    "llama-3-8b": (8_030_261_248, None),
    "llama-3-70b": (70_553_706_496, None),
    "llama-3.1-405b": (405_853_388_800, None),
    "llama-3.2-1b": (1_235_814_400, None),
    "llama-3.2-3b": (3_212_749_824, None),
    "llama-3.3-70b": (70_553_706_496, None),
    "mixtral-8x7b": (46_702_792_704, None),
    "mixtral-8x22b": (140_620_634_112, None),
    "qwen3-1.7b": (1_720_574_976, 1.4e9),
    "qwen3-8b": (8_190_735_360, 6.95e9),
    "qwen3-14b": (14_768_307_200, 13.2e9),
    "qwen3-coder-480b-a35b": (480_154_875_392, None),
    "llama-3.1-8b": (8_030_261_248, None),
    "llama-3.1-70b": (70_553_706_496, None),
    "qwen3-0.6b": (596_049_920, 0.44e9),
    "qwen3-4b": (4_022_468_096, 3.6e9),
    "qwen3-32b": (32_762_123_264, 31.2e9),
    "qwen3-235b-a22b": (235_093_634_560, None),
    "qwen3-30b-a3b": (30_532_122_624, 29.9e9),
    "deepseek-v3.2": (671_877_944_064, None),  # DeepSeek-V3 and 61 indexers
    "kimi-linear-48b-a3b": (49_122_681_728, 48e9),
}


# Weights that the model card states, of models with some small ones that model files do not describe.
ROUNDED = {
    "gpt-oss-20b": 20.91e9, "gpt-oss-120b": 116.83e9, "minimax-m2.5": 230e9, "kimi-k2": 1.04e12,
    "qwen3.5-397b-a17b": 397e9, "glm-5": 744e9, "nemotron-3-nano-30b-a3b": 31.6e9,
    "glm-4.5": 355e9, "glm-4.5-air": 106e9, "glm-5.2": 744e9, "nemotron-3-super-120b-a12b": 120e9,
    "nemotron-3-ultra-550b-a55b": 550e9, "nemotron-h-56b": 56e9, "qwen2.5-7b": 7.61e9, "qwen2.5-32b": 32.5e9,
    "qwen2.5-72b": 72.7e9, "qwen3.5-27b": 27e9, "qwen3.5-35b-a3b": 35e9, "qwen3.5-122b-a10b": 122e9,
}  # fmt: skip

FURTHER = {"kimi-k2": 0.014}
"""Models whose card states more weights than its shapes have, by how much."""


def test_every_builtin_model_is_held_to_a_published_figure() -> None:
    assert builtin_names("models") == sorted(PUBLISHED | ROUNDED)


@pytest.mark.parametrize("name", ROUNDED)
def test_parameters_are_those_of_the_card(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.published_parameters == ROUNDED[name]
    assert model.parameters == pytest.approx(ROUNDED[name] * (1 - FURTHER.get(name, 0.0)), rel=0.01)


def test_an_indexer_adds_its_queries_keys_and_weights_of_heads() -> None:
    added = 61 * (64 * 128 * 1536 + 7168 * (128 + 64) + 2 * 128)
    assert load_model("deepseek-v3.2").parameters - load_model("deepseek-v3").parameters == added


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model, (total, without_embeddings) = load_model(name), PUBLISHED[name]
    assert model.name == name
    assert model.parameters == total
    assert model.published_parameters in (None, pytest.approx(model.parameters, rel=0.01))
    if without_embeddings is not None:
        assert model.parameters - model.embedding_parameters == pytest.approx(without_embeddings, rel=0.01)


MTP = {"deepseek-v3": 15.31e9}
"""Bytes of MTP modules in safetensors, which model files leave out: a layer, a projection, embeddings and head."""


def test_weights_take_the_bytes_of_their_safetensors() -> None:
    """Biases of gpt-oss, and scales in blocks, are what is left."""
    expected = {name: load_model(name) for name in builtin_names("models")}
    stated = {name: model.checkpoints[0].bytes for name, model in expected.items() if model.checkpoints[0].bytes}
    assert {"gpt-oss-20b", "gpt-oss-120b", "deepseek-v3", "llama-3.3-70b"} <= stated.keys()
    for name, size in stated.items():
        computed = expected[name].weight_bytes(expected[name].formats()) + MTP.get(name, 0.0)
        assert computed == pytest.approx(size, rel=2e-3), name


@pytest.mark.parametrize(
    ("name", "model", "formats"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.3-70b", Formats("bf16", "bf16")),
        ("Llama-3.3-70B-Instruct", "llama-3.3-70b", Formats("bf16", "bf16")),
        ("llama-3.3-70b-fp8", "llama-3.3-70b", Formats("fp8", "fp8")),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", Formats("fp8", "fp8")),
        ("qwen3-32b-nvfp4", "qwen3-32b", Formats("fp4", "fp4")),
        ("gpt-oss-120b", "gpt-oss-120b", Formats("bf16", "mxfp4")),
        ("openai/gpt-oss-20b", "gpt-oss-20b", Formats("bf16", "mxfp4")),
        ("gpt-oss-20b-bf16", "gpt-oss-20b", Formats("bf16", "bf16")),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3", Formats("fp8", "fp8")),
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-v3", Formats("bf16", "fp4")),
    ],
)
def test_a_name_means_a_checkpoint_with_its_formats(name: str, model: str, formats: Formats) -> None:
    loaded = load_model(name)
    assert (loaded.name, loaded.formats()) == (model, formats)
    checkpoint = loaded.checkpoint(formats)
    if "/" in name:
        assert checkpoint.repository == name


def test_formats_that_are_stated_take_the_place_of_those_published() -> None:
    sparse, dense = load_model("gpt-oss-120b"), load_model("llama-3.1-8b")
    assert sparse.formats("mxfp4") == Formats("bf16", "mxfp4")  # MXFP4 is of experts alone
    assert sparse.formats("fp8") == Formats("fp8", "fp8")
    assert sparse.formats("bf16", "mxfp4") == sparse.formats(None, "mxfp4") == Formats("bf16", "mxfp4")
    assert sparse.formats(None, "fp8") == Formats("bf16", "fp8")
    assert dense.formats("int8") == Formats("int8", "int8")


@pytest.mark.parametrize(
    ("kind", "name", "nearest"),
    [
        ("models", "lama-3.3-70b", "llama-3.3-70b"),
        ("models", "meta-llama/Llama-3.3-70B-Instuct", "llama-3.3-70b"),
        ("models", "llama-3.1-70b-instruct-awq", "llama-3.1-70b"),
        ("hardware", "h20", "h200-sxm"),  # another GPU, not the begin of a name
        ("hardware", "l40", "l40s"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(kind: Kind, name: str, nearest: str) -> None:
    with pytest.raises(BadInput, match=rf"got '{name}', expected a path or one of .* \(did you mean {nearest}\?\)$"):
        find_data(kind, name)


@pytest.mark.parametrize("name", ["h200", "H200", "h200_sxm", "h200-sxm"])
def test_a_device_goes_by_the_first_parts_of_its_name(name: str) -> None:
    assert find_data("hardware", name).stem == "h200-sxm"


def test_a_path_is_one_even_where_a_model_has_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "meta-llama"
    folder.mkdir()
    (folder / "mine.yaml").write_text((FOLDER / "models" / "qwen3-4b.yaml").read_text())
    assert load_model("meta-llama/mine.yaml", tmp_path).name == "qwen3-4b"
    assert is_path("meta-llama/mine.yaml")
    assert is_path("config.json")
    assert not is_path("meta-llama/Llama-3.3-70B-Instruct")


@pytest.mark.parametrize(
    ("name", "token", "sequence"),
    [  # of all layers, by hand: latent vectors, and an indexer's key of 128 bytes with its scale
        ("deepseek-v3", 61 * (512 + 64) * 2, 0),
        ("deepseek-v3.2", 61 * (512 + 64) * 2 + 61 * (128 + 4), 0),
        ("glm-5", 78 * (512 + 64) * 2 + 78 * (128 + 4), 0),
        ("kimi-k2", 61 * (512 + 64) * 2, 0),
        # A state of 128 by 128 in FP32 for each value head, and three inputs of the convolution in 16 bits.
        ("qwen3.5-397b-a17b", 15 * 2 * 2 * 256 * 2, 45 * (64 * 128 * 128 * 4 + 3 * (2 * 16 + 64) * 128 * 2)),
        ("kimi-linear-48b-a3b", 7 * (512 + 64) * 2, 20 * (32 * 128 * 128 * 4 + 3 * 3 * 32 * 128 * 2)),
        ("nemotron-3-nano-30b-a3b", 6 * 2 * 2 * 128 * 2, 23 * (64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2)),
    ],
)
def test_bytes_of_a_token_and_of_a_sequence_in_all_layers(name: str, token: int, sequence: int) -> None:
    model = load_model(name)
    assert (model.kv_bytes_per_token(2), model.state_bytes_per_sequence) == (token, sequence)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"layers": 44}, "linear_attention.layers: got 45"), ({"ffn_layers": 61}, "ffn_layers: got 61"),
     ({"linear_attention": {"key_heads": 3}}, "linear_attention.key_heads: got 3, expected a divisor")],
)  # fmt: skip
def test_layers_add_up(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    content = yaml.safe_load((FOLDER / "models" / "qwen3.5-397b-a17b.yaml").read_text())
    for name, value in change.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(BadInput, match=re.escape(field)):
        load_model(tmp_path / "model.yaml")


def edited(name: str, tmp_path: Path, **sections: dict[str, Any]) -> Path:
    content = yaml.safe_load((FOLDER / "models" / f"{name}.yaml").read_text())
    content["published_parameters"] = 1e9
    for section, fields in sections.items():
        content[section] |= fields
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("name", "sections", "message"),
    [
        ("llama-3.1-8b", {"attention": {"kv_heads": 7}}, "attention.kv_heads: got 7, expected a divisor of heads (32)"),
        ("llama-3.1-8b", {"attention": {"kind": "mha"}}, "attention.kind: got 'mha', expected one of 'gqa', 'mla'"),
        ("llama-3.1-8b", {"attention": {"head_size": 1}}, "attention.head_size: unknown field, did you mean heads?"),
        ("deepseek-v3", {"ffn": {"experts_per_token": 300}}, "ffn.experts_per_token: got 300, expected at most"),
        ("deepseek-v3", {"ffn": {"dense_layers": 62}}, "ffn.dense_layers: got 62, expected at most the layers"),
        ("deepseek-v3", {"ffn": {"dense_intermediate_size": 0}}, "ffn.dense_intermediate_size: got 0, expected a size"),
        ("deepseek-v3", {"ffn": {"experts": 0}}, "ffn.experts: got 0, expected a number above 0"),
    ],
)
def test_shapes_that_cannot_be(tmp_path: Path, name: str, sections: dict[str, Any], message: str) -> None:
    path = edited(name, tmp_path, **sections)
    with pytest.raises(BadInput) as error:
        load_model(path)
    assert str(error.value).startswith(f"{path}: {message}")
