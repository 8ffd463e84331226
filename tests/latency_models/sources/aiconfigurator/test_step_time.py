"""A step's time from a model's kernels."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import cast

import pytest

from latency_models.deployment.models import load_model
from latency_models.interpolation import Curve, Surface
from latency_models.sources.aiconfigurator.kernels import ModelKernels, Placement, compose
from latency_models.sources.aiconfigurator.spec import AiconfiguratorStepTime, Corrections
from latency_models.sources.aiconfigurator.tables import read_tables
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence
from workloads.request import Request

ROWS = Curve([(1, 10.0), (1000, 1009.0)])  # 9 + rows
HEAD = Curve([(1, 0.5), (100, 50.0)])  # rows / 2
CONTEXT = Curve([(10, 2.0), (1010, 102.0)])  # 1 + tokens / 10, at least 2
GENERATION = Surface({count: Curve([(1, count * 1e-3), (1000, count * 1.0)]) for count in (1, 100)})
KERNELS = ModelKernels(2, ROWS, HEAD, CONTEXT, GENERATION)


def batch(decodes: int = 0, kv: int = 0, chunks: Many[tuple[int, int, bool]] = ()) -> Batch:
    sequence, running = Sequence(Request(0, 0.0, 1, 1), 0, False), cast("Many[Sequence]", range(decodes))
    pieces = [Chunk(sequence, tokens, context, last) for tokens, context, last in chunks]
    return MixedBatch(pieces, running, kv, kv) if pieces else DecodeBatch((), running, kv, kv)


def step(**corrections: float) -> AiconfiguratorStepTime:
    return AiconfiguratorStepTime(KERNELS, Corrections(**corrections))


def test_decodes_pay_for_rows_head_and_attention_at_their_mean_context() -> None:
    assert step().seconds(batch(4, 2000)) == pytest.approx(13 + 2 + 4 * 0.5)


def test_prompts_pay_for_their_rows_attention_and_first_token() -> None:
    assert step().seconds(batch(chunks=[(110, 0, True)])) == pytest.approx(9 + 110 + 0.5 + 12)
    assert step().seconds(batch(chunks=[(110, 0, False)])) == pytest.approx(9 + 110 + 12)


def test_a_later_chunk_takes_what_all_of_it_takes_more_than_its_start() -> None:
    assert step().seconds(batch(chunks=[(100, 400, False)])) == pytest.approx(9 + 100 + 2 + 10)


def test_prompts_together_are_launched_once() -> None:
    two = [(110, 0, False), (210, 0, False)]
    assert step().seconds(batch(chunks=two)) == pytest.approx(9 + 320 + (2 + 10 + 20))


def test_a_mixed_step_is_its_decodes_and_what_prompts_add() -> None:
    separate = step().seconds(batch(4, 2000))
    assert step().seconds(batch(4, 2000, [(110, 0, True)])) - separate == pytest.approx(110 + 0.5 + 12)


def test_corrections_apply_to_what_they_name() -> None:
    corrected = step(decode=2.0, prefill=3.0, prompt_step=5.0, per_sequence=0.25)
    assert corrected.seconds(batch(4, 2000)) == pytest.approx(2 * 17 + 1)
    assert corrected.seconds(batch(4, 2000, [(110, 0, True)])) == pytest.approx(35 + 3 * 122.5 + 5)


def test_no_decode_reads_its_cache_faster_than_the_memory() -> None:
    bounded = AiconfiguratorStepTime(ModelKernels(2, ROWS, HEAD, CONTEXT, GENERATION, kv_token=0.01))
    assert bounded.seconds(batch(4, 2000)) == pytest.approx(13 + 2 + 20)


def test_a_published_engine_is_within_what_such_hardware_does(aiconfigurator_tables: Path) -> None:
    """Qwen3-32B in 16 bits on two H100s: no faster than its weights are read, and not twice as slow."""
    placement = Placement(tensor_parallel=2)
    kernels = compose(read_tables(aiconfigurator_tables / "h100_sxm_vllm_0.12.0"), load_model("qwen3-32b"), placement)
    floor = 32.8e9 * 2 / 2 / 3.35e12
    assert floor < AiconfiguratorStepTime(kernels).seconds(batch(8, 8 * 1000)) < 2 * floor
