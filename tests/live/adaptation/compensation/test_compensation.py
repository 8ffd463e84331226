"""CKA, static terms, compensators and their calibration, and the measures, against their definitions."""

from __future__ import annotations

import pytest
import torch

from kernels.shapes import Shape
from live.adaptation.compensation import Evaluation, TokenMeasures, by_quartile
from live.adaptation.compensators import (
    PARTS,
    CalibrationSettings,
    CalibrationText,
    StoredCompensator,
    TrainedCompensator,
    batch_rows,
    calibrate,
    calibration_text,
    distillation_loss,
    initial_gate,
    stored,
    svd_factors,
    whitened_factors,
)
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.placement import damage, linear_cka
from live.adaptation.quantisers import Precision, QuantisedModel, quantise_model
from live.adaptation.training import TrainingSettings
from live.adaptation.weights import from_named, initial_weights, module_names, to_named
from live.models.config import ModelConfig
from live.models.weights import Weights

Model = tuple[ForwardPass, Weights, QuantisedModel, torch.Tensor]
NONE = TrainingSettings(steps=0, batch_size=4, learning_rate=1e-2)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_cka_is_its_definition() -> None:
    states, reference = torch.randn(50, 6, generator=generator(0)), torch.randn(50, 6, generator=generator(1))
    centre = torch.eye(50, dtype=torch.float64) - 1 / 50
    x, y = states.double(), reference.double()
    expected = (x.T @ centre @ y).norm() ** 2 / ((x.T @ centre @ x).norm() * (y.T @ centre @ y).norm())
    assert linear_cka(states, reference) == pytest.approx(float(expected), rel=1e-9)


@pytest.fixture
def model() -> Model:
    """A random model of two layers, quantised to 2 bits, and tokens."""
    config = ModelConfig("llama", Shape(2, 32, 48, 4, 2, 8, 40), max_position_embeddings=64, tied=True)
    forward, weights = ForwardPass(config), initial_weights(config, 0)
    tokens = torch.randint(40, (16, 20), generator=generator(0))
    return forward, weights, quantise_model(forward, weights, "rtn", Precision(2), tokens), tokens


def test_damage_is_of_one_module_at_a_time(model: Model) -> None:
    forward, weights, quantised, tokens = model
    damages = damage(forward, quantised, tokens)
    assert list(damages) == module_names(forward.config)
    assert all(0 < value < 1 for value in damages.values())
    tensors = dict(to_named(weights))
    tensors["layers.1.o"] = quantised.modules["layers.1.o"].dense()
    states = final_states(forward, from_named(tensors), tokens).flatten(0, 1)
    expected = 1 - linear_cka(final_states(forward, weights, tokens).flatten(0, 1), states)
    assert damages["layers.1.o"] == pytest.approx(expected, rel=1e-6)


def test_svd_factors_are_the_nearest_of_their_rank() -> None:
    error = torch.randn(12, 9, generator=generator(0))
    down, up = svd_factors(error, 3)
    assert down.shape == (3, 9)
    assert up.shape == (12, 3)
    values = torch.linalg.svdvals(error)
    assert float((error - up @ down).square().sum()) == pytest.approx(float(values[3:].square().sum()), rel=1e-4)


def test_whitened_factors_have_the_least_error_of_the_output() -> None:
    error, x = torch.randn(12, 9, generator=generator(0)), torch.randn(300, 9, generator=generator(1))
    x = x * torch.logspace(-1, 1, 9)
    down, up = whitened_factors(error, x.T @ x / 300, 3)
    error_of_output = float((x @ (error - up @ down).T).square().sum())
    plain_down, plain_up = svd_factors(error, 3)
    assert error_of_output < 0.8 * float((x @ (error - plain_up @ plain_down).T).square().sum())
    # The best approximation of rank 3 of the outputs themselves is a bound, and is reached.
    values = torch.linalg.svdvals(x @ error.T)
    assert error_of_output == pytest.approx(float(values[3:].square().sum()), rel=1e-3)


