"""A whole model on a grid, module by module. Embedding, head and norms stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch.nn.functional import linear

from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.quantisers.grid import Grid, Precision, QuantisedMatrix, fit_grid, grouped, round_to_nearest
from live.adaptation.weights import from_named, module_names, replaced, to_named
from live.models.weights import Weights
from workloads.errors import BadInput

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
    """What some modules (layers.0.qkv) get of tokens (sequences, n), and the head's states, (sequences, n, hidden)."""
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
    """Quantise every linear layer. `calibration`: sequences of tokens, (sequences, n), for GPTQ and AWQ."""
    if method not in METHODS:
        raise BadInput(f"expected one of {', '.join(METHODS)}", field="method", value=method)
    reference, names = weights, module_names(forward.config)
    if method == "awq":
        reference = _scaled(forward, weights, precision, calibration)
    tensors = to_named(reference)
    if method == "gptq":
        modules = _gptq_in_order(forward, reference, precision, calibration)
    else:
        modules = {name: round_to_nearest(tensors[name], precision) for name in names}
    return QuantisedModel(reference, modules, method, precision)


def _gptq_in_order(
    forward: ForwardPass, weights: Weights, precision: Precision, calibration: torch.Tensor
) -> dict[str, QuantisedMatrix]:
    """GPTQ of each module, with its inputs as the modules before it, already quantised, give them."""
    modules: dict[str, QuantisedMatrix] = {}
    tensors, current = to_named(weights), weights
    for name in module_names(forward.config):
        inputs = inputs_and_states(forward, current, calibration, [name])[0][name]
        modules[name] = gptq(tensors[name], inputs.second_moment, precision)
        current = replaced(current, {name: modules[name].dense()})
    return modules


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
    return from_named(forward.config, tensors)
