"""Everything that is measured of a bundle, against a run worked out by hand.

Two attention instances, one FFN, a slot of each in each of two microbatches. Attention takes 0.25 a token and 2, the
FFN 0.5 a request and 1, the link 0.25 each way.

    microbatch 0   loads 8, 4    attention  0 - 4       FFN  4.25 - 6.25    ends  6.5    request 1 is done
    microbatch 1   loads 16, 12  attention  4 - 10      FFN 10.25 - 12.25   ends 12.5    request 2 is done
    microbatch 0   loads 9, -    attention 10 - 14.25   FFN 14.5  - 16      ends 16.25   request 0 is done
    microbatch 1   loads -, 13   attention 14.25 - 19.5 FFN 19.75 - 21.25   ends 21.5    request 3 is done
"""

from __future__ import annotations

from typing import Any

import pytest

from latency_models.stages import PassLatency
from twin.afd.bundle import Bundle, BundleConfig, BundleRecords, Supply, step_table
from twin.afd.point import BundleRun, Measurement, SteadyState, measure, request_columns, request_times, steady_state

LATENCY = PassLatency(attention=(0.25, 2.0), ffn=(0.5, 1.0), communication=(0.125, 0.375))
CONFIG = BundleConfig(2, 1, 1, LATENCY, microbatches=2)
SUPPLY = Supply.of([8, 4, 16, 12], [2, 1, 1, 2])
LIVED = 6.5 + 12.5 + (16.25 - 6.5) + (21.5 - 12.5)
"""Time from the start to the end of each step, summed."""


def measured(config: BundleConfig, supply: Supply) -> Measurement:
    return measure(config, supply, Bundle(config, supply).run(), slot_load=10.0, warm_up=0)


def test_steps() -> None:
    records = Bundle(CONFIG, SUPPLY).run()
    assert records.steps == [
        (0, 0.0, 6.5, 0.0, 0.0, 8, 12, 2, 2),
        (1, 0.0, 12.5, 4.0, 0.0, 16, 28, 2, 2),
        (0, 6.5, 16.25, 3.5, 0.0, 9, 9, 1, 1),
        (1, 12.5, 21.5, 1.75, 0.0, 13, 13, 1, 1),
    ]
    assert records.full_until == 6.5
    times = request_times(CONFIG, SUPPLY, records, step_table(records))
    assert (times.ids.tolist(), times.microbatch.tolist()) == ([1, 2, 0, 3], [0, 1, 0, 1])
    assert times.seated.tolist() == [0, 0, 0, 0]
    assert times.first_token.tolist() == [6.5, 12.5, 6.5, 12.5]
    assert times.finish.tolist() == [6.5, 12.5, 16.25, 21.5]


def test_every_metric() -> None:
    result = measured(CONFIG, SUPPLY)
    assert result.throughput == pytest.approx(6 / 21.5 / 3)
    assert result.throughput_generated == pytest.approx(6 / 21.5 / 3)
    assert result.tpot == pytest.approx((9.75 / 2 + 0 + 0 + 9 / 2) / 4)
    assert result.tpot_gaps == pytest.approx((9.75 + 9) / 2)
    # Instances attend for 0.25 of 12 + 28 + 9 + 13 tokens, and 2 for each of the six that had a request.
    assert result.idle_attention == pytest.approx(1 - (0.25 * 62 + 2 * 6) / (2 * 21.5))
    assert result.idle_ffn == pytest.approx(1 - (2 + 2 + 1.5 + 1.5) / 21.5)
    assert result.total_time == 21.5
    assert result.mean_token_load == pytest.approx(62 / 4 / 2)
    assert result.largest_token_load == 9 + 16  # from 6.5 to 12.5
    assert (result.steps, result.requests) == (4, 4)
    assert result.steady is None
    lived = {"attention": 4 + 6 + 4.25 + 5.25, "a_to_f": 4 * 0.25, "wait_for_ffn": 0.0, "ffn": 7, "f_to_a": 4 * 0.25,
             "wait_for_attention": 9.25}  # fmt: skip
    assert result.state_shares == pytest.approx({state: time / LIVED for state, time in lived.items()})


def test_waiting_for_the_ffn_is_a_state() -> None:
    """Attention 0 - 1 and 1 - 2; the FFN takes 4: 1.5 - 5.5 and 5.5 - 9.5. A second FFN instance halves α alone."""
    config = BundleConfig(1, 1, 1, PassLatency((0.0, 1.0), (1.0, 3.0), (0.0, 1.0)), microbatches=2)
    supply = Supply.of([0, 0], [1, 1])
    result = measured(config, supply)
    shares = {"attention": 2 / 16, "a_to_f": 1 / 16, "wait_for_ffn": 3 / 16, "ffn": 8 / 16, "f_to_a": 1 / 16}
    assert result.state_shares == pytest.approx({**shares, "wait_for_attention": 1 / 16})
    assert (result.total_time, result.idle_ffn) == (10.0, pytest.approx(1 - 8 / 10))
    two = measured(BundleConfig(1, 2, 1, PassLatency((0.0, 1.0), (1.0, 3.0), (0.0, 1.0)), microbatches=2), supply)
    assert (two.total_time, two.idle_ffn) == (9.0, pytest.approx(1 - 7 / 9))
    assert two.throughput == pytest.approx(2 / 9 / 3)


