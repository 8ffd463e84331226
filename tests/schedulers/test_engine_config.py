"""Settings of an engine: defaults are vLLM's, and the least that is allowed is allowed."""

from __future__ import annotations

from schedulers.engine_config import EngineConfig, OneShotBudget


def test_defaults() -> None:
    config = EngineConfig(num_gpu_blocks=9)
    assert (config.block_size, config.max_num_batched_tokens, config.max_num_seqs) == (16, 2048, 128)
    assert (config.max_table_blocks, config.prefix_id_tokens) == (0, 16)
    assert (config.enable_prefix_caching, config.in_batch_prefix_caching, config.one_shot) == (True, False, None)
    assert (config.cache_blocks_on, config.scheduling_policy, config.kv_reservation) == ("scheduled", "fcfs", "chunk")
    budget = OneShotBudget()
    assert (budget.tokens, budget.sequences, budget.max_step_tokens()) == (8192, 256, 8192)


def test_the_least_that_is_allowed() -> None:
    config = EngineConfig(1, block_size=1, max_num_batched_tokens=1, max_num_seqs=1, prefix_id_tokens=1)
    assert config.num_gpu_blocks == 1
    assert EngineConfig(1, max_num_batched_tokens=128, max_num_seqs=128).max_num_seqs == 128
    assert OneShotBudget(tokens=1, sequences=1, activation_bytes=3.5, bytes_per_token=3.5).max_step_tokens() == 1


def test_memory_limits_one_shot_tokens() -> None:
    assert OneShotBudget(tokens=100, activation_bytes=350, bytes_per_token=10).max_step_tokens() == 35
    assert OneShotBudget(tokens=20, activation_bytes=350, bytes_per_token=10).max_step_tokens() == 20
    assert OneShotBudget(tokens=20, activation_bytes=5).max_step_tokens() == 20
