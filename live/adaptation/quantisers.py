"""Quantisers of linear layers: rounding to nearest, GPTQ and AWQ, at 4, 3 and 2 bits.

A grid has codes with a scale and a zero point for each row, or for each group of a row's inputs. A model is quantised
module by module; embedding, head and norms stay as they are. Its directory, in GPTQ's format (version 2), is one that
the live engine loads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, pad

from kernels.error_compensator import Compensator, to_int8
from kernels.w4_gemm import PackedWeight, from_codes
from kernels.w4_gemm.pack import GROUP, STEPS
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.weights import (
    config_document,
    from_named,
    module_names,
    replaced,
    stored_tensors,
    to_named,
    write_checkpoint,
)
from live.models.config import ModelConfig
from live.models.linear import COMPENSATORS
from live.models.lora import JOINED
from live.models.packed import pack
from live.models.weights import Weights
from reports.run_directory import replacing
from workloads.errors import BadInput


@dataclass(frozen=True)
class Precision:
    """The bits of a grid (2, 3 or 4), and the inputs that share a scale: 128, or -1 for a whole row (per channel)."""

    bits: int
    group: int = -1

    def __post_init__(self) -> None:
        if self.bits not in (2, *STEPS):
            raise BadInput("expected 2, 3 or 4", field="bits", value=self.bits)
        if self.group not in (-1, GROUP):
            raise BadInput(f"expected {GROUP}, or -1 for whole rows", field="group", value=self.group)

    def span(self, inputs: int) -> int:
        """Inputs that share a scale in a row of `inputs`."""
        return inputs if self.group == -1 else min(self.group, inputs)


@dataclass(frozen=True)
class Grid:
    """Scales (float16 numbers) and zero points, (outputs, groups) float32: w ≈ scale · (code − zero)."""

    scale: torch.Tensor
    zero: torch.Tensor
    bits: int

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest codes of (outputs, groups) weights, in float32."""
        return (weight / self.scale + self.zero).round().clamp(0, 2**self.bits - 1)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes - self.zero) * self.scale


def fit_grid(weight: torch.Tensor, bits: int) -> Grid:
    """The grid of each row and group of a weight (outputs, groups, inputs of a group), from least to largest."""
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    largest = 2**bits - 1
    scale = ((high - low) / largest).clamp(min=torch.finfo(torch.float16).tiny).half().float()
    return Grid(scale, (-low / scale).round().clamp(0, largest), bits)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A weight on a grid: codes (outputs, inputs) uint8, scales float16 and zeros uint8 of (outputs, groups)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    precision: Precision

    def dense(self) -> torch.Tensor:
        """Ŵ, (outputs, inputs) float32: to the last bit what the kernels unpack."""
        inputs = self.codes.shape[1]
        span = self.precision.span(inputs)
        scales, zeros = (values.repeat_interleave(span, 1)[:, :inputs] for values in (self.scales, self.zeros))
        return (self.codes.float() - zeros.float()) * scales.float()

    def packed(self) -> PackedWeight:
        if self.precision.bits not in STEPS:
            raise BadInput("expected 3 or 4: no kernel multiplies with others", field="bits", value=self.precision.bits)
        group = 0 if self.scales.shape[1] == 1 else self.precision.group
        return from_codes(self.codes, self.scales, self.zeros, self.precision.bits, group)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, float16 scales, and zero points of as many bits as a code."""
        bits = self.precision.bits
        return (self.codes.numel() * bits + self.scales.numel() * (16 + bits)) // 8


def grouped(weight: torch.Tensor, span: int) -> torch.Tensor:
    """The weight (outputs, inputs) as (outputs, groups, span); the last group is filled up with zeros."""
    missing = -weight.shape[1] % span
    return pad(weight, (0, missing)).view(len(weight), -1, span)


def round_to_nearest(weight: torch.Tensor, precision: Precision) -> QuantisedMatrix:
    """Round a weight of (outputs, inputs) to the nearest point of its grid (RTN)."""
    span = precision.span(weight.shape[1])
    groups = grouped(weight.float(), span)
    grid = fit_grid(groups, precision.bits)
    wide = Grid(grid.scale.unsqueeze(-1), grid.zero.unsqueeze(-1), grid.bits)
    codes = wide.codes(groups).flatten(1)[:, : weight.shape[1]]
    return QuantisedMatrix(codes.to(torch.uint8), grid.scale.half(), grid.zero.to(torch.uint8), precision)


EXPONENTS = tuple(i / 20 for i in range(20))
"""Exponents α that are tried (section 3.2: a grid from 0, no scaling, to 1)."""

DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean (section 3.3, step 3)."""


