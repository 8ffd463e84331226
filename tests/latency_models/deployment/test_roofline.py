"""AFD appendix B by hand: the paper's own numbers, on hardware with round figures."""

from __future__ import annotations

from typing import Any

import pytest

from latency_models.calibration import Calibration
from latency_models.deployment.hardware import Deployment, Hardware, derive, footprint, load_hardware, read_deployment
from latency_models.deployment.models import Model, load_model
from latency_models.io.config_io import checked
from latency_models.io.files import builtin_names
from workloads.errors import BadInput

ROUND = checked(
    Hardware,
    {
        "schema": "twin.hardware/1",
        "name": "round",
        "device": "a device of round figures",
        "peak_flops": {"bf16": 5e14, "int8": 1e15},
        "memory_bandwidth": 2e12,
        "memory_capacity": 64e9,
        "network": {"intra_node": 4e11, "inter_node": 5e10},
        "efficiency": {"memory": 0.5, "compute": 0.5, "network": 0.5},
        "source": "made up",
    },
    None,
)
DEEPSEEK, LLAMA = load_model("deepseek-v3"), load_model("llama-3.1-8b")


def derived(hardware: Hardware = ROUND, **deployment: Any) -> Calibration:
    fields: dict[str, Any] = {"precision": "int8", "ffn_cards": 32} | deployment
    return derive(hardware, DEEPSEEK, Deployment(**fields))


EXPERT = 6 * 7168 * 2048
"""FLOPs of a row in one expert, about 8.81e7. A card has 8 experts, B_e = B_F · 8 · 2 / 256 = B_F/16."""
FULL = {"memory_efficiency": 1.0, "compute_efficiency": 1.0, "network_efficiency": 1.0}
OVERHEAD = {"overhead": {"attention": 1e-3, "ffn": 2e-3, "communication": 3e-3}}


@pytest.mark.parametrize(
    ("deployment", "line", "coefficient", "expected"),
    [
        ({}, "attention", "alpha", 1152 / 1e12),  # eq. 24 to 26: (512 + 64) · 2 bytes at 2 TB/s · 0.5
        ({"kv_bytes": 1.0}, "attention", "alpha", 576 / 1e12),
        ({}, "ffn", "alpha", 8 * EXPERT / 16 / 5e14),  # eq. 27 to 33
        ({"mtp_depth": 0}, "ffn", "alpha", 8 * EXPERT / 32 / 5e14),
        ({}, "communication", "alpha", 8 * 21504 / 16 / 25e9),  # eq. 34 to 38: 3 · 7168 bytes a row, between nodes
        ({"link": "intra_node"}, "communication", "alpha", 8 * 21504 / 16 / 200e9),
        ({"activation_bytes": 4.0}, "communication", "alpha", 8 * 28672 / 16 / 25e9),
        ({}, "attention", "beta", 187_105_280 / 1e12),  # weights are read, and overheads stated
        ({}, "ffn", "beta", 8 * 3 * 7168 * 2048 / 1e12),
        ({}, "communication", "beta", 1e-5),
        (OVERHEAD, "attention", "beta", 187_105_280 / 1e12 + 1e-3),
        (OVERHEAD, "ffn", "beta", 8 * 3 * 7168 * 2048 / 1e12 + 2e-3),
        (OVERHEAD, "communication", "beta", 3e-3),
        (FULL, "attention", "alpha", 1152 / 1e12 / 2),  # the deployment's efficiencies in place of the file's
        (FULL, "ffn", "alpha", 8 * EXPERT / 16 / 5e14 / 2),
        (FULL, "communication", "alpha", 8 * 21504 / 16 / 25e9 / 2),
        ({"precision": "bf16"}, "ffn", "alpha", 2 * 8 * EXPERT / 16 / 5e14),
        ({"precision": "bf16"}, "ffn", "beta", 2 * 8 * 3 * 7168 * 2048 / 1e12),
        ({"precision": "bf16"}, "attention", "beta", 2 * 187_105_280 / 1e12),
        ({"precision": "bf16"}, "attention", "alpha", 1152 / 1e12),
        # One more expert on each card, whose rows (2 a request) the 32 cards divide among themselves.
        ({"shared_experts": True}, "ffn", "alpha", (8 / 16 + 2 / 32) * EXPERT / 5e14),
        ({"shared_experts": True}, "ffn", "beta", 9 * 3 * 7168 * 2048 / 1e12),
    ],
)
def test_a_line_by_hand(deployment: dict[str, Any], line: str, coefficient: str, expected: float) -> None:
    assert getattr(getattr(derived(**deployment), line), coefficient) == pytest.approx(expected)


@pytest.mark.parametrize(("cards", "experts"), [(1, 256), (16, 16), (48, 6), (256, 1), (320, 1)])
def test_experts_lie_evenly_and_the_fullest_card_sets_the_pace(cards: int, experts: int) -> None:
    calibration = derived(ffn_cards=cards)
    assert calibration.ffn.alpha == pytest.approx(experts * EXPERT / 16 / 5e14)
    assert derived(ffn_cards=cards, experts_per_card=experts).ffn == calibration.ffn


