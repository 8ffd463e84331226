"""One scenario file describes one engine: the live server and the simulator build the same scheduler from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.engine import Engine
from live.loaded_model import ModelSource
from live.server import launcher
from live.server.loading import engine_of_plan
from live.validation.backend import materialise
from scenarios.validation import single_engine
from tests.parity.live_and_twin import BLOCK
from tests.twin.serving.scenarios import scenario
from twin.cli import run
from twin.serving.plan.plan import ServingPlan
from twin.sweeps.serving_sweep import prepare
from workloads.request import Request

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip

TABLE = {"tokens": [1, 16, 64], "seconds": [0.001, 0.002, 0.006]}

ENGINES: dict[str, dict[str, Any]] = {
    "defaults": {"num_gpu_blocks": 400},
    "preemption": {"num_gpu_blocks": 20, "block_size": BLOCK, "max_num_seqs": 8, "kv_reservation": "prompt"},
    "static chunks": {
        "num_gpu_blocks": 60, "block_size": BLOCK, "max_num_seqs": 4, "scheduling_policy": "shortest_prompt",
        "chunking": {"policy": "static", "tokens": 6, "exclude_decodes": True},
    },
    "chunks within a latency": {
        "num_gpu_blocks": 60, "block_size": BLOCK, "max_num_seqs": 4, "enable_prefix_caching": False,
        "chunking": {"policy": "slo", "slo_seconds": 0.003, "min_tokens": 2, "max_tokens": 32, **TABLE},
    },
    "chunks within a predicted latency": {
        "num_gpu_blocks": 60, "block_size": BLOCK, "max_num_seqs": 4,
        "chunking": {"policy": "slo", "slo_seconds": 0.0044, "min_tokens": 2, "max_tokens": 32},
    },
    "one-shot, shared when computed": {
        "num_gpu_blocks": 60, "block_size": BLOCK, "max_num_seqs": 4, "cache_blocks_on": "computed",
        "in_batch_prefix_caching": True, "one_shot": {"tokens": 32, "sequences": 4},
    },
    "a step ahead, blocks from memory": {
        "kv_memory": {"memory": 2e10, "model": "llama-3.1-8b", "gpu_memory_utilization": 0.81}, "block_size": BLOCK,
        "max_num_seqs": 8, "async_scheduling": True,
    },
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    document = scenario() | {"engine": {"max_num_seqs": 16, **ENGINES[request.param]}}
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def simulated(file: Path) -> ServingPlan:
    return prepare(yaml.safe_load(file.read_text()), file).cases[0].plan


def served(file: Path) -> Engine:
    model = ModelSource(file.parent / "config.json", True, "float32", "cpu", 1)
    return engine_of_plan(model, single_engine(yaml.safe_load(file.read_text()), {}, file)).engine


@pytest.mark.parametrize("file", ENGINES, indirect=True)
def test_settings_and_chunk_policy_are_the_same(file: Path) -> None:
    plan, engine = simulated(file), served(file)
    core = plan.scheduler.make_core()
    assert engine.core.config == core.config == plan.scheduler.config
    assert type(engine.core.chunk_policy) is type(core.chunk_policy)
    if engine.core.chunk_policy is not None and core.chunk_policy is not None:
        served_chunks, chunks = engine.core.chunk_policy, core.chunk_policy
        assert [served_chunks.max_prefill_tokens(decodes) for decodes in range(300)] == [
            chunks.max_prefill_tokens(decodes) for decodes in range(300)
        ]
    assert engine._depth == plan.scheduler.depth == (2 if plan.scenario.engine.async_scheduling else 1)


@pytest.mark.parametrize("file", ["static chunks"], indirect=True)
def test_the_command_serves_the_engine_of_the_scenario(file: Path, monkeypatch: pytest.MonkeyPatch, refusal) -> None:
    engines: list[Engine] = []
    monkeypatch.setattr(launcher, "run", lambda backend, *rest, **options: engines.append(backend.engine) or 0)
    command = ["serve-live", "--model", str(file.parent / "config.json"), "--random-weights", "--scenario", str(file)]
    assert run([*command, "--set", "engine.max_num_seqs=3"]) == 0
    (engine,) = engines
    assert engine.core.config.max_num_seqs == 3
    assert engine.core.config.scheduling_policy == "shortest_prompt"
    for flags, message in (
        (["--max-num-seqs", "4"], "--max-num-seqs: got 4, expected none beside --scenario"),
        (["--no-one-shot"], "--one-shot: got False, expected none beside --scenario"),
        (["--set", "engine.data_parallel_size=2"], "engine.data_parallel_size: got 2, expected 1"),
    ):
        assert message in refusal(*command, *flags)
    assert "--set: got 'engine.block_size=8', expected it beside --scenario" in refusal(
        *command[:4], "--set", "engine.block_size=8"
    )


def test_prompts_share_what_their_prefix_ids_say() -> None:
    """An id may stand for several blocks, and the scheduler counts in ids."""
    prompts = [Request(i, 0.0, 20, 4, prefix_blocks=ids) for i, ids in enumerate([(1, 2), (1, 3)])]
    first, second = (materialise(prompt, 4, 50, 2 * BLOCK).request.prefix_blocks for prompt in prompts)
    assert len(first) == len(second) == 2
    assert first[0] == second[0]
    assert first[1] != second[1]
