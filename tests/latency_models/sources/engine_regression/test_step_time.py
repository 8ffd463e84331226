"""Step times learnt from timed steps: knees found, nothing below zero, and files that bring the same model back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from latency_models.fitting.estimator import CannotFit, NotFitted
from latency_models.fitting.linear import BrokenLine
from latency_models.io.config_io import write_yaml
from latency_models.sources.engine_regression import (
    EngineRegression,
    Step,
    describe,
    read_engine_regression,
    read_engine_regression_file,
)
from schedulers.batches import Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence
from workloads.errors import BadInput
from workloads.request import Request

PROVENANCE = {"method": "measured", "source": "a test", "device": "none", "model": "none"}


def truth(step: Step) -> float:
    """A knee at 100 rows, and attention that costs by its products."""
    knee = 2e-5 * min(step.rows, 100) + 8e-5 * max(step.rows - 100, 0)
    return 1e-3 + knee + 3e-7 * step.decode_attention + 2e-8 * step.chunk_attention + 4e-5 * step.chunks


def random_steps(count: int, seed: int, noise: float) -> list[Step]:
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        decodes = int(rng.integers(0, 33))
        chunks = int(rng.integers(0, 3)) if decodes else 1
        tokens = int(rng.integers(1, 200)) if chunks else 0
        bare = Step(
            rows=decodes + tokens * chunks,
            decode_attention=decodes * 16 * int(rng.integers(1, 40)),
            chunk_attention=chunks * tokens * (tokens + int(rng.integers(0, 300))),
            decodes=decodes,
            chunks=chunks,
            outputs=decodes + chunks,
        )
        seconds = truth(bare) * float(rng.lognormal(0, noise))
        steps.append(replace(bare, seconds=seconds))
    return steps


def test_a_known_law_with_a_knee_is_recovered_from_noisy_steps() -> None:
    model = EngineRegression().fit(random_steps(4000, 1, 0.05))
    errors = np.abs(model.errors(random_steps(1000, 2, 0.0)))
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.9) < 0.03


def test_what_one_two_and_three_rows_take_is_told_apart() -> None:
    # As small products are on a CPU: a vector, a few rows, and from there on by the row.
    expected = {1: 0.008, 2: 0.015, 3: 0.020}
    rng = np.random.default_rng(11)
    steps = [
        Step(rows, 16 * rows, 0, rows, 0, rows, expected.get(rows, 0.020 + 0.0006 * (rows - 3)) * rng.lognormal(0, 0.1))
        for rows in rng.integers(1, 17, 3000).tolist()
    ]
    model = EngineRegression().fit(steps)
    for rows, seconds in expected.items():
        assert model.predict([Step(rows, 16 * rows, 0, rows, 0, rows)])[0] == pytest.approx(seconds, rel=0.03)


def test_more_rows_may_take_less() -> None:
    # As measured on an AMD EPYC: three rows take longer than four, and those left over after whole strips cost extra.
    reference = {1: 0.0112, 2: 0.0203, 3: 0.0278, 4: 0.0175, 7: 0.0228, 8: 0.0213}
    rng = np.random.default_rng(13)
    steps = [
        Step(rows, 16 * rows, 0, rows, 0, rows, reference.get(rows, 0.015 + 0.0008 * rows) * rng.lognormal(0, 0.05))
        for rows in rng.integers(1, 65, 12000).tolist()
    ]
    model = EngineRegression().fit(steps)
    for rows in (*reference, 9, 31, 32, 60, 64):
        expected = reference.get(rows, 0.015 + 0.0008 * rows)
        assert model.predict([Step(rows, 16 * rows, 0, rows, 0, rows)])[0] == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_noise_does_not_make_it_too_fast(noise: float) -> None:
    # Uniform noise has its mean where it has its median, so that stalls' being discounted changes nothing.
    rng = np.random.default_rng(12)
    steps = [
        Step(rows, 16 * rows, 0, rows, 0, rows, 0.01 * rng.uniform(1 - noise, 1 + noise))
        for rows in rng.integers(1, 17, 4000).tolist()
    ]
    assert EngineRegression().fit(steps).predict(steps).mean() == pytest.approx(0.01, rel=0.01)


def test_stalls_do_not_bend_it() -> None:
    steps = random_steps(4000, 3, 0.02)
    stalled = [replace(step, seconds=step.seconds * (20 if i % 20 == 0 else 1)) for i, step in enumerate(steps)]
    errors = EngineRegression().fit(stalled).errors(random_steps(500, 4, 0.0))
    assert abs(float(np.median(errors))) < 0.02


def test_a_batch_is_seen_with_its_chunks() -> None:
    sequences = [Sequence(Request(i, 0.0, 100, 5), i, one_shot=False) for i in range(3)]
    chunks = [Chunk(sequences[0], 10, 20, False), Chunk(sequences[1], 5, 0, True)]
    batch = MixedBatch(chunks, sequences[2:], 33, 33)
    assert describe(batch, 16, 0.5) == Step(16, 48, 10 * 30 + 5 * 5, 1, 2, 2, 0.5)


def test_drafts_are_computed_like_chunks() -> None:
    """Three decodes: two with drafts over 40 and 24 tokens, one alone over 17."""
    sequences = [Sequence(Request(i, 0.0, 100, 5), i, one_shot=False) for i in range(3)]
    batch = DecodeBatch((), sequences, 81, 40, draft_tokens=[4, 0, 2])
    batch.drafted_kv = 64
    batch.longest_undrafted = 17
    assert describe(batch, 16) == Step(9, 32, 0, 3, 0, 9, drafted=2, drafted_kv=64)
    assert describe(batch, 0).decode_attention == 17
    none = DecodeBatch((), sequences, 81, 40, draft_tokens=[0, 0, 0])
    none.longest_undrafted = 40
    assert describe(none, 16) == describe(DecodeBatch((), sequences, 81, 40), 16)


def test_caches_that_a_step_takes_cost_time(tmp_path: Path) -> None:
    """Half a millisecond for each, and 2 µs a token; a file without them reads as it did, and they cost nothing."""
    sequences = [Sequence(Request(i, 0.0, 100 * (i + 1), 5), i, one_shot=False) for i in range(3)]
    batch = DecodeBatch((), sequences, 603, 301, sequences[1:])
    assert (describe(batch, 16).transfers, describe(batch, 16).received) == (2, 500)
    rng = np.random.default_rng(8)
    steps = [
        replace(step, transfers=total, received=(tokens := total * int(rng.integers(1, 300))),
                seconds=step.seconds + 5e-4 * total + 2e-6 * tokens)
        for step, total in zip(random_steps(2000, 9, 0.01), rng.integers(0, 3, size=2000).tolist(), strict=True)
    ]  # fmt: skip
    model = EngineRegression().fit(steps)
    assert model.slopes_["transfers"] == pytest.approx(5e-4, rel=0.1)
    assert model.slopes_["received"] == pytest.approx(2e-6, rel=0.1)
    document = model.document(errors=np.zeros(1), repeat_spread=0.0, provenance=PROVENANCE, frontend={"route": 1e-4})
    file = tmp_path / "steps.yaml"
    file.write_text(write_yaml(document))
    assert read_engine_regression_file(file).frontend == {"route": 1e-4}
    assert read_engine_regression(file).seconds(batch) == model.seconds(batch)
    for name in ("transfers", "received"):
        del document["slopes"][name]
    file.write_text(write_yaml(document))
    assert read_engine_regression(file).seconds(batch) < model.seconds(batch) - 1.5e-3


def test_a_file_brings_the_same_model_back(tmp_path: Path) -> None:
    model, held_out = EngineRegression().fit(random_steps(500, 6, 0.05)), random_steps(100, 7, 0.05)
    file = tmp_path / "steps.yaml"
    document = model.document(errors=model.errors(held_out), repeat_spread=0.05, provenance=PROVENANCE)
    file.write_text(write_yaml(document))
    again = read_engine_regression(file)
    assert again.predict(held_out).tolist() == model.predict(held_out).tolist()
    assert again.document(errors=np.zeros(1), repeat_spread=0.0, provenance={}) == (
        model.document(errors=np.zeros(1), repeat_spread=0.0, provenance={})
    )
    file.write_text(file.read_text().replace("overhead:", "overheads:"))
    with pytest.raises(BadInput, match="overhead"):
        read_engine_regression(file)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"knots": [1, 2], "values": [0.1]}, "lines.rows.values"), ({"knots": [2, 1], "values": [0.1, 0.2]}, "knots")],
)
def test_a_line_that_is_none_is_refused(tmp_path: Path, wrong: dict[str, list[float]], field: str) -> None:
    model = EngineRegression().fit(random_steps(500, 6, 0.05))
    document = model.document(errors=np.zeros(1), repeat_spread=0.05, provenance=PROVENANCE)
    document["lines"]["rows"] = wrong
    file = tmp_path / "steps.yaml"
    file.write_text(write_yaml(document))
    with pytest.raises(BadInput, match=field) as error:
        read_engine_regression(file)
    assert "\n" not in str(error.value)


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(CannotFit, match="at least 16 steps"):
        EngineRegression().fit(random_steps(15, 8, 0.0))
    with pytest.raises(CannotFit, match="above 0"):
        EngineRegression().fit([Step(1, 1, 0, 1, 0, 1)] * 20)
    with pytest.raises(NotFitted):
        EngineRegression().predict([])


def test_a_broken_line_by_hand() -> None:
    line = BrokenLine(knots=[10, 20], values=[1.0, 4.0])
    assert [line.at(x) for x in (0, 5, 10, 15, 20, 30)] == [0.0, 0.5, 1.0, 2.5, 4.0, 7.0]
    assert BrokenLine(knots=[], values=[]).at(7) == 0.0
    assert BrokenLine(knots=[1, 2], values=[3.0, 2.0]).at(9) == 2.0  # it does not fall below what was measured


def test_attention_that_pads_nothing_counts_the_tokens_of_all_decodes() -> None:
    """Steps cost the same, however unequal their decodes are, one by one and in a window."""
    model = EngineRegression(0).fit(random_steps(600, 3, 0.0))
    sequences = [Sequence(Request(i, 0.0, 10, 50), i, False) for i in range(4)]
    steps = [DecodeBatch((), sequences, 400 + 4 * i, 250 + i) for i in range(40)]
    assert describe(steps[0], 0).decode_attention == 400
    assert [model.seconds(batch) for batch in steps] == model.decode_seconds(4, 400, 250, 40)
    assert model.decode_seconds(4, 400, 250, 40) == model.decode_seconds(4, 400, 100, 40)
