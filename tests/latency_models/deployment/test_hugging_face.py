"""A model's config.json as a model file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latency_models.deployment.hugging_face import model_from_config
from latency_models.deployment.models import DenseFFN, GroupedQueryAttention
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
    ("change", "told"),
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
def test_what_cannot_be_used_is_told(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = {key: value for key, value in (json.loads(TINY.read_text()) | change).items() if value is not None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match=told):
        model_from_config(path)


def test_broken_json_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama",\n oops}')
    with pytest.raises(BadInput, match=r"config\.json:2: expected JSON"):
        model_from_config(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "nested at most 64 deep"),
        ('{"hidden_size": 1' + "0" * 5000 + "}", "with numbers of at most 4300 "),
    ],
)
def test_json_that_python_cannot_hold_is_refused_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=rf"config\.json: expected JSON {expected}"):
        model_from_config(path)
