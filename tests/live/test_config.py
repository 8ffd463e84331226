"""config.json: what changes the answer is honoured, as transformers honours it, or refused in one line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latency_models.deployment.hugging_face import model_from_config
from latency_models.deployment.model_config import FAMILY_DEFAULTS
from live.models.config import Family, read_config
from live.models.decoder import Decoder
from live.models.weights import load_weights, model_bytes
from tests.docs.pages import config_fields
from tests.live.conftest import COMMON, LLAMA3
from tests.live.test_engine import assert_logits_agree
from workloads.errors import BadInput

transformers = pytest.importorskip("transformers", reason="answers are compared with those of transformers")

FAMILIES: dict[Family, str] = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_FIELDS = {name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")}
GONE = object()
"""In place of a value: the file leaves the field out."""


def test_every_field_of_transformers_is_in_one_list_of_the_page() -> None:
    tables = config_fields()
    for name in FAMILIES.values():
        fields = {field.name for field in dataclasses.fields(getattr(transformers, f"{name}Config"))}
        assert fields - frozenset().union(*tables) == set()
    assert sum(map(len, tables)) == len(frozenset().union(*tables))


@pytest.mark.parametrize("family", FAMILY_DEFAULTS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    settings = transformers.AutoConfig.for_model(family)
    ours = FAMILY_DEFAULTS[family]
    assert {name: getattr(settings, name) for name in ours} == dict(ours)
    assert settings.hidden_act == "silu"
    assert settings.rope_parameters["rope_theta"] == 10000.0
    assert settings.rms_norm_eps == 1e-6
    assert settings.tie_word_embeddings is False


def write(directory: Path, family: Family, fields: dict[str, Any], changes: dict[str, Any]) -> None:
    """A random model made with some settings, whose config.json is changed afterwards."""
    name = FAMILIES[family]
    torch.manual_seed(5)
    settings = {**COMMON, "num_hidden_layers": 2, **(EXPERTS if family == "qwen3_moe" else {}), **fields}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
    model.save_pretrained(directory)
    file = directory / "config.json"
    document = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in document.items() if value is not GONE}))


HONOURED: dict[str, tuple[Family, dict[str, Any], dict[str, Any]]] = {
    "another name of silu": ("llama", {}, {"hidden_act": "swish"}),
    "epsilon": ("llama", {}, {"rms_norm_eps": 0.3}),
    "no epsilon": ("llama", {}, {"rms_norm_eps": GONE}),
    "theta in its section": ("llama", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 37}}),
    "theta outside": ("llama", {}, {"rope_parameters": GONE, "rope_theta": 37.5}),
    "theta in both": ("llama", {}, {"rope_parameters": {"rope_theta": 37.5}, "rope_theta": 3e4}),
    "no theta": ("llama", {}, {"rope_parameters": GONE}),
    "llama3 as older files have it": (
        "llama", {}, {"rope_parameters": GONE, "rope_scaling": {"type": "llama3", **LLAMA3_FIELDS}, "rope_theta": 5e5},
    ),
    "llama3, its length outside": (
        "llama", {}, {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 200},
                      "original_max_position_embeddings": 32},
    ),
    "llama3 without a length": (
        "llama", {}, {"rope_parameters": {n: v for n, v in LLAMA3.items() if not n.startswith("original")}},
    ),
    "two sections": ("llama", {}, {"rope_parameters": {"rope_theta": 99.0}, "rope_scaling": LLAMA3}),
    "an empty section": ("llama", {}, {"rope_parameters": LLAMA3, "rope_scaling": {}}),
    "rotated in whole": ("qwen3", {}, {"partial_rotary_factor": 1.0}),
    "as many kv heads": ("llama", {"num_key_value_heads": 6}, {"num_key_value_heads": None}),
    "no head_dim": ("llama", {"head_dim": 8}, {"head_dim": GONE}),
    "null head_dim": ("llama", {"head_dim": 8}, {"head_dim": None}),
    "no head_dim in qwen3": ("qwen3", {"head_dim": 128}, {"head_dim": GONE}),
    "no head_dim in a mixture": ("qwen3_moe", {"head_dim": 8}, {"head_dim": GONE}),
    "no kv heads in a mixture": (
        "qwen3_moe", {"num_key_value_heads": 4, "num_attention_heads": 8}, {"num_key_value_heads": GONE},
    ),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "weights of experts as they are": ("qwen3_moe", {}, {"norm_topk_prob": False}),
    "weights of experts that sum to 1": ("qwen3_moe", {}, {"norm_topk_prob": True}),
    "no word of the weights of experts": ("qwen3_moe", {}, {"norm_topk_prob": GONE}),
    "the older name of experts": ("qwen3_moe", {}, {"num_experts": 4, "num_local_experts": GONE}),
    "a window that is off": (
        "qwen3", {}, {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
    ),
    "a window that nobody switched on": ("qwen3", {}, {"use_sliding_window": GONE, "sliding_window": 4}),
    "full attention, said": ("qwen3", {}, {"layer_types": ["full_attention"] * 2}),
    "what changes nothing": (
        "llama", {}, {"pretraining_tp": 2, "attention_dropout": 0.5, "use_cache": False, "pad_token_id": 3,
                      "initializer_range": 0.5, "dtype": "float16", "a_field_of_our_own": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONOURED)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, document, changes = HONOURED[name]
    write(tmp_path, family, document, changes)
    peer = getattr(transformers, f"{FAMILIES[family]}ForCausalLM").from_pretrained(tmp_path, dtype=torch.float32)
    config = read_config(tmp_path)
    assert_logits_agree(Decoder(config, load_weights(tmp_path, config, torch.float32, "cpu")), peer.eval())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected \"silu\": other activations are not served"),
    ({"attention_bias": True}, "attention_bias: got True, expected false: linear layers with a bias are not served"),
    ({"mlp_bias": True}, "mlp_bias: got True, expected false"),
    ({"rope_parameters": 5}, "rope_parameters: got 5, expected an object of fields"),
    *(
        ({"rope_parameters": {"rope_type": kind, "factor": 2.0}}, f"rope_parameters.rope_type: got '{kind}', expected")
        for kind in ("linear", "dynamic", "yarn", "longrope", "proportional", "su")
    ),
    ({"rope_parameters": {"factor": 2.0}}, "rope_parameters.factor: got 2.0, expected none"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: got {}, expected none"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: got 0.5, expected 1"),
    ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta: got 'big', expected a number"),
    ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_parameters.high_freq_factor: got 1.0, expected a"),
    ({"rope_parameters": {**LLAMA3, "factor": None}}, "rope_parameters.factor: expected a number above 0"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor: got 0.25, expected 1.0"),
    ({"rope_theta": float("inf")}, "rope_theta: got inf, expected a number above 0, of at most 3.4e+38"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: got nan, expected a number above 0"),
    ({"use_sliding_window": True}, "use_sliding_window: got True, expected false: attention windows"),
    ({"sliding_window": 4096}, "sliding_window: got 4096, expected null: attention windows are not served"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: got 'sliding_attention', expected full"),
    ({"layer_types": ["full_attention"]}, "layer_types: got ['full_attention'], expected a list of 2"),
    ({"head_dim": 15}, "head_dim: got 15, expected an even number"),
    ({"num_key_value_heads": 4}, "num_key_value_heads: got 4, expected a divisor of 6 heads"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings: got 1, expected true or false"),
    ({"is_causal": False}, "is_causal: got False, expected true"),
    ({"logit_scale": 0.5}, "logit_scale: got 0.5, expected 1.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: got 30.0, expected null"),
    ({"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config: got {'0': {'hidden_act': 'gelu'}}"),
    ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "auto_map.AutoModelForCausalLM: got 'mine.Model', expected"),
    ({"architectures": ["LlamaForTokenClassification"]}, "architectures: got ['LlamaForTokenClassification']"),
    ({"architectures": "LlamaForCausalLM"}, "architectures: got 'LlamaForCausalLM', expected names"),
    ({"problem_type": "multi_label_classification"}, "problem_type: got 'multi_label_classification'"),
    ({"eos_token_id": [2, 10**30]}, "eos_token_id: got [2, 1000"),
    ({"quantization_config": {}}, "quantization_config.quant_method: expected awq or gptq"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method: got 'bitsandbytes', expected awq or"),
    ({"quantization_config": {"quant_method": "awq", "group_size": True}}, "group_size: got True, expected -1"),
    ({"quantization_config": {"quant_method": "gptq", "dynamic": {"-:x": {}}}}, "quantization_config.dynamic: got"),
]  # fmt: skip


def refused(file: Path, reader: Callable[[Path], object]) -> str:
    """The line with which a file is refused."""
    with pytest.raises(BadInput) as error:
        reader(file)
    line = str(error.value)
    assert line.startswith(f"{file}: ")
    assert "\n" not in line
    assert len(line) < 400
    return line


@pytest.fixture
def document() -> dict[str, Any]:
    """A Llama's config.json, whose numbers are COMMON's, but for two layers."""
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **COMMON, "num_hidden_layers": 2}


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_served_is_refused(
    changes: dict[str, Any], message: str, document: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    read_config(tmp_path)
    file.write_text(json.dumps(document | changes))
    assert message in refused(file, lambda file: read_config(file.parent))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers: got [0], expected []"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: got 2, expected 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: got 5, expected at most 4"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: got 'yes', expected true or false"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window: got True, expected false"),
        ({"shared_expert_intermediate_size": 24}, "shared_expert_intermediate_size: got 24, expected 0"),
    ],
)
def test_mixtures_that_are_not_served_are_refused(
    changes: dict[str, Any], message: str, document: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document | EXPERTS | {"model_type": "qwen3_moe", "architectures": None} | changes))
    assert message in refused(file, read_config)


def test_the_two_readers_refuse_the_same(document: dict[str, Any], tmp_path: Path) -> None:
    """One reads a model's shapes alone, for `twin calibrate run`, the other a model to be served."""
    file = tmp_path / "config.json"
    for name, value in {"hidden_act": "relu", "sliding_window": 9, "head_dim": -1, "is_causal": False}.items():
        file.write_text(json.dumps(document | {name: value}))
        assert refused(file, model_from_config) == refused(file, read_config)


def test_a_head_beside_a_tied_embedding_must_be_the_same(tmp_path: Path) -> None:
    write(tmp_path, "llama", {}, {"tie_word_embeddings": True})
    config = read_config(tmp_path)
    with pytest.raises(BadInput, match=r"lm_head\.weight: expected the embedding or nothing"):
        load_weights(tmp_path, config, torch.float32, "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_model_are_those_of_its_weights(family: Family, tmp_path: Path) -> None:
    write(tmp_path, family, {"tie_word_embeddings": family == "qwen3"}, {})
    config = read_config(tmp_path)
    with torch.device("meta"):
        settings = transformers.AutoConfig.from_pretrained(tmp_path)
        peer = transformers.AutoModelForCausalLM.from_config(settings)
    matrices = sum(parameter.numel() for parameter in peer.parameters() if parameter.dim() > 1)
    assert model_bytes(config, torch.bfloat16) == 2 * matrices + 4 * 256 * 16
