"""A model's config.json, as Hugging Face writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from kernels.rope_kv_write import Llama3Scaling
from kernels.shapes import Shape
from workloads.errors import BadInput

Family: TypeAlias = Literal["llama", "qwen3", "qwen3_moe"]

MOST_POSITIONS = 1 << 20


@dataclass(frozen=True)
class Quantisation:
    """How the linear weights of a checkpoint are packed.

    Attributes:
        method: "awq" or "gptq". group: weights along the inputs that share a scale; -1: a whole row.
        symmetric: no zero points but the middle. act_order: inputs were quantised in order of their activations, so
            that those of a group are spread over a row (GPTQ's desc_act).
        zero_offset: what is added to a zero point as it is stored: GPTQ's first format takes 1 away.
    """

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    zero_offset: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs to know.

    Attributes:
        shape: sizes that kernels are called with. positions: longest context that the model was made for.
        tied: the LM head is the embedding. normalised_routing: the weights of the chosen experts sum to 1.
        end_tokens: token ids that end an answer.
        labels: of a model that tells classes and gives no tokens (`…ForSequenceClassification`), their names.
    """

    family: Family
    shape: Shape
    positions: int
    tied: bool
    scaling: Llama3Scaling | None = None
    normalised_routing: bool = True
    end_tokens: tuple[int, ...] = ()
    quantisation: Quantisation | None = None
    labels: tuple[str, ...] = ()


def read_config(path: Path) -> ModelConfig:
    """The config.json in a directory, or a file of that kind.

    Raises:
        BadInput: no such file, no JSON, a family that is not served, or a field that is missing or unusable.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(file.read_text())
    except OSError as error:
        raise BadInput(f"expected a readable file ({error.strerror})", file=file) from None
    except ValueError as error:
        raise BadInput(f"expected JSON ({error})", file=file) from None
    if not isinstance(document, dict):
        raise BadInput("expected a JSON object", value=type(document).__name__, file=file)
    return _parse(_Fields(document, file))


class _Fields:
    """Fields of one JSON object, checked as they are asked for."""

    def __init__(self, document: Mapping[str, Any], file: Path, under: str = "") -> None:
        self.document, self.file, self.under = document, file, under

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.document.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.fault(name, value, "expected a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.document.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.fault(name, value, "expected a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.document.get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, value, "expected true or false")
        return value

    def section(self, name: str) -> _Fields | None:
        """An object within; None where there is none."""
        value = self.document.get(name)
        return _Fields(value, self.file, f"{name}.") if isinstance(value, dict) else None

    def fault(self, name: str, value: object, expected: str) -> BadInput:
        """The error to raise about a field."""
        return BadInput(expected, field=self.under + name, value=value, file=self.file)


def _parse(fields: _Fields) -> ModelConfig:
    family: Any = fields.document.get("model_type")
    if family not in get_args(Family):
        raise fields.fault("model_type", family, f"expected one of {', '.join(get_args(Family))}")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.fault(name, True, "expected false: linear layers with a bias are not served")
    if fields.document.get("use_sliding_window"):
        raise fields.fault("use_sliding_window", True, "expected false: attention windows are not served")
    rope = fields.section("rope_parameters") or fields.section("rope_scaling") or _Fields({}, fields.file)
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    name = "num_experts" if "num_experts" in fields.document else "num_local_experts"  # older files have the first
    experts = fields.count(name) if family == "qwen3_moe" else 0
    if experts:
        _only_experts(fields)
    shape = Shape(
        layers=fields.count("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", max(hidden // heads, 1)),
        vocabulary=fields.count("vocab_size"),
        experts=experts,
        experts_per_token=fields.count("num_experts_per_tok") if experts else 0,
        expert_intermediate=fields.count("moe_intermediate_size") if experts else 0,
        qk_norm=family != "llama",
        epsilon=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
    )
    if shape.heads % shape.kv_heads:
        raise fields.fault("num_key_value_heads", shape.kv_heads, f"expected a divisor of {shape.heads} heads")
    return ModelConfig(
        family=family,
        shape=shape,
        positions=min(fields.count("max_position_embeddings", 2048), MOST_POSITIONS),
        tied=fields.flag("tie_word_embeddings", False),
        scaling=_scaling(rope),
        normalised_routing=fields.flag("norm_topk_prob", False) if experts else True,
        end_tokens=_end_tokens(fields),
        quantisation=_quantisation(fields.section("quantization_config")),
        labels=_labels(fields),
    )


def _only_experts(fields: _Fields) -> None:
    """Qwen3-MoE allows dense layers among the others; no published model has any."""
    if fields.document.get("mlp_only_layers"):
        raise fields.fault("mlp_only_layers", fields.document["mlp_only_layers"], "expected none")
    if fields.count("decoder_sparse_step", 1) != 1:
        raise fields.fault("decoder_sparse_step", fields.document["decoder_sparse_step"], "expected 1")


def _scaling(rope: _Fields) -> Llama3Scaling | None:
    kind = rope.document.get("rope_type", rope.document.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind != "llama3":
        raise rope.fault("rope_type", kind, "expected default or llama3")
    return Llama3Scaling(
        factor=rope.number("factor"),
        low=rope.number("low_freq_factor"),
        high=rope.number("high_freq_factor"),
        original=rope.count("original_max_position_embeddings"),
    )


def _end_tokens(fields: _Fields) -> tuple[int, ...]:
    value = fields.document.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise fields.fault("eos_token_id", value, "expected token ids")
    return tuple(tokens)


def _labels(fields: _Fields) -> tuple[str, ...]:
    """By number; two that have no names where the file says nothing, as transformers has it."""
    made = fields.document.get("architectures")
    if not (isinstance(made, list) and any(str(each).endswith("ForSequenceClassification") for each in made)):
        return ()
    names = fields.document.get("id2label", {str(i): f"LABEL_{i}" for i in range(fields.count("num_labels", 2))})
    if not isinstance(names, dict) or not names or set(names) != {str(i) for i in range(len(names))}:
        raise fields.fault("id2label", names, "expected a name for each label, from 0")
    return tuple(str(names[str(i)]) for i in range(len(names)))


def _quantisation(fields: _Fields | None) -> Quantisation | None:
    if fields is None:
        return None
    method = fields.document.get("quant_method")
    if method not in ("awq", "gptq"):
        raise fields.fault("quant_method", method, "expected awq or gptq")
    gptq = method == "gptq"
    bits = fields.count("bits", 4)
    if bits not in ((3, 4) if gptq else (4,)):
        raise fields.fault("bits", bits, "expected 3 or 4" if gptq else "expected 4")
    group = fields.document.get("group_size", 128)
    if not isinstance(group, int) or (group != -1 and group < 1):
        raise fields.fault("group_size", group, "expected -1 or a number of weights")
    return Quantisation(
        method=method,
        bits=bits,
        group=group,
        symmetric=fields.flag("sym", True) if gptq else not fields.flag("zero_point", True),
        act_order=fields.flag("desc_act", False) if gptq else False,
        zero_offset=1 if _layout(fields, gptq) == "gptq" else 0,
    )


def _layout(fields: _Fields, gptq: bool) -> str:
    """How the words are laid out; older files have the first name for it, newer ones the second."""
    names = ("checkpoint_format" if gptq else "version", "format")
    name = next((name for name in names if fields.document.get(name) is not None), names[0])
    found = fields.document.get(name, "gptq" if gptq else "gemm")
    known = ("gptq", "gptq_v2") if gptq else ("gemm",)
    if str(found).lower() not in known:
        raise fields.fault(name, found, f"expected {' or '.join(known)}")
    if fields.document.get("is_marlin_format"):
        raise fields.fault("is_marlin_format", True, "expected false")
    return str(found).lower()
