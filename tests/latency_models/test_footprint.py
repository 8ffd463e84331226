"""Bytes on the cards of a deployment: nothing is lost, nothing is counted twice, and a measured ceiling."""

from __future__ import annotations

import pytest

from latency_models.deployment.hardware import Deployment, footprint, load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.files import builtin_names


@pytest.mark.parametrize("name", builtin_names("models"))
@pytest.mark.parametrize("cards", [1, 8])
def test_cards_hold_every_weight_once(name: str, cards: int) -> None:
    model = load_model(name)
    total = footprint(model, Deployment(ffn_cards=cards, precision="bf16"))
    assert total.attention_weights + cards * total.ffn_weights == 2 * model.parameters


def test_shared_experts_lie_on_every_ffn_card_or_with_attention() -> None:
    model = load_model("deepseek-v3")
    shared = 58 * 3 * 7168 * 2048  # one in each of the 58 layers of experts, a byte a weight
    apart, joint = (
        footprint(model, Deployment(ffn_cards=32, precision="fp8", shared_experts=on)) for on in (False, True)
    )
    assert apart.attention_weights - joint.attention_weights == shared
    assert joint.ffn_weights - apart.ffn_weights == shared


def test_an_expert_held_twice_takes_its_bytes_twice() -> None:
    model = load_model("deepseek-v3")
    once, twice = (footprint(model, Deployment(ffn_cards=32, experts_per_card=covered)) for covered in (8, 16))
    assert twice.ffn_weights - once.ffn_weights == 2 * 8 * 58 * 3 * 7168 * 2048


def test_kv_bytes_of_a_token_over_all_layers() -> None:
    assert footprint(load_model("llama-3.1-70b"), Deployment()).kv_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert footprint(load_model("deepseek-v3"), Deployment(kv_bytes=1.0)).kv_bytes_per_token == 61 * 576


def test_the_kv_ceiling_of_a_measured_bundle() -> None:
    """Qwen3-235B-A22B-FP8 with a 16-bit cache on GB200: attention cards held about 839,400 tokens (FastAFD's log)."""
    total = footprint(load_model("qwen3-235b-a22b"), Deployment(ffn_cards=4, precision="fp8"))
    free = 0.9 * load_hardware("b200-sxm").memory_capacity - total.attention_weights
    assert free / total.kv_bytes_per_token == pytest.approx(839_400, rel=0.05)
