"""A model's config.json as a model file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latency_models.deployment.hugging_face import any_model, model_from_config
from latency_models.deployment.models import DenseFFN, GroupedQueryAttention, load_model
from workloads.errors import BadInput

TINY = Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny-llama.json"


def test_a_small_llama() -> None:
    model = model_from_config(TINY)
    assert (model.name, model.hidden_size, model.layers, model.vocabulary) == ("tiny-llama", 256, 4, 2048)
    assert model.attention == GroupedQueryAttention(kind="gqa", heads=8, kv_heads=4, head_dim=32)
    assert model.ffn == DenseFFN(kind="dense", intermediate_size=768)
    layer = 256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 768 + 2 * 256
    assert model.parameters == 4 * layer + 2 * 2048 * 256 + 256


def test_qwen3_normalises_heads_and_names_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads(TINY.read_text()) | {"model_type": "qwen3"}))
    model = model_from_config(folder / "config.json")
    assert model.name == "qwen3-small"
    assert isinstance(model.attention, GroupedQueryAttention)
    assert model.attention.qk_norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type: got 'mamba', expected one of llama"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size: got 'many', expected a whole number"),
        ({"head_dim": "wide"}, "head_dim: got 'wide', expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0, expected a whole number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no', expected true or false"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected \"silu\""),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: got 4096, expected null"),
    ],
)
def test_what_cannot_be_used_is_told(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {key: value for key, value in (json.loads(TINY.read_text()) | change).items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match=message):
        model_from_config(path)


def test_broken_json_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama",\n oops}')
    with pytest.raises(BadInput, match=r"config\.json:2: expected JSON"):
        model_from_config(path)


# The fields of public config.json files that shapes depend on.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "vocab_size": 32000, "tie_word_embeddings": False, "sliding_window": None,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "tie_word_embeddings": False, "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "sliding_window": 128, "tie_word_embeddings": False, "vocab_size": 201088, "attention_bias": True,
    },
    "minimax-m2.5": {
        "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072, "num_attention_heads": 48,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 1536, "vocab_size": 200064,
        "num_experts_per_tok": 8, "num_local_experts": 256, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "tie_word_embeddings": False, "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "kimi-k2": {  # with images: the decoder's fields are in a section
        "model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": {
            "model_type": "kimi_k2", "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
            "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_routed_experts": 384,
            "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "vocab_size": 163840,
        },
    },
    "glm-5": {
        "model_type": "glm_moe_dsa", "first_k_dense_replace": 3, "head_dim": 64, "hidden_size": 6144,
        "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "intermediate_size": 12288,
        "kv_lora_rank": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_nextn_predict_layers": 1,
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "tie_word_embeddings": False, "vocab_size": 154880,
    },
    "qwen3.5-397b-a17b": {
        "model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": {
            "model_type": "qwen3_5_moe_text", "attn_output_gate": True, "head_dim": 256, "hidden_size": 4096,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 15, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
            "linear_value_head_dim": 128, "mlp_only_layers": [], "moe_intermediate_size": 1024,
            "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 60,
            "num_key_value_heads": 2, "shared_expert_intermediate_size": 1024, "vocab_size": 248320,
        },
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "first_k_dense_replace": 1, "hidden_size": 2304, "intermediate_size": 9216,
        "kv_lora_rank": 512, "moe_intermediate_size": 1024, "num_attention_heads": 32, "num_experts": 256,
        "num_experts_per_token": 8, "num_hidden_layers": 27, "num_shared_experts": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
        "vocab_size": 163840, "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4,
        },
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "conv_kernel": 4, "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_head_dim": 64,
        "mamba_num_heads": 64, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
        "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "vocab_size": 131072,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixture_of_experts_is_its_built_in_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    apart = {"name", "source", "published_parameters", "checkpoints", "mtp_depth"}
    result, expected = any_model("config.json", tmp_path), load_model(name)
    assert result.model_dump(exclude=apart) == expected.model_dump(exclude=apart)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compress_ratios": [4, 128]},
            "compressed attention (CSA, HCA); the nearest is sparse attention with an inde",
        ),
        ({"sparse_attention_config": {"use": True}}, "block-sparse attention (MSA); the nearest is sparse attention"),
        ({"attention_chunk_size": 8192}, "attention in chunks; the nearest is attention windows (gpt_oss)"),
        ({"layer_types": ["chunked_attention"]}, "layer_types: got 'chunked_attention', expected full_attention"),
        ({"model_type": "deepseek_v9"}, "model_type: got 'deepseek_v9', expected one of llama"),
        ({"model_type": "deepseek_v9"}, "(the nearest is deepseek_v3)"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers: got [3], expected []: dense layers among mixtures"),
        ({"model_type": "kimi_linear"}, "linear_attn_config: expected the section that says which layers are linear"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern: expected a letter for each layer: M (Mamba-2)"),
    ],
)
def test_unknown_attention_is_refused_by_its_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-v3"] | change))
    with pytest.raises(BadInput) as caught:
        any_model("config.json", tmp_path)
    assert message in str(caught.value)


def test_layers_that_share_an_indexer_have_none(tmp_path: Path) -> None:
    """GLM-5.2's have one in every fourth layer behind the third; an MTP module is read, too."""
    kinds = {"indexer_types": ["full"] * 3 + ["shared"] * 75}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["glm-5"] | kinds))
    model = any_model("config.json", tmp_path)
    assert (model.indexer_layers, model.mtp_depth) == (3, 1)
    assert model.kv_bytes_per_token(2) == 78 * 576 * 2 + 3 * 132


def test_a_list_of_kinds_of_layers_is_a_pattern(tmp_path: Path) -> None:
    """Nemotron-3-Ultra's file has no pattern and no number of layers."""
    config = dict(CONFIGS["nemotron-3-nano-30b-a3b"])
    names = {"M": "mamba", "*": "attention", "E": "moe"}
    config["layers_block_type"] = [names[letter] for letter in config.pop("hybrid_override_pattern")]
    del config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, expected = any_model("config.json", tmp_path), load_model("nemotron-3-nano-30b-a3b")
    assert (model.attention_layers, model.linear_layers, model.layers_with_ffn) == (6, 23, 23)
    assert model.parameters == expected.parameters


def test_any_model_is_a_name_a_file_or_a_config(tmp_path: Path) -> None:
    assert any_model("llama-3.1-8b") == load_model("llama-3.1-8b")
    assert any_model(TINY) == model_from_config(TINY)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | {"mlp_only_layers": [0]}))
    with pytest.raises(BadInput, match=r"mlp_only_layers: got .*dense layers among mixtures of experts"):
        any_model(path)
    path.write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(BadInput, match=r"model_type: got 'mamba', expected one of llama, .*deepseek_v3"):
        any_model(path)
