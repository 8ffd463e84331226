"""Quantised models as directories that the live engine loads: linear layers in GPTQ's format (version 2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from kernels.error_compensator import Compensator, to_int8
from kernels.w4_gemm.pack import STEPS
from live.adaptation.directories import config_document, stored_tensors, write_checkpoint
from live.adaptation.quantisers.grid import QuantisedMatrix
from live.adaptation.quantisers.models import QuantisedModel
from live.models.config import ModelConfig
from live.models.linear import COMPENSATORS
from live.models.lora import JOINED
from live.models.packed import pack
from reports.run_directory import replacing
from workloads.errors import BadInput


def write_quantised(directory: Path, config: ModelConfig, model: QuantisedModel) -> None:
    precision = model.precision
    if precision.bits not in STEPS:
        raise BadInput("expected 3 or 4: no engine serves others", field="bits", value=precision.bits)
    tensors = stored_tensors(config, model.reference)
    for name, matrix in model.modules.items():
        _, layer, kind = name.split(".")
        parts = [f"model.layers.{layer}.{part}" for part in JOINED[kind]]
        sizes = [tensors.pop(f"{module}.weight").shape[0] for module in parts]
        for module, rows in zip(parts, torch.arange(len(matrix.codes)).split(sizes), strict=True):
            tensors |= {f"{module}.{part}": tensor for part, tensor in _packed(matrix, rows).items()}
    document = config_document(config)
    document["quantization_config"] = {
        "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": precision.bits, "group_size": precision.group,
        "sym": False, "desc_act": False,
    }  # fmt: skip
    write_checkpoint(directory, document, tensors)


def write_compensators(directory: Path, compensators: Mapping[str, Compensator], rank: int) -> None:
    """Write the compensators of some modules, all of one rank, beside a quantised model."""
    tensors = {
        f"{name.removeprefix('layers.')}.{part}": tensor.contiguous()
        for name, compensator in compensators.items()
        for part, tensor in to_int8(compensator, rank).items()
    }
    with replacing(directory / COMPENSATORS) as draft:
        save_file(tensors, draft)


def _packed(matrix: QuantisedMatrix, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, bits = matrix.codes[rows], matrix.precision.bits
    if len(rows) * bits % 32 or codes.shape[1] * bits % 32:
        raise BadInput("expected sizes that fill whole words", field="size", value=[*codes.shape])
    return {
        "qweight": pack(codes, bits).T.contiguous(),
        "qzeros": pack(matrix.zeros[rows].T, bits).contiguous(),
        "scales": matrix.scales[rows].T.contiguous(),
    }
