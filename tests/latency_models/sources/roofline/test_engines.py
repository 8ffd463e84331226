"""Engines for a planner: memory counted by hand, sections that build, and reasons for those that do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.config_io import checked
from latency_models.io.files import builtin_names
from latency_models.sources.roofline.efficiency import BLOCK_SIZE, EngineOption, NoEngine, engine_option, placements
from latency_models.sources.roofline.placement import RESERVED, Placement, device_memory
from latency_models.sources.roofline.spec import Cell, RooflineSpec, board_cell, built_in_board
from workloads.errors import BadInput


def test_the_cache_fills_what_weights_leave() -> None:
    """Llama-3.1-70B in bf16 on four H200: 141.1 GB of weights, a quarter on each; 80 kB a token on each."""
    model, hardware = load_model("llama-3.1-70b"), load_hardware("h200-sxm")
    memory = device_memory(model, hardware, Placement(tensor_parallel=4))
    assert memory.weights == pytest.approx(model.parameters * 2 / 4, rel=1e-3)  # norms are on each
    assert memory.kv_bytes_per_token == 2 * 2 * 128 * 80 * 2
    expected = 0.9 * 141 * 2**30 - memory.weights - RESERVED
    assert memory.kv_tokens == pytest.approx(expected / memory.kv_bytes_per_token)


def test_latent_attention_caches_one_vector_on_every_device() -> None:
    model, hardware = load_model("deepseek-v3"), load_hardware("h200-sxm")
    for width in (1, 8):
        placement = Placement(tensor_parallel=width, weights="fp8", experts="fp8")
        assert device_memory(model, hardware, placement).kv_bytes_per_token == (512 + 64) * 61 * 2


def test_weights_of_all_devices_are_the_models() -> None:
    """Tensor and expert parallelism together hold every weight once, but for what each device repeats."""
    model, hardware = load_model("qwen3-235b-a22b"), load_hardware("h200-sxm")
    spread = device_memory(model, hardware, Placement(tensor_parallel=8))
    assert 8 * spread.weights == pytest.approx(2 * model.parameters, rel=0.02)
    replicas = device_memory(model, hardware, Placement(data_parallel=8, expert_parallel=True))
    assert replicas.weights > spread.weights  # attention is on each


def test_windows_keep_little_of_a_sequence() -> None:
    model, hardware = load_model("gpt-oss-120b"), load_hardware("h100-sxm")
    smaller, larger = (device_memory(model, hardware, Placement(experts="mxfp4"), max_num_seqs=n) for n in (1, 257))
    assert smaller.kv_bytes_per_token == 2 * 8 * 64 * 2 * 18
    assert smaller.free - larger.free == 256 * 128 * 2 * 8 * 64 * 2 * 18


def test_an_option_builds_and_has_blocks() -> None:
    option = engine_option("llama-3.1-70b", "h200-sxm", Placement(tensor_parallel=4, weights="fp8", experts="fp8"))
    assert isinstance(option, EngineOption)
    assert option.devices == 4
    assert option.step_time == {
        "source": "roofline", "model": "llama-3.1-70b", "hardware": "h200-sxm", "tensor_parallel": 4, "weights": "fp8",
    }  # fmt: skip
    assert option.engine() == {"num_gpu_blocks": option.num_gpu_blocks, "block_size": BLOCK_SIZE}
    assert option.num_gpu_blocks == int(option.memory.kv_tokens) // BLOCK_SIZE
    result = checked(RooflineSpec, option.step_time, None).build(Path())
    assert result.kv_tokens(0.9, 256) == pytest.approx(option.memory.kv_tokens)


@pytest.mark.parametrize(
    ("model", "hardware", "placement", "reason"),
    [
        (
            "llama-3.1-70b",
            "h200-sxm",
            Placement(),
            "llama-3.1-70b in bf16 (2 bytes a weight) puts 141.1 GB on each of 1",
        ),
        ("llama-3.1-70b", "h200-sxm", Placement(tensor_parallel=6), "tensor_parallel 6: expected a divisor of the 64"),
        ("llama-3.1-8b", "a100-sxm-80gb", Placement(weights="fp8"), "weights fp8: expected one that a100-sxm-80gb"),
    ],
)
def test_an_engine_that_cannot_be_had_has_a_reason(
    model: str, hardware: str, placement: Placement, reason: str
) -> None:
    option = engine_option(model, hardware, placement)
    assert isinstance(option, NoEngine)
    assert option.reason.startswith(reason)
    assert option.fits == ("GB on each" not in reason)


def test_a_cache_too_small_for_the_longest_request_is_no_engine() -> None:
    placement = Placement(weights="fp8", experts="fp8")
    assert isinstance(engine_option("llama-3.1-70b", "h100-sxm", placement, max_model_len=4096), EngineOption)
    option = engine_option("llama-3.1-70b", "h100-sxm", placement, max_model_len=131072)
    assert isinstance(option, NoEngine)
    assert "a request has up to 131,072" in option.reason


def test_placements_are_powers_of_two_and_experts_are_also_spread() -> None:
    dense = placements("llama-3.1-70b")
    assert [placement.tensor_parallel for placement in dense] == [1, 2, 4, 8]
    sparse = [(item.tensor_parallel, item.data_parallel) for item in placements("qwen3-30b-a3b", most_devices=4)]
    assert sparse == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    assert {(item.weights, item.experts) for item in placements("gpt-oss-120b")} == {("bf16", "mxfp4")}
    assert {(item.weights, item.experts) for item in placements("deepseek-v3")} == {("fp8", "fp8")}
    assert {item.weights for item in placements("deepseek-v3", weights="bf16")} == {"bf16"}
    assert {item.devices for item in placements("llama-3.1-70b", pipelines=True)} == {1, 2, 4, 8}


def test_an_unknown_name_is_no_option_but_an_error() -> None:
    with pytest.raises(BadInput, match="hardware: got 'h300'"):
        engine_option("llama-3.1-8b", "h300", Placement())


FP8 = Placement(tensor_parallel=4, weights="fp8", experts="fp8")


def test_cells_are_of_built_in_models_and_devices() -> None:
    for cell in built_in_board().cells:
        assert cell.hardware in builtin_names("hardware")
        assert cell.model in ("", *builtin_names("models"))
        assert cell.median <= cell.p90


def test_the_most_alike_rows_answer() -> None:
    own = board_cell(load_model("minimax-m2.5"), "h200-sxm", FP8)
    assert (own.model, own.engine) == ("minimax-m2.5", "vllm")
    like = board_cell(load_model("qwen3-30b-a3b"), "h200-sxm", FP8)
    assert (like.model, like.family) == ("", "experts")
    assert board_cell(load_model("qwen3-30b-a3b"), "l40s", FP8) is None
    assert board_cell(load_model("minimax-m2.5"), "h200-sxm", replace(FP8, experts="int8")) is None


def test_a_sentence_says_error_rows_and_bias() -> None:
    numbers = {"rows": 54, "bias": -0.2, "median": 0.08, "p90": 0.3, "spread": 0.1}
    cell = Cell.model_validate({"family": "dense", "model": "a", "hardware": "b", "precision": "fp8", **numbers})
    off = "were 8 % off in the median of TPOT (54 rows, 20 % too fast on the whole)"
    assert cell.sentence() == f"measured rows like this one (a in fp8 on b) {off}"
