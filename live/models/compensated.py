"""Error compensators of a model directory (SPEAR): a file of their own beside the packed weights.

`compensators.safetensors` has the parts of each compensator under the layer and the type of its module:
`0.qkv.down`, `0.qkv.up` and so on, as `kernels.error_compensator.from_int8` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kernels.error_compensator import Compensator, compensated_gemm, from_int8
from kernels.shapes import Shape
from kernels.w4_gemm import PackedWeight
from live.models.linear import Matrix
from workloads.errors import BadInput

COMPENSATORS = "compensators.safetensors"

PARTS = ("down", "down_scales", "up", "up_scales", "first", "first_bias", "second", "second_bias")
TYPES = (torch.int8, torch.float32, torch.int8, torch.float32, *([torch.float16] * 4))


@dataclass(frozen=True)
class Compensated:
    """A packed weight with an error compensator."""

    weight: PackedWeight
    compensator: Compensator

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read."""
        return self.weight.nbytes + self.compensator.nbytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (..., inputs) to (..., outputs)."""
        return compensated_gemm(x, self.weight, self.compensator)


def read_compensators(directory: Path, shape: Shape, device: str) -> dict[str, Compensator]:
    """The compensators by layer and type, such as 0.qkv; `BadInput` for parts that do not fit the model."""
    file = directory / COMPENSATORS
    if not file.exists():
        return {}
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"expected error compensators ({error})", file=file) from None
    modules = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
    sizes = {f"{i}.{kind}": size for i in range(shape.layers) for kind, size in shape.linear().items()}
    compensators = {}
    for module in modules:
        if module not in sizes:
            raise BadInput("expected modules of the model", field=module, file=file)
        parts = (part.to(device) for part in _parts(tensors, module, sizes[module], file))
        down, down_scales, up, up_scales, first, first_bias, second, second_bias = parts
        compensators[module] = from_int8(down, down_scales, up, up_scales, first, first_bias, second, second_bias)
    return compensators


def compensated(weight: Matrix, compensator: Compensator | None, field: str, directory: Path) -> Matrix:
    """The weight with its compensator, if any; `BadInput` for one that is not packed in 3 or 4 bits as a whole."""
    if compensator is None:
        return weight
    if not isinstance(weight, PackedWeight):
        expected = "expected it packed in 3 or 4 bits, since it has an error compensator"
        raise BadInput(expected, field=field, file=directory)
    return Compensated(weight, compensator)


def _parts(tensors: dict[str, torch.Tensor], module: str, size: tuple[int, int], file: Path) -> list[torch.Tensor]:
    """The parts of a module's compensator in the order of `PARTS`, checked."""
    parts = []
    for name, dtype in zip(PARTS, TYPES, strict=True):
        part = tensors.get(f"{module}.{name}")
        if part is None:
            raise BadInput("expected this tensor, which is missing", field=f"{module}.{name}", file=file)
        if part.dtype != dtype:
            raise BadInput(f"expected {dtype}", field=f"{module}.{name}", value=part.dtype, file=file)
        parts.append(part)
    (outputs, inputs), rank, hidden = size, parts[0].shape[0], parts[4].shape[0]
    shapes = (
        (rank, inputs), (rank,), (outputs, rank), (outputs,), (hidden, rank), (hidden,), (rank, hidden), (rank,),
    )  # fmt: skip
    for name, part, shape in zip(PARTS, parts, shapes, strict=True):
        if tuple(part.shape) != shape:
            raise BadInput(f"expected shape {list(shape)}", field=f"{module}.{name}", value=[*part.shape], file=file)
    return parts
