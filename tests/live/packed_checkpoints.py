"""Checkpoints in AWQ's and GPTQ's formats, packed code by code as their writers do, and the dense model they stand for.

Written from the formats' descriptions, apart from the reader that is tested with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 199,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """The format of a checkpoint's words in config.json, and the order of its inputs.

    Attributes:
        layout: gemm, gptq or gptq_v2. orders: "plain"; "alike": q, k and v share an order of inputs, and so do gate and
            up; "unlike": each has its own.
    """

    layout: str
    bits: int
    group: int
    symmetric: bool
    orders: str = "plain"
    family: str = "Llama"

    def config(self) -> dict[str, Any]:
        common = {"bits": self.bits, "group_size": self.group}
        if self.layout == "gemm":
            return common | {"quant_method": "awq", "zero_point": not self.symmetric, "version": "GEMM"}
        order = {"desc_act": self.orders != "plain", "sym": self.symmetric}
        return common | order | {"quant_method": "gptq", "checkpoint_format": self.layout}


def model_of(family: str) -> Any:
    """transformers' own, in float32, with random weights."""
    import transformers

    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES)).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1 + (1 if parameter.dim() == 1 else 0)
    return model


def write(layout: Format, directory: Path, dense: tuple[str, ...] = ("lm_head",)) -> Any:
    """The checkpoint; returns the model with Ŵ in place of what is packed."""
    model = model_of(layout.family)
    generator = torch.Generator().manual_seed(layout.bits * 1000 + layout.group)
    parameters: Tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or any(part in name for part in dense):
            continue
        tensors, weight = _packed(layout, name, *module.weight.shape, generator)
        module.weight.data = weight
        del parameters[f"{name}.weight"]
        parameters |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in tensors.items()}
    save_file(parameters, directory / "model.safetensors")
    document = model.config.to_dict() | {"quantization_config": layout.config() | {"modules_to_not_convert": [*dense]}}
    (directory / "config.json").write_text(json.dumps(document))
    return model


def change(directory: Path, edit: Callable[[Tensors], object]) -> None:
    """Write the tensors anew after an edit."""
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")


def _packed(
    layout: Format, name: str, outputs: int, inputs: int, generator: torch.Generator
) -> tuple[Tensors, torch.Tensor]:
    """A module's tensors, and its Ŵ."""
    group, levels = inputs if layout.group == -1 else layout.group, 2**layout.bits
    groups = -(-inputs // group)
    codes = torch.randint(levels, (inputs, outputs), generator=generator)
    scales = (0.02 + 0.02 * torch.rand(groups, outputs, generator=generator)).half()
    # As asymmetric quantisers have it: a zero point may be any code, but 0 cannot be written less 1.
    zeros = torch.randint(1, levels, (groups, outputs), generator=generator)
    if layout.symmetric:
        zeros = torch.full_like(zeros, levels // 2)
    index = torch.arange(inputs) // group
    if layout.orders != "plain":
        seed = {"alike": inputs, "unlike": sum(map(ord, name))}[layout.orders]
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    weight = torch.empty(outputs, inputs)
    for i in range(inputs):
        weight[:, i] = scales[index[i]].float() * (codes[i] - zeros[index[i]])
    if layout.layout == "gemm":
        return {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales}, weight
    stored = zeros - 1 if layout.layout == "gptq" else zeros
    return {
        "qweight": gptq_words(codes.T, layout.bits).T,
        "qzeros": gptq_words(stored, layout.bits),
        "scales": scales,
        "g_idx": index.int(),
    }, weight


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """(rows, columns) to (rows, columns / 8)."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, word] |= codes[:, 8 * word + column] << (4 * place)
    return _int32(words)


def gptq_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, columns) to (rows, columns · bits / 32)."""
    words = torch.zeros(codes.shape[0], codes.shape[1] * bits // 32, dtype=torch.int64)
    for column, word, shift, cut in _places(codes.shape[1], bits):
        words[:, word] |= ((codes[:, column] >> cut) << shift) & 0xFFFFFFFF
    return _int32(words)


def _places(columns: int, bits: int) -> Iterator[tuple[int, int, int, int]]:
    """(column, word, shift to the left, lowest bits that an earlier word holds)."""
    if bits == 4:
        yield from ((column, column // 8, 4 * (column % 8), 0) for column in range(columns))
        return
    for first in range(0, columns, 32):
        word = first // 32 * 3
        yield from ((first + i, word, 3 * i, 0) for i in range(11))  # of the last, two bits
        yield first + 10, word + 1, 0, 2
        yield from ((first + 11 + i, word + 1, 3 * i + 1, 0) for i in range(11))  # of the last, one bit
        yield first + 21, word + 2, 0, 1
        yield from ((first + 22 + i, word + 2, 3 * i + 2, 0) for i in range(10))


def _int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 2**31, words - 2**32, words).int()
