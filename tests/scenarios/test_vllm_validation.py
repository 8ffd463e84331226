"""A validation of vLLM: settings that it does not have are refused, and the prediction knows nothing of the backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latency_models.io.config_io import read_yaml
from scenarios.validation import check_validation
from workloads.errors import BadInput

FILE = Path(__file__).resolve().parents[2] / "examples" / "validate-vllm-cpu.yaml"


@pytest.mark.parametrize(
    ("settings", "device", "field"),
    [
        ({"engine.scheduling_policy": "fair"}, "cpu", "engine.scheduling_policy"),
        ({"engine.max_table_blocks": 9}, "cpu", "engine.max_table_blocks"),
        ({"engine.kv_reservation": "max_tokens"}, "cpu", "engine.kv_reservation"),
        ({"model.quantise": {}}, "cpu", "model.quantise"),
        ({"model.threads": 2, "clock": "direct"}, "cpu", "clock"),
        ({"clock": "wall", "engine.chunking": {"policy": "static", "tokens": 9}}, "cpu", "engine.chunking"),
        ({"engine.backend": "sglang"}, "cpu", "engine.backend"),
    ],
)
def test_what_vllm_cannot_run_is_refused(settings: dict[str, Any], device: Any, field: str) -> None:
    with pytest.raises(BadInput) as error:
        check_validation(read_yaml(FILE), settings, FILE).on_device(device)
    assert field in str(error.value)


def test_the_prediction_is_of_the_same_engine() -> None:
    scenario = check_validation(read_yaml(FILE), {}, FILE).on_device("cpu")
    assert scenario.clock == "direct"
    engine = scenario.serving(Path("steps.yaml"), 1.0, {})["engine"]
    assert "backend" not in engine
    assert engine["block_size"] == 32


def test_a_gpu_takes_the_wall_clock_and_ways_to_the_server_are_predicted() -> None:
    scenario = check_validation(read_yaml(FILE), {}, FILE).on_device("cuda")
    assert scenario.clock == "wall"
    assert scenario.serving(Path("steps.yaml"), 1.0, {"route": 0.003})["system"]["frontend"] == {"route": 0.003}
