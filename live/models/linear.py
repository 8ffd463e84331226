"""Linear layers: dense, with weights of 3 or 4 bits, and with error compensators (SPEAR) beside those.

Compensators are a file of their own in a model directory. `compensators.safetensors` has the parts of each under the
layer and the type of its module: `0.qkv.down`, `0.qkv.up` and so on, as `kernels.error_compensator.from_int8` takes
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from kernels.error_compensator import PARTS, Compensator, compensated_gemm, from_int8
from kernels.shapes import Shape
from kernels.w4_gemm import PackedWeight, quantise, w4_gemm
from kernels.w4_gemm.pack import GROUP, STEPS
from workloads.errors import BadInput

COMPENSATORS = "compensators.safetensors"


@dataclass(frozen=True)
class Reordered:
    """A packed weight whose inputs are sorted by group: column i multiplies input order[i], (inputs,) int64."""

    weight: PackedWeight
    order: torch.Tensor


@dataclass(frozen=True)
class Stacked:
    """Weights of the same inputs, concatenated along their outputs, that one product cannot compute."""

    parts: tuple[Matrix, ...]


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


class Group(Protocol):
    """The ranks that share a model. All call its methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, the same bits on each rank."""

    def gather(self, outputs: torch.Tensor, latents: torch.Tensor) -> None:
        """Fill in the other ranks' rows of two buffers, (ranks, …) each, which have this rank's."""


class LinearLayer(Protocol):
    """A linear layer that computes its own product, as one with an error compensator does."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (..., inputs) to (..., outputs)."""


Matrix: TypeAlias = torch.Tensor | PackedWeight | Reordered | Stacked | LinearLayer
"""A weight of (outputs, inputs)."""


def linear(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """y = x · Ŵᵀ, (..., inputs) to (..., outputs)."""
    if isinstance(weight, torch.Tensor):
        return functional.linear(x, weight)
    if isinstance(weight, PackedWeight):
        return w4_gemm(x, weight)
    if isinstance(weight, Reordered):
        return w4_gemm(x[..., weight.order], weight.weight)
    if isinstance(weight, Stacked):
        return torch.cat([linear(x, part) for part in weight.parts], dim=-1)
    return weight.product(x)


@dataclass(frozen=True)
class Rounding:
    """Rounding of linear layers that are dense in the checkpoint; `BadInput` for what kernels do not support.

    `bits`: 3 or 4. `group`: inputs that share a scale: 128, or -1 for a whole row. `symmetric`: no zero points.
    """

    bits: int = 4
    group: int = GROUP
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in STEPS:
            raise BadInput("expected 3 or 4", field="quantise.bits", value=self.bits)
        if self.group not in (-1, GROUP):
            raise BadInput(f"expected {GROUP}, or -1 for whole rows", field="quantise.group", value=self.group)

    def __call__(self, weight: torch.Tensor) -> PackedWeight:
        """Round a weight of (outputs, inputs) and any floating type."""
        return quantise(weight, self.bits, max(self.group, 0), self.symmetric)


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
        parts = _parts(tensors, module, sizes[module], file)
        compensators[module] = from_int8({name: part.to(device) for name, part in parts.items()})
    return compensators


def compensated(weight: Matrix, compensator: Compensator | None, field: str, directory: Path) -> Matrix:
    """The weight with its compensator, if any; `BadInput` for one that is not packed in 3 or 4 bits as a whole."""
    if compensator is None:
        return weight
    if not isinstance(weight, PackedWeight):
        expected = "expected it packed in 3 or 4 bits, since it has an error compensator"
        raise BadInput(expected, field=field, file=directory)
    return Compensated(weight, compensator)


def _parts(tensors: dict[str, torch.Tensor], module: str, size: tuple[int, int], file: Path) -> dict[str, torch.Tensor]:
    """The parts of a module's compensator, checked."""
    parts = {}
    for name, (dtype, _) in PARTS.items():
        part = tensors.get(f"{module}.{name}")
        if part is None:
            raise BadInput("expected this tensor, which is missing", field=f"{module}.{name}", file=file)
        if part.dtype != dtype:
            raise BadInput(f"expected {dtype}", field=f"{module}.{name}", value=part.dtype, file=file)
        parts[name] = part
    sizes = {"outputs": size[0], "inputs": size[1], "rank": parts["down"].shape[0], "hidden": parts["first"].shape[0]}
    for name, (_, axes) in PARTS.items():
        shape, actual = [sizes[axis] for axis in axes], [*parts[name].shape]
        if actual != shape:
            raise BadInput(f"expected shape {shape}", field=f"{module}.{name}", value=actual, file=file)
    return parts