def test_tokens_of_requests_in_flight() -> None:
    """A step takes 7. Request 0 takes six steps and the others one each, beside it: the first four of five end at 28,
    with one token each, and by then request 0 has been given four.
    """
    config = BundleConfig(1, 1, 2, PassLatency((0.0, 4.0), (0.0, 2.0), (0.0, 1.0)), microbatches=1)
    result = measured(config, Supply.of([0] * 5, [6, 1, 1, 1, 1]))
    assert result.throughput == pytest.approx(4 / 28 / 2)
    assert result.throughput_generated == pytest.approx(8 / 28 / 2)
    assert result.total_time == 42


def test_columns_of_requests() -> None:
    supply = Supply.of([8, 4, 16, 12], [2, 1, 1, 2], arrivals=[0.0, 0.0, 0.0, 1.0])
    records = Bundle(CONFIG, supply).run()
    run = BundleRun(CONFIG, supply, records, measure(CONFIG, supply, records, slot_load=10.0, warm_up=0))
    columns = {name: values.tolist() for name, values in request_columns(run).items()}
    assert columns["request"] == [1, 2, 0, 3]
    assert (columns["prefill_tokens"], columns["decode_tokens"]) == ([4, 16, 8, 12], [1, 1, 2, 2])
    assert columns["arrival"] == [0.0, 0.0, 0.0, 1.0]
    # Microbatch 1 has request 2 alone. Request 3 finds a slot of microbatch 0 when that comes round, at 6.5.
    assert columns["seated"] == [0.0, 0.0, 0.0, 6.5]
    # Loads 9 and 12 then: attention 10 - 15, FFN 15.25 - 17.25; loads 13 alone: 17.5 - 22.75, FFN 23 - 24.5.
    assert columns["finish"] == [6.5, 12.0, 17.5, 24.75]
    assert columns["first_token"] == [6.5, 12.0, 6.5, 17.5]
    closed = BundleRun(CONFIG, SUPPLY, Bundle(CONFIG, SUPPLY).run(), run.measured)
    assert request_columns(closed)["arrival"].tolist() == [0.0] * 4


# -- the steady state --------------------------------------------------------------------------------------------------

ALONE = BundleConfig(1, 1, 1, LATENCY, microbatches=1)
"""One slot: a step takes 0.25 a token and 2 + 0.25 + 1.5 + 0.25."""


def steady(supply: Supply, config: BundleConfig = ALONE, **settings: Any) -> SteadyState | None:
    records: BundleRecords = Bundle(config, supply).run()
    arguments = {"slot_load": 8.0, "warm_up": 0, **settings}
    return steady_state(config, supply, records, step_table(records), **arguments)


@pytest.mark.parametrize(
    ("warm_up", "period", "steps"),
    [
        (0, 1, 32),  # 39 steps after the first, in 32 batches of one
        (10, 1, 29),  # 29 after the tenth
        (100, 1, 19),  # never more than half is left out
        (4, 4, 32),  # eight periods after the fourth
        (3, 4, 32),  # which is where the period of the third ends
        (5, 4, None),  # seven are too few
    ],
)
def test_steps_of_the_steady_state(warm_up: int, period: int, steps: int | None) -> None:
    """Forty steps that take 6 each."""
    result = steady(Supply.of([8] * 41, [1] * 41, completions=40), warm_up=warm_up, period=period)
    if steps is None:
        assert result is None
        return
    assert result.steps == steps
    assert result.throughput == result.plain == pytest.approx(1 / 6 / 2)
    assert result.interval == pytest.approx((1 / 6 / 2, 1 / 6 / 2))


def test_two_microbatches_are_cut_in_whole_rounds() -> None:
    """Eighty steps, forty rounds; what is left after three is 36 and a half: 32 batches of a round."""
    config = BundleConfig(1, 1, 1, LATENCY, microbatches=2)
    result = steady(Supply.of([8] * 82, [1] * 82, completions=80), config, warm_up=3)
    assert result.steps == 64
    # Attention, 4 a step, is always busy.
    assert result.throughput == pytest.approx(1 / 4 / 2)


def test_the_load_is_known_exactly() -> None:
    """Steps take 0.25 a token and 4. Loads are 7 and 9 in the mean of the run, and 10 is given: the line is exact."""
    result = steady(Supply.of([4, 12] * 21, [1] * 42, completions=41), slot_load=10.0)
    assert result.throughput == pytest.approx(1 / (0.25 * 10 + 4) / 2)
    assert result.plain == pytest.approx(1 / (0.25 * 8 + 4) / 2)
    assert result.relative_half_width == pytest.approx(0, abs=1e-9)


def test_a_slot_that_runs_empty_ends_it() -> None:
    """Of 60 steps the last 20 have one request in two slots."""
    config = BundleConfig(1, 1, 2, PassLatency((0.0, 4.0), (0.0, 2.0), (0.0, 1.0)), microbatches=1)
    result = steady(Supply.of([0] * 41, [1] * 40 + [40]), config, slot_load=0.0)
    # Pairs for 20 steps, then the long one alone: 19 steps after the first have both slots full.
    assert (result.steps, result.throughput) == (19, pytest.approx(2 / 7 / 2))


def test_open_arrivals_have_no_control() -> None:
    """A request every 10, each done in a step of 6: the last one comes at 390, when 39 have ended."""
    supply = Supply.of([8] * 40, [1] * 40, arrivals=[10.0 * i for i in range(40)])
    result = steady(supply, slot_load=1000.0)
    # 38 steps after the first, in 32 batches of one.
    assert result.steps == 32
    assert result.throughput == result.plain == pytest.approx(1 / 10 / 2)
