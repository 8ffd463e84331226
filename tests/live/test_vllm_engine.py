"""vLLM itself, in this process, with the scheduler classes of `live.vllm`. Skipped where it is not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from live.vllm.settings import prepare_process

prepare_process()
pytest.importorskip("vllm", reason="needs the extra [vllm]")

from live.vllm.backend import VllmBackend  # noqa: E402
from scenarios.validation import check_validation  # noqa: E402
from schedulers.batches import Batch  # noqa: E402
from twin.sweeps.serving_sweep import prepare  # noqa: E402
from twin.validation.run import requests_of  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCENARIO = {
    "schema": "twin.scenario/1", "kind": "validation", "name": "vllm",
    "model": {"path": "models/tiny-llama.json", "weights": "random"},
    "workload": {
        "requests": 12, "prefill": {"distribution": "fixed", "mean": 100},
        "decode": {"distribution": "fixed", "mean": 8},
        "arrivals": {"process": "poisson"},
    },
    "engine": {
        "backend": "vllm", "block_size": 32, "num_gpu_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 128,
        "chunking": {"policy": "static", "tokens": 40, "exclude_decodes": True},
    },
    "loads": [0.5], "profiling": {"max_prompt_tokens": 50, "max_output_tokens": 20, "rounds": 10, "in_turns": True},
}  # fmt: skip
STEPS = {"source": "linear", "overhead": 0.001, "per_token": 1e-5}


@pytest.fixture(scope="module")
def replayed() -> tuple[list[Batch], dict[str, np.ndarray], int]:
    """Batches, columns and rounds of a profile in turns, of a replay."""
    file = EXAMPLES / "vllm.yaml"
    scenario = check_validation(SCENARIO, {}, file).on_device("cpu")
    plan = prepare(scenario.serving_without_times() | {"step_time": STEPS}, file).cases[0].plan
    scheduler = scenario.engine.build(file.parent)
    run = VllmBackend(scenario, file.parent).replay(scheduler, requests_of(plan, 0))
    return [batch for batch, _, _ in run.spans], run.requests, len(run.profiled.rounds)


def test_every_request_is_answered(replayed: tuple[list[Batch], dict[str, np.ndarray], int]) -> None:
    _, columns, _ = replayed
    assert columns["output_tokens"].tolist() == [8.0] * 12
    assert (columns["first_token"] > columns["arrival"]).all()
    assert (columns["last_token"] > columns["first_token"]).all()


def test_batches_add_up_and_keep_to_the_policy(replayed: tuple[list[Batch], dict[str, np.ndarray], int]) -> None:
    batches, _, _ = replayed
    assert sum(batch.prefill_tokens for batch in batches) == 1200
    assert sum(batch.n_decodes for batch in batches) == 12 * 7
    assert max(batch.prefill_tokens for batch in batches) == 40
    assert max(batch.n_decodes for batch in batches) <= 4
