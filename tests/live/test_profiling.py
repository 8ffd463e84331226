"""Sizes of profiling rounds."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from live.clock import DirectClock
from live.loaded_model import ModelSource
from live.validation.backend import LiveBackend
from live.validation.profiling import EngineProfile, ProfilingLimits, sequences_left, stratified_sizes
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from tests.live.tiny_validation import write_validation


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2]), st.integers(0, 2**32))
def test_sizes_are_spread_over_the_whole_range(rounds: int, largest: int, power: int, seed: int) -> None:
    """One in each of as many equal parts of the roots' range: no seed leaves a part out."""
    sizes = stratified_sizes(np.random.default_rng(seed), rounds, largest, power)
    assert len(sizes) == rounds
    assert min(sizes) >= 1
    assert max(sizes) <= largest
    for i, size in enumerate(sorted(sizes)):
        assert largest * (i / rounds) ** power - 1 <= size <= largest * ((i + 1) / rounds) ** power + 1


@given(st.integers(1, 300), st.integers(2, 200))
def test_all_stay_for_half_a_round_and_leave_evenly_until_one_is_left(num_seqs: int, steps: int) -> None:
    counts = [sequences_left(num_seqs, i, steps) for i in range(steps + 1)]
    assert counts[: steps // 2 + 1] == [num_seqs] * (steps // 2 + 1)
    assert counts[-1] == 1
    falls = [before - after for before, after in itertools.pairwise(counts)]
    assert min(falls) >= 0
    assert max(falls) <= math.ceil(2 * num_seqs / steps) + 1


@pytest.mark.parametrize("resent", [0.0, 0.5])
def test_prompts_begin_as_earlier_ones_where_that_is_asked_for(resent: float, tmp_path: Path) -> None:
    """Then some prompts find blocks in the cache, and no prompt is longer than the limit by more than a token."""
    config = write_validation(tmp_path, "").with_name("config.json")
    source = ModelSource(config, random=True, dtype="float32", device="cpu", threads=1)
    backend = LiveBackend(source, clock="direct")
    engine = backend.engine(EngineConfig(num_gpu_blocks=400, block_size=4, prefix_id_tokens=4, max_num_seqs=4))
    chunks: list[tuple[int, int]] = []
    schedule = engine.schedule

    def watched(begin: float) -> Batch | None:
        batch = schedule(begin)
        chunks.extend((chunk.context, chunk.tokens) for chunk in (batch.chunks if batch is not None else ()))
        return batch

    engine.schedule = watched  # type: ignore[method-assign]
    EngineProfile(engine, ProfilingLimits(40, 8, 4, 10, 20, resent), backend.vocabulary, 3, DirectClock()).run()
    assert any(context for context, _ in chunks) is (resent > 0)
    assert max(context + tokens for context, tokens in chunks) <= 41