def test_inputs_that_do_not_span_the_space_have_factors() -> None:
    x = torch.randn(50, 4, generator=generator(0)) @ torch.randn(4, 20, generator=generator(1))
    error = torch.randn(6, 20, generator=generator(2))
    down, up = whitened_factors(error, x.T @ x, 4)
    torch.testing.assert_close(x @ (up @ down).T, x @ error.T, rtol=1e-3, atol=1e-3)


def made_parts(rank: int, inputs: int, outputs: int) -> dict[str, torch.Tensor]:
    """Parts of a compensator whose gate is not 1."""
    down, up = torch.randn(rank, inputs, generator=generator(3)), torch.randn(outputs, rank, generator=generator(7))
    parts = {"down": down, "up": up}
    gate = initial_gate(rank, 0)
    moved = {name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator(4)) for name, tensor in gate.items()}
    return parts | moved


def test_a_compensator_is_equation_3() -> None:
    parts, weight = made_parts(3, 10, 7), torch.randn(7, 10, generator=generator(5))
    assert set(parts) == set(PARTS)
    x = torch.randn(4, 10, generator=generator(6))
    for row in range(4):
        z = parts["down"] @ x[row]
        inner = (parts["first"] @ z + parts["first_bias"]).relu()
        gate = 1 + torch.tanh(parts["second"] @ inner + parts["second_bias"])
        expected = weight @ x[row] + parts["up"] @ (gate * z)
        torch.testing.assert_close(TrainedCompensator(weight, parts).product(x)[row], expected, rtol=1e-4, atol=1e-4)
    plain = TrainedCompensator(weight, parts, gated=False).product(x)
    torch.testing.assert_close(plain, x @ (weight + parts["up"] @ parts["down"]).T, rtol=1e-4, atol=1e-4)


def test_the_initial_gate_is_1_for_every_token() -> None:
    parts = made_parts(3, 10, 7) | initial_gate(3, 0)
    x, weight = torch.randn(5, 10, generator=generator(6)), torch.zeros(7, 10)
    assert torch.equal(
        TrainedCompensator(weight, parts).product(x), TrainedCompensator(weight, parts, gated=False).product(x)
    )


def test_a_stored_compensator_is_off_by_the_rounding_of_int8() -> None:
    parts, weight = made_parts(3, 10, 7), torch.zeros(7, 10)
    x = torch.randn(50, 10, generator=generator(6))
    exact = TrainedCompensator(weight, parts).product(x)
    rounded = StoredCompensator(weight, stored(parts)).product(x)
    assert 0 < float((exact - rounded).norm() / exact.norm()) < 0.02


def text_of(model: Model) -> CalibrationText:
    forward, _, quantised, tokens = model
    return calibration_text(forward, quantised.reference, tokens)


def test_the_loss_is_the_divergence_at_temperature_2(model: Model) -> None:
    forward, weights, quantised, tokens = model
    rows = torch.tensor([3, 0])
    logits = (forward(version, tokens[rows])[0] for version in (weights, quantised.weights()))
    targets, predictions = ((values / 2).softmax(-1) for values in logits)
    expected = (targets * (targets / predictions).log()).sum(-1).mean()
    text = text_of(model)
    torch.testing.assert_close(distillation_loss(forward, quantised.weights(), text, rows), expected, rtol=1e-4, atol=0)
    assert float(distillation_loss(forward, weights, text, rows)) == pytest.approx(0, abs=1e-6)