def search_scales(
    weight: torch.Tensor, magnitude: torch.Tensor, second_moment: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """AWQ: the scale s of each input, (inputs,), with the least error, s = magnitude^α (Lin et al. 2024, eq. 4 and 5).

    Inputs with large activations get finer steps, by scales that the layer before takes back; √(max s · min s) = 1.
    """
    best, best_scales = float("inf"), torch.ones_like(magnitude)
    for exponent in EXPONENTS:
        scales = magnitude.clamp(min=1e-4).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(weight * scales, precision).dense() / scales
        error = output_error(weight - rounded, second_moment)
        if error < best:
            best, best_scales = error, scales
    return best_scales


def output_error(difference: torch.Tensor, second_moment: torch.Tensor) -> float:
    """E‖ΔW x‖² = tr(ΔW · E[x xᵀ] · ΔWᵀ) of a difference of weights, (outputs, inputs)."""
    return float(((difference @ second_moment) * difference).double().sum())


def gptq(weight: torch.Tensor, second_moment: torch.Tensor, precision: Precision) -> QuantisedMatrix:
    """GPTQ: round a weight so that its product with the given inputs changes little (Frantar et al. 2022).

    Columns are rounded one after the other, and those that follow make up for each error. The error of column q, (w_q −
    ŵ_q) / U_qq, is subtracted from each later column j, times U_qj (eq. 2 and 3, with U the upper Cholesky factor of
    the inverse Hessian of E[x xᵀ], (inputs, inputs)). A group's grid is fitted when its turn comes.
    """
    remaining = weight.float().clone()
    inputs = weight.shape[1]
    span = precision.span(inputs)
    factor = _inverse_factor(second_moment)
    codes = torch.empty_like(remaining)
    grids = []
    for column in range(inputs):
        if column % span == 0:
            begin = remaining if precision.group != -1 else weight.float()
            grids.append(fit_grid(grouped(begin[:, column : column + span], span), precision.bits))
        grid = Grid(grids[-1].scale[:, 0], grids[-1].zero[:, 0], precision.bits)
        codes[:, column] = grid.codes(remaining[:, column])
        error = (remaining[:, column] - grid.values(codes[:, column])) / factor[column, column]
        remaining[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
    scales, zeros = (torch.cat([getattr(grid, name) for grid in grids], dim=1) for name in ("scale", "zero"))
    return QuantisedMatrix(codes.to(torch.uint8), scales.half(), zeros.to(torch.uint8), precision)


def _inverse_factor(second_moment: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32."""
    hessian = second_moment.double().clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # inputs that never occur
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


class RecordedInputs:
    """A linear layer that adds up E[x xᵀ], (inputs, inputs), and E|x|, (inputs,), as it computes: sums until `mean`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._count = 0
        inputs = weight.shape[1]
        self.second_moment = torch.zeros(inputs, inputs)
        self.magnitude = torch.zeros(inputs)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Compute x · Wᵀ and record x."""
        rows = x.detach().flatten(0, -2)
        self._count += len(rows)
        self.second_moment += rows.T @ rows
        self.magnitude += rows.abs().sum(0)
        return linear(x, self._weight)

    def mean(self) -> RecordedInputs:
        """Divide the sums by the number of inputs; returns itself."""
        self.second_moment /= self._count
        self.magnitude /= self._count
        return self


@torch.no_grad()
def inputs_and_states(
    forward: ForwardPass, weights: Weights, tokens: torch.Tensor, modules: Iterable[str]
) -> tuple[dict[str, RecordedInputs], torch.Tensor]:
    """Inputs of modules (layers.0.qkv) for tokens (sequences, n), and the head's states, (sequences, n, hidden)."""
    tensors = to_named(weights)
    recorders = {name: RecordedInputs(tensors[name]) for name in modules}
    states = final_states(forward, replaced(weights, recorders), tokens)
    return {name: recorder.mean() for name, recorder in recorders.items()}, states


Method: TypeAlias = Literal["rtn", "gptq", "awq"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class QuantisedModel:
    """A model's linear layers on a grid, and the weights that were quantised: AWQ scales them, without effect on
    outputs.
    """

    reference: Weights
    modules: dict[str, QuantisedMatrix]
    method: Method
    precision: Precision

    def weights(self, only: Collection[str] | None = None) -> Weights:
        """The model with quantised modules, as dense tensors: all of them, or `only` some."""
        dense = {name: matrix.dense() for name, matrix in self.modules.items() if only is None or name in only}
        return replaced(self.reference, dense)

    def errors(self) -> dict[str, torch.Tensor]:
        """The errors W − Ŵ by module, (outputs, inputs)."""
        tensors = to_named(self.reference)
        return {name: tensors[name] - matrix.dense() for name, matrix in self.modules.items()}

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.modules.values())


@torch.no_grad()
def quantise_model(
    forward: ForwardPass, weights: Weights, method: Method, precision: Precision, calibration: torch.Tensor
) -> QuantisedModel:
    """Quantise every linear layer. `calibration`: sequences of tokens, (sequences, n), for GPTQ and AWQ.

    GPTQ sees a module's inputs as the modules before it, already quantised, give them.
    """
    if method not in METHODS:
        raise BadInput(f"expected one of {', '.join(METHODS)}", field="method", value=method)
    reference = _scaled(forward, weights, precision, calibration) if method == "awq" else weights
    tensors, current = to_named(reference), reference
    modules: dict[str, QuantisedMatrix] = {}
    for name in module_names(forward.config):
        if method == "gptq":
            inputs = inputs_and_states(forward, current, calibration, [name])[0][name]
            modules[name] = gptq(tensors[name], inputs.second_moment, precision)
            current = replaced(current, {name: modules[name].dense()})
        else:
            modules[name] = round_to_nearest(tensors[name], precision)
    return QuantisedModel(reference, modules, method, precision)


def _scaled(forward: ForwardPass, weights: Weights, precision: Precision, calibration: torch.Tensor) -> Weights:
    """The same function with AWQ's scales: inputs of a module times s, and what gives these inputs divided by s.

    The inputs of qkv and gate_up come from a norm, those of down from the rows of up; those of o are sums of values.
    """
    tensors = dict(to_named(weights))
    inputs, _ = inputs_and_states(forward, weights, calibration, module_names(forward.config))
    for i in range(forward.config.shape.layers):
        prefix = f"layers.{i}."
        for module, source in (("qkv", "before"), ("gate_up", "after"), ("down", "gate_up")):
            recorded, weight = inputs[prefix + module], tensors[prefix + module]
            scales = search_scales(weight, recorded.magnitude, recorded.second_moment, precision)
            tensors[prefix + module] = weight * scales
            divisor = scales
            if source == "gate_up":  # its first half is the gate's rows, its second half up's
                divisor = torch.cat([torch.ones_like(scales), scales])
            old = tensors[prefix + source]
            tensors[prefix + source] = old / (divisor.unsqueeze(1) if old.dim() == 2 else divisor)
    return from_named(tensors)


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