def test_a_dense_model_by_hand() -> None:
    """Llama 3.1 8B, bf16, FFN on 2 cards: 6 · 4096 · 14336 FLOPs a row, 4096 bytes a cached token, no drafts."""
    calibration = derive(ROUND, LLAMA, Deployment(ffn_cards=2))
    assert calibration.attention.alpha == pytest.approx(4096 / 1e12)
    assert calibration.attention.beta == pytest.approx(2 * 4096 * (2 * 4096 + 2 * 1024) / 1e12)
    assert calibration.ffn.alpha == pytest.approx(6 * 4096 * 14336 / 2 / 2.5e14)
    assert calibration.ffn.beta == pytest.approx(2 * 3 * 4096 * 14336 / 2 / 1e12)
    assert calibration.communication.alpha == pytest.approx(3 * 4096 / 25e9)


def test_what_is_derived_describes_a_layer_and_says_that_it_is_derived() -> None:
    calibration = derived()
    assert (calibration.scope, calibration.layers, calibration.time_unit) == ("layer", 61, "seconds")
    assert calibration.provenance.method == "roofline"
    assert '"ffn_cards":32' in calibration.provenance.note
    assert calibration.attention.fit is None
    assert calibration.step_line("attention")[0] == pytest.approx(61 * 1152 / 1e12)


@pytest.mark.parametrize("model", builtin_names("models"))
def test_every_pair_of_builtin_files_gives_a_calibration(model: str) -> None:
    """Models with states or sparse attention are refused: their lines are not of tokens alone."""
    shapes = load_model(model)
    for hardware in map(load_hardware, builtin_names("hardware")):
        if shapes.linear_attention or shapes.indexer:
            with pytest.raises(BadInput, match=f"^model: got '{model}', expected a model of layers that are all alike"):
                derive(hardware, shapes, Deployment(ffn_cards=8))
            continue
        calibration = derive(hardware, shapes, Deployment(ffn_cards=8))
        for name in ("attention", "ffn", "communication"):
            alpha, beta = calibration.step_line(name)
            assert 0 < alpha < 1e-2, hardware.name
            assert 0 < beta < 10, hardware.name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"ffn_card": 2}, "calibration.deployment.ffn_card: unknown field, did you mean ffn_cards?"),
        ({"ffn_cards": 0}, "calibration.deployment.ffn_cards: got 0, expected a number above 0"),
        ({"mtp_depth": -1}, "calibration.deployment.mtp_depth: got -1, expected a number of at least 0"),
        ({"overhead": {"ffn": -1.0}}, "calibration.deployment.overhead.ffn: got -1.0, expected a number of at least 0"),
        ({"link": "usb"}, "calibration.deployment.link: got 'usb', expected 'intra_node' or 'inter_node'"),
        ({"precision": "fp7"}, "calibration.deployment.precision: got 'fp7', expected 'bf16', 'fp8', 'int8' or 'fp4'"),
        (
            {"memory_efficiency": 1.2},
            "calibration.deployment.memory_efficiency: got 1.2, expected a number of at most 1",
        ),
    ],
)
def test_a_deployment_that_cannot_be(section: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        read_deployment(section, "calibration.deployment")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("model", "deployment", "message"),
    [
        (
            DEEPSEEK,
            {"experts_per_card": 257},
            "experts_per_card: got 257, expected at most the experts there are (256)",
        ),
        (
            DEEPSEEK,
            {"experts_per_card": 7, "ffn_cards": 32},
            "experts_per_card: got 7, expected at least 8, since 32 cards hold 256 experts",
        ),
        (LLAMA, {"experts_per_card": 1}, "experts_per_card: got 1, expected none, since llama-3.1-8b has no experts"),
        (
            LLAMA,
            {"shared_experts": True},
            "shared_experts: got True, expected false, since llama-3.1-8b has no experts",
        ),
        (LLAMA, {"precision": "fp8"}, "precision: got 'fp8', expected one that round has: bf16, int8"),
    ],
)
def test_a_deployment_that_model_or_hardware_cannot_have(
    model: Model, deployment: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput) as error:
        derive(ROUND, model, Deployment(**deployment))
    assert str(error.value) == message
    with pytest.raises(BadInput) as error:
        derive(ROUND, model, Deployment(**deployment), "calibration.deployment")
    assert str(error.value) == f"calibration.deployment.{message}"


def test_experts_on_a_card_may_be_told_without_the_cards() -> None:
    """Eq. 33 has N_expert/card alone."""
    separate = derive(ROUND, DEEPSEEK, Deployment(experts_per_card=8, precision="int8"))
    assert separate.ffn == derived().ffn


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
