"""Settings of an engine: defaults are vLLM's, and the least that is allowed is allowed."""

from __future__ import annotations

from schedulers.engine_config import EngineConfig, OneShotBudget


def test_the_least_that_is_allowed() -> None:
    config = EngineConfig(1, block_size=1, max_num_batched_tokens=1, max_num_seqs=1, prefix_id_tokens=1)
    assert config.num_gpu_blocks == 1
    assert EngineConfig(1, max_num_batched_tokens=128, max_num_seqs=128).max_num_seqs == 128
    assert OneShotBudget(tokens=1, sequences=1, activation_bytes=3.5, bytes_per_token=3.5).max_step_tokens() == 1


def test_memory_limits_one_shot_tokens() -> None:
    assert OneShotBudget(tokens=100, activation_bytes=350, bytes_per_token=10).max_step_tokens() == 35
    assert OneShotBudget(tokens=20, activation_bytes=350, bytes_per_token=10).max_step_tokens() == 20
    assert OneShotBudget(tokens=20, activation_bytes=5).max_step_tokens() == 20
