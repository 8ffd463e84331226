"""GPTQ and AWQ against their definitions, module by module and over a whole model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from kernels.shapes import Shape
from live.adaptation.forward import ForwardPass
from live.adaptation.quantisers import (
    EXPONENTS,
    METHODS,
    Method,
    Precision,
    fit_grid,
    gptq,
    inputs_and_states,
    output_error,
    quantise_model,
    round_to_nearest,
    search_scales,
)
from live.adaptation.weights import initial_weights, module_names, to_named
from live.models.config import ModelConfig


def correlated(inputs: int, count: int = 400, seed: int = 0) -> torch.Tensor:
    """Inputs (count, inputs) with correlations, and with some far larger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator) * torch.logspace(-1, 1, inputs)
    return torch.randn(count, inputs, generator=generator) @ mixing


def moment(x: torch.Tensor) -> torch.Tensor:
    return x.T @ x / len(x)


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("group", [-1, 128])
def test_gptq_beats_rounding_in_the_layer_s_output(bits: int, group: int) -> None:
    x = correlated(200)
    weight = torch.randn(24, 200, generator=torch.Generator().manual_seed(1))
    precision = Precision(bits, group)
    errors = [
        float(((weight - matrix.dense()) @ x.T).square().sum())
        for matrix in (gptq(weight, moment(x), precision), round_to_nearest(weight, precision))
    ]
    assert errors[0] < errors[1]


def test_gptq_of_uncorrelated_inputs_is_rounding_to_nearest() -> None:
    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    matrix, rounded = gptq(weight, torch.eye(40), Precision(3)), round_to_nearest(weight, Precision(3))
    assert torch.equal(matrix.codes, rounded.codes)


def test_gptq_is_greedy_with_the_best_correction_of_what_is_left() -> None:
    """By brute force: after each rounded column, the columns left are those that minimise the output's error."""
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(1, 5, generator=generator).double(), correlated(5, seed=3).double()
    hessian = moment(x)
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(5)
    grid = fit_grid(weight.float().unsqueeze(1), 2)
    remaining, codes = weight[0].clone(), []
    for column in range(5):
        codes.append(float(grid.codes(remaining[column].float())))
        fixed = torch.tensor([float(grid.values(torch.tensor(code))) for code in codes], dtype=torch.float64)
        past = torch.arange(column + 1)
        later = torch.arange(column + 1, 5)
        # The minimum over the rest of (w − ŵ)ᵀ H (w − ŵ), with the columns so far fixed.
        if len(later):
            difference = torch.linalg.solve(
                hessian[later][:, later], -hessian[later][:, past] @ (weight[0, past] - fixed)
            )
            remaining[later] = weight[0, later] - difference
    matrix = gptq(weight.float(), moment(x).float(), Precision(2))
    assert matrix.codes[0].tolist() == codes


def test_gptq_finds_the_best_codes_of_two_columns() -> None:
    """By brute force over all codes of the second column, given the first's."""
    x = correlated(2, seed=5)
    weight = torch.tensor([[0.9, -0.55], [0.2, 1.1], [-0.7, 0.35]])
    matrix = gptq(weight, moment(x), Precision(2))
    for row in range(3):
        zero, scale = float(matrix.zeros[row]), float(matrix.scales[row])
        errors = {}
        for codes in itertools.product(range(4), repeat=2):
            if codes[0] == matrix.codes[row, 0]:
                values = torch.tensor([(code - zero) * scale for code in codes])
                errors[codes[1]] = output_error((weight[row] - values).unsqueeze(0), moment(x))
        assert min(errors, key=errors.__getitem__) == matrix.codes[row, 1]


def test_inputs_that_never_occur() -> None:
    x = correlated(16)
    x[:, 3] = 0
    matrix = gptq(torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), moment(x), Precision(4))
    assert matrix.dense().isfinite().all()


