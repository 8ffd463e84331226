"""The validation scenarios in examples/ are complete, and fit into the memory of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.io.config_io import read_yaml
from scenarios.validation import check_bundle_validation, check_validation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
H200 = 139 * 2**30


BUNDLES = [EXAMPLES / "validate-afd-cpu.yaml"]


@pytest.mark.parametrize("file", BUNDLES, ids=lambda file: file.stem)
def test_a_bundle_is_whole(file: Path) -> None:
    pytest.importorskip("torch", reason="the live engine needs the extra [live]")
    from live.models.config import read_config

    scenario = check_bundle_validation(read_yaml(file), {}, file)
    assert scenario.name == file.stem
    assert [str(topology) for topology in scenario.topologies] == [f"{r}A-1F" for r in range(1, 9)]
    longest = scenario.profiling.max_prompt_tokens + scenario.profiling.max_output_tokens
    assert longest <= read_config(EXAMPLES / scenario.model.path).max_position_embeddings


@pytest.mark.parametrize("file", sorted({*EXAMPLES.glob("validate-*.yaml")} - {*BUNDLES}), ids=lambda file: file.stem)
def test_it_is_whole_and_fits(file: Path) -> None:
    pytest.importorskip("torch", reason="the live engine needs the extra [live]")
    from live.models.config import read_config

    scenario = check_validation(read_yaml(file), {}, file)
    assert scenario.name == file.stem
    engine = scenario.engine.model_copy(update={"chunking": None}).build(file.parent).config
    config = read_config(EXAMPLES / scenario.model.path)
    shape = config.shape
    longest = scenario.profiling.max_prompt_tokens + scenario.profiling.max_output_tokens
    assert longest <= config.max_position_embeddings
    block = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * engine.block_size
    linear = shape.layers * sum(outputs * inputs for outputs, inputs in shape.linear().values())
    weights = 2 * (linear + 2 * shape.vocabulary * shape.hidden)
    assert engine.num_gpu_blocks * block + weights < 0.85 * H200
    # Several of the longest profiled requests fit at once.
    assert engine.num_gpu_blocks * engine.block_size > 4 * longest
