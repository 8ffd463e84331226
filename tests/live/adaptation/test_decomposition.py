"""The forward pass equals the live engine's, and SUN's decomposition isolates its two modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from live.adaptation.forward import ForwardPass, KVCache, Modules
from live.adaptation.tasks import draw
from live.adaptation.weights import from_named, initial_weights, read_model, rounded, to_named, write_model
from live.models.config import ModelConfig, read_config
from live.models.linear import Rounding
from live.models.weights import Weights, load_weights
from tests.live.adaptation.typed import engine_logits
from workloads.errors import BadInput

PROMPTS, ANSWERS = draw(["reverse"], 4, 6, seed=5, step=0)


def changed(config: ModelConfig, weights: Weights, part: str = "", seed: int = 9) -> Weights:
    """The weights with noise on the tensors whose names contain `part`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) * (part in name)
        for name, tensor in to_named(weights).items()
    }
    return from_named(tensors)


@pytest.mark.parametrize("name", ["llama", "llama-3.1", "qwen3"])
def test_logits_equal_the_engine_s_whole_and_continued(
    name: str, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    directory, _ = checkpoint(name)
    config, weights = read_model(directory)
    tokens = torch.randint(0, 199, (3, 37), generator=torch.Generator().manual_seed(2))
    expected = engine_logits(config, weights, tokens)
    forward = ForwardPass(config)
    torch.testing.assert_close(forward(weights, tokens)[0], expected, rtol=1e-5, atol=1e-5)
    first, cache = forward(weights, tokens[:, :20])
    second, cache = forward(weights, tokens[:, 20:], cache)
    assert cache.tokens == 37
    torch.testing.assert_close(torch.cat([first, second], dim=1), expected, rtol=1e-5, atol=1e-5)


def test_a_mixture_of_experts_is_refused(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    directory, _ = checkpoint("qwen3-moe")
    with pytest.raises(BadInput, match="expected a dense language model"):
        ForwardPass(read_config(directory))


def test_a_written_model_is_what_the_engine_loads(tiny: ModelConfig, tmp_path: Path) -> None:
    weights = changed(tiny, initial_weights(tiny, 0))
    write_model(tmp_path / "model", tiny, weights)
    config = read_config(tmp_path / "model")
    assert config == tiny
    loaded = load_weights(tmp_path / "model", config, torch.float32, "cpu")
    expected = to_named(weights)
    assert to_named(loaded).keys() == expected.keys()
    for name, tensor in to_named(loaded).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("bits", [4, 3])
def test_a_rounded_decode_module_is_what_the_engine_serves(tiny: ModelConfig, tmp_path: Path, bits: int) -> None:
    weights = changed(tiny, initial_weights(tiny, 0))
    write_model(tmp_path, tiny, weights)
    packed = load_weights(tmp_path, tiny, torch.float32, "cpu", Rounding(bits))
    expected = engine_logits(tiny, packed, PROMPTS)
    logits, _ = ForwardPass(tiny)(rounded(weights, bits), PROMPTS)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ForwardPass(tiny)(weights, PROMPTS)[0], expected, atol=1e-2)


# -- eq. 2 to 6 --------------------------------------------------------------------------------------------------------


def test_with_one_set_of_weights_the_modules_are_the_model(tiny: ModelConfig) -> None:
    weights = changed(tiny, initial_weights(tiny, 0))
    modules = Modules(ForwardPass(tiny), weights, weights)
    logits, _ = modules.forward(weights, torch.cat([PROMPTS, ANSWERS], dim=1))
    expected = logits[:, PROMPTS.shape[1] - 1 : -1]
    torch.testing.assert_close(modules.answer_logits(PROMPTS, ANSWERS), expected, rtol=1e-5, atol=1e-5)
    loss = cross_entropy(expected.flatten(0, 1), ANSWERS.flatten())
    torch.testing.assert_close(modules.loss(PROMPTS, ANSWERS), loss)


def test_the_first_token_is_the_prefill_module_s_and_the_others_the_decode_module_s(tiny: ModelConfig) -> None:
    weights = changed(tiny, initial_weights(tiny, 0))
    changed_head = changed(tiny, weights, "head")
    forward = ForwardPass(tiny)
    reference = Modules(forward, weights, weights).answer_logits(PROMPTS, ANSWERS)
    decode = Modules(forward, weights, changed(tiny, weights)).answer_logits(PROMPTS, ANSWERS)
    assert torch.equal(decode[:, 0], reference[:, 0])
    assert not torch.isclose(decode[:, 1:], reference[:, 1:]).any(dim=-1).all()
    prefill = Modules(forward, changed_head, weights).answer_logits(PROMPTS, ANSWERS)
    assert torch.equal(prefill[:, 1:], reference[:, 1:])
    assert not torch.equal(prefill[:, 0], reference[:, 0])


def test_answers_are_generated_from_the_likeliest_tokens(tiny: ModelConfig) -> None:
    weights = changed(tiny, initial_weights(tiny, 0))
    modules = Modules(ForwardPass(tiny), weights, changed(tiny, weights, "layers"))
    answers = modules.generate(PROMPTS, 5)
    assert torch.equal(modules.answer_logits(PROMPTS, answers).argmax(-1), answers)
    assert modules.exact_match(PROMPTS, answers) == 1.0
    wrong = answers.clone()
    wrong[0, 3] = (wrong[0, 3] + 1) % 10
    assert modules.exact_match(PROMPTS, wrong) == pytest.approx(5 / 6)


def test_gradients_reach_the_prefill_module_through_keys_and_values_only(tiny: ModelConfig) -> None:
    forward, decode = ForwardPass(tiny), changed(tiny, initial_weights(tiny, 0))
    prefill = changed(tiny, decode)
    for tensor in to_named(prefill).values():
        tensor.requires_grad_()
    _, cache = forward(prefill, PROMPTS)
    logits, _ = forward(decode, ANSWERS[:, :-1], cache)
    assert logits.requires_grad
    logits.square().sum().backward()
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in to_named(decode).values())
    reached = {name for name, tensor in to_named(prefill).items() if tensor.grad is not None and tensor.grad.any()}
    # The last layer's keys and values come before its own output: what follows them gives the first token only.
    never = {"head", "norm", "layers.1.o", "layers.1.after", "layers.1.gate_up", "layers.1.down", "layers.1.q_norm"}
    assert reached == to_named(prefill).keys() - never
    detached = KVCache(tuple((k.detach(), v.detach()) for k, v in cache.layers))
    assert not forward(decode, ANSWERS[:, :-1], detached)[0].requires_grad


def test_the_loss_s_gradient_is_the_finite_difference(tiny: ModelConfig) -> None:
    """In float64, along a random direction of all of the prefill module's weights, the decode module held fixed."""
    start = {name: tensor.double() for name, tensor in to_named(changed(tiny, initial_weights(tiny, 0))).items()}
    forward, decode = ForwardPass(tiny), from_named(start)
    generator = torch.Generator().manual_seed(4)
    direction = {name: torch.randn(x.shape, generator=generator, dtype=torch.float64) for name, x in start.items()}

    def loss(step: float) -> torch.Tensor:
        moved = {name: tensor + step * direction[name] for name, tensor in start.items()}
        return Modules(forward, from_named(moved), decode).loss(PROMPTS, ANSWERS)

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    Modules(forward, from_named(leaves), decode).loss(PROMPTS, ANSWERS).backward()
    slope = sum(
        float((tensor.grad * direction[name]).sum()) for name, tensor in leaves.items() if tensor.grad is not None
    )
    assert slope == pytest.approx(float(loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-5)