def test_phases_train_the_factors_then_the_gate(model: Model) -> None:
    forward, _, quantised, _ = model
    names, text = ["layers.0.down", "layers.1.qkv"], text_of(model)
    some = TrainingSettings(steps=12, batch_size=4, learning_rate=5e-3)

    def trained(factors: TrainingSettings, gate: TrainingSettings, *, gated: bool = True) -> dict[str, torch.Tensor]:
        calibrated = calibrate(forward, quantised, names, 3, text, CalibrationSettings(factors, gate), gated=gated)
        assert len(calibrated.losses) == factors.steps + gate.steps
        if factors.steps:
            assert sum(calibrated.losses[-4:]) < sum(calibrated.losses[:4])
        return calibrated.parts["layers.1.qkv"]

    begin, first, second = trained(NONE, NONE), trained(some, NONE), trained(some, some)
    without = trained(some, some, gated=False)
    down, up = whitened_factors(quantised.errors()["layers.1.qkv"], text.inputs["layers.1.qkv"].second_moment, 3)
    assert torch.equal(begin["down"], down)
    assert torch.equal(begin["up"], up)
    for part in PARTS:
        factor = part in ("down", "up")
        assert torch.equal(first[part], begin[part]) is not factor
        assert torch.equal(second[part], first[part]) is factor, part
        assert torch.equal(without[part], first[part]) is not factor, part


def test_compensation_brings_the_divergence_down(model: Model) -> None:
    forward, weights, quantised, _ = model
    some = TrainingSettings(steps=30, batch_size=4, learning_rate=5e-3)
    calibrated = calibrate(
        forward, quantised, module_names(forward.config), 4, text_of(model), CalibrationSettings(some, some)
    )
    assert weights.head is not None
    held_out = torch.randint(40, (16, 20), generator=generator(9))
    evaluation = Evaluation(forward, held_out, final_states(forward, weights, held_out[:, :-1]), weights.head)
    before, after = evaluation.measure(quantised.weights()), evaluation.measure(calibrated.weights())
    assert after.summary()["kl"] < 0.7 * before.summary()["kl"]
    assert evaluation.measure(calibrated.stored_weights()).summary()["kl"] == pytest.approx(
        after.summary()["kl"], rel=0.05
    )
    reference = evaluation.measure(weights)
    assert reference.summary()["kl"] == pytest.approx(0, abs=1e-6)
    assert float(reference.deviation.abs().max()) == pytest.approx(0, abs=1e-5)
    logits = forward(weights, held_out[:, :-1])[0].log_softmax(-1)
    expected = -logits.gather(-1, held_out[:, 1:, None]).mean()
    assert reference.perplexity == pytest.approx(float(expected.exp()), rel=1e-5)
    right = sum(
        int(row.argmax()) == int(token)
        for rows, tokens in zip(logits, held_out[:, 1:], strict=True)
        for row, token in zip(rows, tokens, strict=True)
    )
    assert reference.summary()["accuracy"] == right / held_out[:, 1:].numel()


def test_every_sequence_comes_once_in_an_epoch() -> None:
    epochs = [torch.cat([batch_rows(12, 4, 0, step) for step in range(3 * epoch, 3 * epoch + 3)]) for epoch in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert torch.equal(batch_rows(12, 4, 0, 4), batch_rows(12, 4, 0, 4))
    assert not torch.equal(batch_rows(12, 4, 0, 4), batch_rows(12, 4, 1, 4))


def test_quartiles_are_ordered_by_the_quantisation_error() -> None:
    deviation = torch.tensor([0.8, 0.1, 0.2, 0.7, 0.3, 0.4, 0.6, 0.5])
    zeros = torch.zeros(8)
    quantised = TokenMeasures(loss=deviation * 10, divergence=deviation, deviation=deviation, right=zeros)
    compensated = TokenMeasures(loss=deviation * 4, divergence=zeros, deviation=zeros, right=zeros)
    ungated = TokenMeasures(loss=deviation * 5, divergence=deviation / 2, deviation=zeros, right=zeros)
    rows = by_quartile(quantised, compensated, ungated)
    assert [row["deviation"] for row in rows] == pytest.approx([0.15, 0.35, 0.55, 0.75])
    assert [row["loss"] for row in rows] == pytest.approx([0.9, 2.1, 3.3, 4.5])
    assert [row["gate_loss"] for row in rows] == pytest.approx([0.15, 0.35, 0.55, 0.75])
    assert [row["gate_kl"] for row in rows] == pytest.approx([0.075, 0.175, 0.275, 0.375])
