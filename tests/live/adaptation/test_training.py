"""Trainings are deterministic and resumable, touch what they should, and separate SUN from naive sharing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kernels.shapes import Shape
from live.adaptation import training
from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.tasks import VOCABULARY, Lesson
from live.adaptation.training import SavedState, Trained, TrainingSettings, tune
from live.adaptation.weights import TunedWeights, initial_weights, to_named
from live.models.config import ModelConfig
from live.models.weights import Weights
from workloads.errors import BadInput

SETTINGS = TrainingSettings(steps=8, batch_size=4, learning_rate=1e-2)
LESSON = Lesson(("reverse",), digits=3, seed=0)


class Stopped(Exception):
    pass


def equal(weights: Weights, reference: Weights) -> bool:
    expected = to_named(reference)
    return all(torch.equal(tensor, expected[name]) for name, tensor in to_named(weights).items())


def trained(config: ModelConfig, lesson: Lesson = LESSON, state: SavedState | None = None, stop: int = 99) -> Trained:
    """A short prefill-only tuning, stopped by an error after `stop` steps."""
    start, remaining = initial_weights(config, 0), [stop]

    def advance(text: str) -> None:
        remaining[0] -= 1
        if remaining[0] == 0:
            raise Stopped

    return tune(ForwardPass(config), start, start, lesson, SETTINGS, state=state, advance=advance)


def test_equal_seeds_train_equal_weights_and_other_seeds_do_not(tiny: ModelConfig) -> None:
    first, again, reseeded = trained(tiny), trained(tiny), trained(tiny, Lesson(("reverse",), 3, seed=1))
    assert first.losses == again.losses
    assert equal(first.weights, again.weights)
    assert not equal(first.weights, reseeded.weights)


@pytest.mark.parametrize("stop", [2, 3, 5, 7])
def test_a_resumed_training_equals_an_uninterrupted_one(
    tiny: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    monkeypatch.setattr(training, "SAVE_EVERY", 3)
    state = SavedState(tmp_path / "state.safetensors", {"seed": 0})
    with pytest.raises(Stopped):
        trained(tiny, state=state, stop=stop)
    assert state.file.exists() == (stop > 3)
    resumed, uninterrupted = trained(tiny, state=state), trained(tiny)
    assert resumed.losses == uninterrupted.losses
    assert equal(resumed.weights, uninterrupted.weights)
    finished = trained(tiny, state=state, stop=1)  # nothing is left to do
    assert equal(finished.weights, uninterrupted.weights)


def test_the_state_of_another_training_is_refused(tiny: ModelConfig, tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    trained(tiny, state=SavedState(file, {"seed": 0}))
    with pytest.raises(BadInput, match="expected the state of the same training"):
        trained(tiny, state=SavedState(file, {"seed": 1}))
    file.write_bytes(b"no tensors")
    with pytest.raises(BadInput, match="expected a training's state"):
        trained(tiny, state=SavedState(file, {"seed": 0}))


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    settings = TrainingSettings(steps=20, batch_size=1, learning_rate=1.0, warmup=0.1)
    rates = [settings.rate(step) for step in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(1 / 18)
    assert all(later < earlier for earlier, later in pairwise(rates[2:]))


def test_prefill_only_tuning_leaves_start_and_decode_module_as_they_are(tiny: ModelConfig) -> None:
    base, untouched = initial_weights(tiny, 0), initial_weights(tiny, 0)
    result = tune(ForwardPass(tiny), base, base, LESSON, SETTINGS)
    assert equal(base, untouched)
    moved = {name for name, x in to_named(result.weights).items() if not torch.equal(x, to_named(base)[name])}
    assert moved == to_named(base).keys()
    assert result.trained_parameters == sum(tensor.numel() for tensor in to_named(base).values())


def test_attention_only_trains_attention(tiny: ModelConfig) -> None:
    base = initial_weights(tiny, 0)
    result = tune(ForwardPass(tiny), base, base, LESSON, SETTINGS, scope="attention")
    moved = {name for name, x in to_named(result.weights).items() if not torch.equal(x, to_named(base)[name])}
    assert moved == {f"layers.{i}.{part}" for i in range(2) for part in ("qkv", "o", "q_norm", "k_norm")}
    per_layer = 64 * 32 + 32 * 32 + 8 + 8
    assert result.trained_parameters == 2 * per_layer


def test_low_rank_trains_terms_of_that_rank(tiny: ModelConfig) -> None:
    base = initial_weights(tiny, 0)
    assert equal(TunedWeights(base, "low_rank", rank=3).weights(), base)
    result = tune(ForwardPass(tiny), base, base, LESSON, SETTINGS, scope="low_rank", rank=3)
    for name, tensor in to_named(result.weights).items():
        change = tensor - to_named(base)[name]
        if name.endswith(("qkv", "o", "gate_up", "down")):
            assert torch.linalg.matrix_rank(change, rtol=1e-4) == 3, name
        else:
            assert not change.any(), name


@pytest.mark.slow  # on tasks of text, `text/test_pairs.py` shows the same by the command
def test_sun_learns_a_task_that_naive_sharing_does_not() -> None:
    """Reverse then add one, unseen by the base model: full fine-tuning and SUN learn it, naive sharing fails."""
    shape = Shape(2, 48, 96, 4, 2, 12, VOCABULARY)
    forward = ForwardPass(ModelConfig(family="llama", shape=shape, max_position_embeddings=16, tied=True))
    base_lesson = Lesson(("copy", "reverse", "add_one", "negate", "rotate"), 3, seed=0)
    settings = TrainingSettings(steps=600, batch_size=32, learning_rate=6e-3)
    base = tune(forward, initial_weights(forward.config, 0), None, base_lesson, settings).weights
    new, short = Lesson(("reverse_add_one",), 3, seed=0), TrainingSettings(400, 24, 4e-3)
    full = tune(forward, base, None, new, short).weights
    sun = tune(forward, base, base, new, short).weights
    share = {
        name: new.exact_match(Modules(forward, prefill, decode), 200)
        for name, prefill, decode in (
            ("base", base, base), ("full", full, full), ("naive", full, base), ("sun", sun, base),
        )
    }  # fmt: skip
    assert share["base"] < 0.05
    assert share["full"] > 0.95
    assert share["sun"] > 0.95
    assert share["naive"] < share["sun"] - 0.5
