"""The defaults of `StepTime`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.sources.linear import LinearStepTime
from latency_models.step_time import StepTime, Unknown, decode_line, draw_scores
from schedulers.batches import Batch, DecodeBatch, DraftedDecode, DraftedSteps
from schedulers.parallel_cores import GroupBatch
from schedulers.sequence import Sequence
from tests.latency_models.sources.kernel_tables.small_tables import batch
from workloads.request import Request


class Quadratic(StepTime):
    """A user's model: the two methods that have no default."""

    def seconds(self, batch: Batch) -> float:
        return 0.001 * (batch.n_decodes + batch.prefill_tokens) ** 2

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return [0.001 * decodes**2] * steps


def test_a_group_step_takes_as_long_as_its_slowest_rank() -> None:
    group = GroupBatch([batch(lengths=[10, 10]), None, batch(lengths=[10, 10, 10])], 1)
    assert Quadratic().group_seconds(group) == pytest.approx(0.009)
    assert Quadratic().group_decode_seconds([(2, 20, 10), (0, 0, 0), (3, 30, 10)], 2) == pytest.approx([0.009] * 2)


def test_ranks_of_a_subclass_may_share_work() -> None:
    class Shared(Quadratic):
        def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
            return (0.0 if batch is None else self.seconds(batch)) + 0.1 * gathered

        def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
            return [0.001 * decodes**2 + 0.1 * gathered] * steps

    group = GroupBatch([batch(lengths=[10, 10]), None], 1)
    assert Shared().group_seconds(group) == pytest.approx(0.204)
    assert Shared().group_decode_seconds([(2, 20, 10), (0, 0, 0)], 1) == [Shared().group_seconds(group)]


def test_without_a_fit_parameters_are_certain_and_everything_is_covered() -> None:
    model = Quadratic()
    assert model.draw(np.random.default_rng(0)) is model
    assert model.outside() == {}
    assert model.chunk_table() is None
    assert model.measured_deployment() is None


@given(st.tuples(*[st.floats(0, 1)] * 3), st.integers(1, 500), st.integers(0, 10**7))
def test_the_line_of_decode_steps_is_that_of_their_durations(line: tuple[float, ...], decodes: int, kv: int) -> None:
    model = LinearStepTime(*line)
    result = decode_line(model)
    assert result is not None
    fixed, slope = result(decodes)
    assert model.decode_seconds(decodes, kv, 1, 4) == [fixed + slope * (kv + decodes * step) for step in range(4)]


def test_a_subclass_with_other_durations_has_no_line() -> None:
    class Slower(LinearStepTime):
        def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
            return [1.0] * steps

    assert decode_line(Slower(0.01, 1e-5)) is None
    assert decode_line(Quadratic()) is None


@pytest.mark.parametrize("model", [Quadratic(), LinearStepTime(0.01, 0.00037, 0.0000013)])
def test_drafted_steps_take_as_long_as_each_of_them(model: StepTime) -> None:
    decodes = [DraftedDecode(Sequence(Request(i, 0.0, 10, 20), i, False)) for i in range(2)]
    steps = DraftedSteps(decodes, 3)
    decodes[0].num_drafted = [3, 1]
    decodes[1].num_drafted = [0, 2]
    steps.rows = [5, 5]
    steps.kv_tokens = [731, 744]
    steps.longest = [400, 402]
    sequences = tuple(item.sequence for item in decodes)
    batches = [
        DecodeBatch((), sequences, 731, 400, draft_tokens=[3, 0]),
        DecodeBatch((), sequences, 744, 402, draft_tokens=[1, 2]),
    ]
    assert [item.decode_tokens for item in batches] == steps.rows
    assert model.drafted_seconds(steps) == [model.seconds(item) for item in batches]


OVERHEAD = Unknown("overhead", "host time between steps", "assumed", 0.5)
FIT = tuple(Unknown(f"fit.{i}", "coefficients", "fitted") for i in range(3))


def test_a_name_has_one_score_whatever_stands_beside_it() -> None:
    separate = draw_scores([OVERHEAD], np.random.default_rng(3))
    among = draw_scores([*FIT, OVERHEAD], np.random.default_rng(3))
    assert among["overhead"] == separate["overhead"]
    assert len(set(among.values())) == 4
    assert draw_scores([OVERHEAD], np.random.default_rng(4)) != separate


def test_scores_are_standard_normal_and_independent() -> None:
    rng = np.random.default_rng(0)
    scores = np.array([list(draw_scores(FIT, rng).values()) for _ in range(2000)])
    assert np.abs(scores.mean(axis=0)).max() < 0.1
    assert np.cov(scores.T) == pytest.approx(np.eye(3), abs=0.12)


def test_factors_are_as_far_from_one_upwards_as_downwards() -> None:
    assert OVERHEAD.factor(0.0) == 1.0
    assert OVERHEAD.factor(1.3) * OVERHEAD.factor(-1.3) == pytest.approx(1.0)
    assert OVERHEAD.factor(1.0) == pytest.approx(np.exp(0.5))


def test_a_group_is_the_name_before_the_dot() -> None:
    assert {unknown.group for unknown in FIT} == {"fit"}
    assert OVERHEAD.group == "overhead"
