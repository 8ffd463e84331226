"""The validation scenarios in examples/ are whole, and what they ask of a GPU fits into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.strict import checked, read_yaml
from twin.scenarios.serving import EngineSpec
from twin.scenarios.validation import check_validation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
H200 = 139 * 2**30


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("validate-*.yaml")), ids=lambda file: file.stem)
def test_it_is_whole_and_fits(file: Path) -> None:
    pytest.importorskip("torch", reason="the live plant needs the extra [live]")
    from live.models.config import read_config

    scenario = check_validation(read_yaml(file), {}, file)
    assert scenario.name == file.stem
    engine = checked(EngineSpec, scenario.engine, file, "engine").build(file.parent, None)
    config = read_config(EXAMPLES / scenario.model.path)
    shape = config.shape
    assert scenario.probe.prompt + scenario.probe.answer <= config.positions
    block = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * engine.block_tokens
    linear = shape.layers * sum(outputs * inputs for outputs, inputs in shape.linear().values())
    weights = 2 * (linear + 2 * shape.vocabulary * shape.hidden)
    assert engine.kv_blocks * block + weights < 0.85 * H200
    # A probe and the workload's mean lengths leave room for many at once.
    assert engine.kv_blocks * engine.block_tokens > 4 * (scenario.probe.prompt + scenario.probe.answer)
