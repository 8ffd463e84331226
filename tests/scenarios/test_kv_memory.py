"""KV blocks where the scenario does not count them: from the step times' model and device, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from latency_models.io.config_io import checked
from latency_models.sources.registry import find_source
from latency_models.sources.roofline.efficiency import EngineOption, engine_option
from latency_models.sources.roofline.placement import Placement, device_memory
from scenarios.engine import EngineSpec
from workloads.errors import BadInput

ROOFLINE = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h100-sxm"}
LINEAR = {"source": "linear", "overhead": 0.01}


def blocks(engine: dict[str, Any], step_time: dict[str, Any]) -> int:
    model = checked(find_source(step_time["source"]), step_time, None).build(Path())
    return checked(EngineSpec, engine, None).build(Path(), step_time=model).config.num_gpu_blocks


def test_a_roofline_counts_the_blocks_of_its_device() -> None:
    option = engine_option("llama-3.1-8b", "h100-sxm", Placement(), max_num_seqs=128)
    assert isinstance(option, EngineOption)
    assert blocks({}, ROOFLINE) == option.num_gpu_blocks
    half = blocks({"kv_memory": {"gpu_memory_utilization": 0.45}}, ROOFLINE)
    assert half < option.num_gpu_blocks / 2  # weights take the same
    assert blocks({"block_size": 32}, ROOFLINE) == option.num_gpu_blocks // 2


def test_what_the_scenario_states_goes_first() -> None:
    assert blocks({"num_gpu_blocks": 7}, ROOFLINE) == 7
    assert not EngineSpec(num_gpu_blocks=7).needs_step_time
    assert EngineSpec().needs_step_time


@pytest.mark.parametrize(
    ("engine", "step_time", "message"),
    [
        ({}, LINEAR, "engine: expected either num_gpu_blocks or kv_memory"),
        ({"kv_memory": {}}, LINEAR, "engine: expected either num_gpu_blocks or kv_memory"),
        ({"num_gpu_blocks": 7, "kv_memory": {}}, ROOFLINE, "expected either num_gpu_blocks or kv_memory"),
        ({"kv_memory": {"memory": 8e10}}, ROOFLINE, "kv_memory: expected both memory and model, or neither"),
        ({}, ROOFLINE | {"model": "llama-3.1-70b"}, "step_time: expected a deployment whose weights leave room"),
    ],
)
def test_memory_that_nobody_states_is_refused(engine: dict[str, Any], step_time: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        blocks(engine, step_time)
    assert message in str(error.value)


def test_weights_in_a_stated_memory_take_the_bytes_that_are_published() -> None:
    """gpt-oss-120b takes 65.2 GB of the 72 GB that may be used; in 16 bits it would take 234."""
    memory = {"memory": 8e10, "model": "gpt-oss-120b"}
    num_blocks = (0.9 * 8e10 - 65.17e9) / (2 * 8 * 64 * 2.0 * 36 * 16)
    assert blocks({"kv_memory": memory}, LINEAR) == pytest.approx(num_blocks, rel=1e-3)
    with pytest.raises(BadInput, match=r"kv_memory.memory: .*expected more than weights and activations take"):
        blocks({"kv_memory": memory | {"weight_bytes": 2.0}}, LINEAR)


@pytest.mark.parametrize("stated", [False, True])
def test_states_of_sequences_have_slots_beside_the_blocks(stated: bool) -> None:
    """Each further sequence of Qwen3.5-397B takes a state of 192 MB over 8 devices, at 15 layers' KV bytes a block."""
    model = load_model("qwen3.5-397b-a17b")
    hybrid = {"source": "roofline", "model": model.name, "hardware": "b300-sxm", "tensor_parallel": 8}
    memory = {"memory": 2.8e11, "model": model.name, "tensor_parallel_size": 8}
    few, many = (
        blocks({"max_num_seqs": count} | ({"kv_memory": memory} if stated else {}), LINEAR if stated else hybrid)
        for count in (16, 256)
    )
    # Two KV heads: the roofline keeps one on each of eight devices; a stated memory divides them.
    token = 15 * 2 * 256 * 2 * (2 / 8 if stated else 1)
    assert few - many == pytest.approx(240 * model.state_bytes_per_sequence / 8 / (16 * token), abs=1)


def test_an_mtp_module_has_weights_and_a_cache() -> None:
    """DeepSeek-V3's, by hand, on one of eight B300: a layer of attention and experts, a matrix, and 576 elements."""
    split = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168  # of attention; both compressions are whole
    linear = 7168 * (1536 + 576) + (split + 3 * 7168 * 2048) / 8 + 256 * 3 * 7168 * 2048 / 8  # FP8
    small = 1536 + 512 + 2 * 7168 + 256 * 7168 + 2 * 7168**2 + 2 * 7168  # norms, router, joining matrix: bf16
    section = {"source": "roofline", "model": "deepseek-v3", "hardware": "b300-sxm", "tensor_parallel": 8}
    drafts = {"num_speculative_tokens": 1, "acceptance": 0.8}
    model = load_model("deepseek-v3")
    before = device_memory(model, load_hardware("b300-sxm"), Placement(8, weights="fp8", experts="fp8"))
    expected = (before.free - linear - 2 * small) / (62 * 576 * 2)
    assert blocks({"speculative_config": {"method": "mtp", **drafts}}, section) == expected // 16
    assert blocks({"speculative_config": {"method": "draft_model", **drafts}}, section) == before.kv_tokens // 16
    whole = model.with_mtp().parameters + model.mtp_weights - model.parameters
    assert whole == pytest.approx(684_531_386_000 - 671_026_404_352 - 2 * 129280 * 7168, rel=4e-3)  # as published
    with pytest.raises(BadInput, match="MTP modules"):
        blocks({"speculative_config": {"method": "mtp", **drafts}}, ROOFLINE)


@pytest.mark.parametrize("name", ["glm-5", "qwen3.5-397b-a17b", "nemotron-3-super-120b-a12b"])
def test_mtp_layers_attend_to_every_token(name: str) -> None:
    model = load_model(name)
    speculating = model.with_mtp()
    assert speculating.attention_layers == model.attention_layers + model.mtp_depth
    assert speculating.expert_layers == model.expert_layers + model.mtp_depth
    assert speculating.linear_layers == model.linear_layers