def test_awq_s_scales_are_the_best_of_those_that_are_tried() -> None:
    x = correlated(64)
    weight, precision = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), Precision(3)
    magnitude = x.abs().mean(0)
    best_scales = search_scales(weight, magnitude, moment(x), precision)

    def errors() -> Iterator[float]:
        for exponent in EXPONENTS:
            scales = magnitude**exponent
            yield float(((round_to_nearest(weight * scales, precision).dense() / scales - weight) @ x.T).square().sum())

    error = float(
        ((round_to_nearest(weight * best_scales, precision).dense() / best_scales - weight) @ x.T).square().sum()
    )
    plain = next(errors())  # exponent 0: rounding to nearest
    assert error < 0.9 * plain
    # The scales are normalised, which moves float16 scales by their round-off.
    assert error == pytest.approx(min(errors()), rel=0.02)


@pytest.fixture
def model() -> tuple[ForwardPass, torch.Tensor]:
    """A forward pass of two layers, and calibration tokens."""
    shape = Shape(2, 48, 64, 4, 2, 12, 50, qk_norm=False)
    config = ModelConfig(family="llama", shape=shape, max_position_embeddings=64, tied=True)
    return ForwardPass(config), torch.randint(50, (16, 24), generator=torch.Generator().manual_seed(0))


def test_awq_s_scales_change_no_output(model: tuple[ForwardPass, torch.Tensor]) -> None:
    forward, tokens = model
    weights = initial_weights(forward.config, 0)
    quantised = quantise_model(forward, weights, "awq", Precision(3), tokens)
    scaled, plain = to_named(quantised.reference), to_named(weights)
    assert not torch.allclose(scaled["layers.1.before"], plain["layers.1.before"])
    assert not torch.allclose(scaled["layers.1.down"], plain["layers.1.down"])
    torch.testing.assert_close(
        forward(quantised.reference, tokens)[0], forward(weights, tokens)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("method", METHODS)
def test_models_are_quantised_module_by_module(model: tuple[ForwardPass, torch.Tensor], method: Method) -> None:
    forward, tokens = model
    weights = initial_weights(forward.config, 0)
    quantised = quantise_model(forward, weights, method, Precision(4), tokens)
    assert list(quantised.modules) == module_names(forward.config)
    tensors = to_named(quantised.weights(["layers.1.o"]))
    reference = to_named(quantised.reference)
    changed = [name for name, tensor in tensors.items() if not torch.equal(tensor, reference[name])]
    assert changed == ["layers.1.o"]
    for name, error in quantised.errors().items():
        assert torch.equal(error, reference[name] - quantised.modules[name].dense())
        assert 0 < error.abs().max() < 0.5


def test_gptq_sees_inputs_as_the_quantised_modules_before_give_them(model: tuple[ForwardPass, torch.Tensor]) -> None:
    forward, tokens = model
    quantised = quantise_model(forward, initial_weights(forward.config, 0), "gptq", Precision(2), tokens)
    name = "layers.1.down"
    before = [module for module in quantised.modules if module != name]
    moments = inputs_and_states(forward, quantised.weights(before), tokens, [name])[0][name].second_moment
    assert torch.equal(
        gptq(to_named(quantised.reference)[name], moments, Precision(2)).codes, quantised.modules[name].codes
    )


def test_recorded_moments_are_those_of_the_inputs(model: tuple[ForwardPass, torch.Tensor]) -> None:
    forward, tokens = model
    weights = initial_weights(forward.config, 0)
    inputs = inputs_and_states(forward, weights, tokens, ["layers.0.qkv"])[0]["layers.0.qkv"]
    x = weights.embedding[tokens].flatten(0, 1)
    x = x / (x.square().mean(-1, keepdim=True) + forward.config.shape.epsilon).sqrt()
    torch.testing.assert_close(inputs.second_moment, moment(x), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(inputs.magnitude, x.abs().mean(0), rtol=1e-4, atol=1e-6)
