from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import BadInput
from workloads.lengths import PMF_ENTRIES, Empirical, Fixed, Geometric, Lengths, LogNormal, Uniform
from workloads.pairs import Independent, JointEmpirical, LengthPairs

MEASURED = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=12)
INDEPENDENT = [
    Independent(Geometric(100), Geometric(500)),
    Independent(Uniform(0, 300), LogNormal(200, 0.7)),
    Independent(LogNormal(800, 1.0), Uniform(1, 64)),
    Independent(Fixed(1000), Geometric(50)),
    Independent(Fixed(0), Fixed(1)),
    Independent(Empirical([0, 7, 5000]), Empirical([1, 1, 90])),
]


def joint(rows: list[tuple[int, int]]) -> JointEmpirical:
    return JointEmpirical([prefill for prefill, _ in rows], [decode for _, decode in rows])


def test_a_slot_worked_out_by_hand() -> None:
    """Loads 0, 1 from the first request and 10 from the second."""
    pairs = JointEmpirical([0, 10], [2, 1])
    assert pairs.slot_load_pmf().tolist() == pytest.approx([1 / 3, 1 / 3] + [0] * 8 + [1 / 3])
    assert pairs.renewal_load() == pytest.approx(11 / 3)
    assert (pairs.mean_prefill, pairs.mean_decode) == (5, 1.5)
    assert pairs.covariance == -2.5
    assert len(pairs) == 2


@given(rows=MEASURED)
def test_the_measured_slot_load_counts_every_step(rows: list[tuple[int, int]]) -> None:
    counts = Counter(prefill + i for prefill, decode in rows for i in range(decode))
    steps = counts.total()
    mass = joint(rows).slot_load_pmf()
    assert len(mass) == max(counts) + 1
    assert [round(share * steps, 6) for share in mass.tolist()] == [counts[load] for load in range(len(mass))]
    mean = Fraction(sum(load * count for load, count in counts.items()), steps)
    assert joint(rows).renewal_load() == pytest.approx(float(mean), rel=1e-12)


@given(
    prefill=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    decode=st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_independent_lengths_are_the_joint_of_all_their_combinations(prefill: list[int], decode: list[int]) -> None:
    apart = Independent(Empirical(prefill), Empirical(decode))
    together = joint(list(product(prefill, decode)))
    assert apart.mean_prefill == pytest.approx(together.mean_prefill)
    assert apart.mean_decode == pytest.approx(together.mean_decode)
    assert together.covariance == pytest.approx(apart.covariance, abs=1e-9)
    assert apart.renewal_load() == pytest.approx(together.renewal_load(), rel=1e-12)
    assert apart.slot_load_pmf() == pytest.approx(together.slot_load_pmf(), abs=1e-12)


@pytest.mark.parametrize("pairs", INDEPENDENT, ids=repr)
def test_the_mean_slot_load_is_the_renewal_load(pairs: Independent) -> None:
    mass = pairs.slot_load_pmf()
    assert mass.min() >= 0
    assert mass.sum() == pytest.approx(1.0, abs=1e-12)
    assert np.arange(len(mass)) @ mass == pytest.approx(pairs.renewal_load(), rel=1e-6)


@pytest.mark.parametrize("prefill", [Fixed(0), Fixed(64), Uniform(0, 999), LogNormal(700, 1.2)], ids=repr)
@pytest.mark.parametrize("mean", [1, 2.5, 500])
def test_geometric_answers_have_the_load_of_the_textbook(prefill: Lengths, mean: float) -> None:
    """No memory: the age of a geometric answer is as long as what is left, mean - 1 tokens."""
    pairs = Independent(prefill, Geometric(mean))
    assert pairs.renewal_load() == pytest.approx(prefill.mean + mean - 1, rel=1e-12)


@pytest.mark.parametrize("decode", [Fixed(0), Uniform(0, 5), Empirical([3, 0, 2])], ids=repr)
def test_an_answer_of_no_tokens_is_refused(decode: Lengths) -> None:
    with pytest.raises(BadInput, match=r"^decode: got .*expected lengths of at least 1 token"):
        Independent(Fixed(5), decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ([1], [0], r"decode_values\[0\]: got 0"),
        ([1, 2], [3, -1], r"decode_values\[1\]: got -1"),
        ([-1], [1], r"prefill_values\[0\]: got -1"),
        ([1, 2], [3], r"len\(decode_values\): got 1, expected as many as prefill_values \(2\)"),
        ([], [], r"prefill_values: got \[\], expected a flat list"),
        ([1.0], [1], r"prefill_values: .*expected a whole number"),
    ],
)
def test_measured_pairs_are_checked(prefill: list[int], decode: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=f"^{message}"):
        JointEmpirical(prefill, decode)


@given(rows=MEASURED, seed=st.integers(0, 1000))
def test_measured_pairs_stay_together(rows: list[tuple[int, int]], seed: int) -> None:
    prefill, decode = joint(rows).sample(np.random.default_rng(seed), 50)
    assert set(zip(prefill.tolist(), decode.tolist(), strict=True)) <= set(rows)


def test_every_measured_pair_is_drawn_equally_often() -> None:
    rows = [(i, i + 1) for i in range(10)]
    prefill, _ = joint(rows).sample(np.random.default_rng(4), 100_000)
    counts = np.bincount(prefill, minlength=10)
    assert np.abs(counts - 10_000).max() < 5 * math.sqrt(100_000 * 0.1 * 0.9)


@pytest.mark.parametrize(
    "pairs",
    [
        Independent(Fixed(10**8), Fixed(1)),
        Independent(Fixed(10), Geometric(1e7)),
        Independent(Fixed(3), LogNormal(1000, 8)),
        JointEmpirical([PMF_ENTRIES], [1]),
        JointEmpirical([1], [PMF_ENTRIES]),
    ],
    ids=["prefill", "decode", "tail", "measured prefill", "measured decode"],
)
def test_a_load_that_no_table_holds_is_refused_and_not_bent(pairs: LengthPairs) -> None:
    with pytest.raises(BadInput, match=r"^slot load: expected lengths that a table of 4194304 entries can hold"):
        pairs.slot_load_pmf()
    assert pairs.renewal_load() > 0


def test_long_measured_lengths_do_not_overflow() -> None:
    pairs = JointEmpirical([10**9] * 20, [10**9] * 20)
    assert pairs.renewal_load() == pytest.approx(1.5e9, rel=1e-8)
    assert pairs.covariance == 0


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_the_interval_covers_the_true_load_as_often_as_it_says(confidence: float) -> None:
    """Prompts grow with their answers: P = 2 D + U. Within five binomial standard errors over 600 traces."""
    rng = np.random.default_rng(5)
    mean, traces = 60.0, 600
    second = Geometric(mean).variance + mean**2
    truth = 2 * second / mean + Uniform(0, 100).mean + (second - mean) / (2 * mean)
    covered = 0
    for _ in range(traces):
        decode = Geometric(mean).sample(rng, 1000)
        pairs = JointEmpirical(2 * decode + Uniform(0, 100).sample(rng, 1000), decode)
        low, high = pairs.renewal_load_interval(confidence)
        assert low < pairs.renewal_load() < high
        covered += low <= truth <= high
    assert abs(covered / traces - confidence) < 5 * math.sqrt(confidence * (1 - confidence) / traces)


@pytest.mark.parametrize(("block", "covers"), [(1, False), (100, True)])
def test_blocks_keep_the_promise_where_requests_drift(block: int, covers: bool) -> None:
    """Lengths that hold for 20 requests in a row: taken as independent, the interval misses far too often."""
    rng = np.random.default_rng(6)
    truth = Independent(Uniform(0, 900), Geometric(40)).renewal_load()
    traces, covered = 400, 0
    for _ in range(traces):
        prefill, decode = Independent(Uniform(0, 900), Geometric(40)).sample(rng, 400)
        low, high = JointEmpirical(prefill.repeat(20), decode.repeat(20)).renewal_load_interval(block=block)
        covered += low <= truth <= high
    error = math.sqrt(0.95 * 0.05 / traces)
    assert (abs(covered / traces - 0.95) < 5 * error) == covers
    assert covers or covered / traces < 0.6


def test_an_interval_of_two_blocks_by_hand() -> None:
    """Loads sum to 10 and 20 + 21 + 22 = 63 over 1 and 3 steps: θ = 73/4, and the residuals are -8.25 and 8.25.

    Their standard deviation is 8.25 √2, so the error of their mean is 8.25, over a mean answer of 2.
    """
    low, high = JointEmpirical([10, 20], [1, 3]).renewal_load_interval()
    assert (low, high) == pytest.approx((18.25 - 1.959964 * 4.125, 18.25 + 1.959964 * 4.125))


def test_the_interval_wants_two_blocks_and_a_confidence() -> None:
    with pytest.raises(BadInput, match=r"^block: got 1, expected at least 2 blocks in 1 pairs"):
        joint([(8, 3)]).renewal_load_interval()
    with pytest.raises(BadInput, match=r"^block: got 3, expected at least 2 blocks in 5 pairs"):
        joint([(8, 3)] * 5).renewal_load_interval(block=3)
    with pytest.raises(BadInput, match=r"^block: got 0, expected a whole number from 1"):
        joint([(8, 3)] * 5).renewal_load_interval(block=0)
    for confidence in (0.0, 1.0, 95, -0.5, math.nan, "0.95"):
        with pytest.raises(BadInput, match=r"^confidence: got .*expected a number from 0.001"):
            joint([(8, 3), (1, 1)]).renewal_load_interval(confidence)  # type: ignore[arg-type]


@pytest.mark.parametrize("pairs", [*INDEPENDENT, joint([(3, 5), (800, 2), (0, 1), (12, 900)])], ids=repr)
def test_a_stream_gives_the_same_pairs_however_many_at_once(pairs: LengthPairs) -> None:
    at_once = pairs.stream(np.random.default_rng(5))
    bits = pairs.stream(np.random.default_rng(5))
    rows = list(zip(*(column.tolist() for column in at_once(300)), strict=True))
    again = [
        row for size in (1, 0, 7, 92, 200) for row in zip(*(column.tolist() for column in bits(size)), strict=True)
    ]
    assert again == rows


@pytest.mark.parametrize("pairs", INDEPENDENT[:4], ids=repr)
def test_a_stream_has_the_means_and_no_covariance(pairs: Independent) -> None:
    prefill, decode = pairs.stream(np.random.default_rng(8))(100_000)
    assert abs(prefill.mean() - pairs.mean_prefill) <= 5 * prefill.std() / math.sqrt(100_000)
    assert abs(decode.mean() - pairs.mean_decode) <= 5 * decode.std() / math.sqrt(100_000)
    product_error = ((prefill - prefill.mean()) * (decode - decode.mean())).std() / math.sqrt(100_000)
    assert abs(np.cov(prefill, decode)[0, 1]) <= 5 * product_error + 1e-9


@pytest.mark.parametrize(
    ("prompts", "answers", "constant"),
    [([3, 3], [2, 2], True), ([3], [2], True), ([3, 4], [2, 2], False), ([3, 3], [2, 1], False)],
)
def test_pairs_are_constant_where_all_are_alike(prompts: list[int], answers: list[int], constant: bool) -> None:
    assert JointEmpirical(prompts, answers).is_constant == constant
    assert JointEmpirical(prompts, answers).independent().is_constant == constant


# -- requests as a random decode step finds them -----------------------------------------------------------------------

SIZE = 40_000


@pytest.mark.parametrize(
    "lengths",
    [
        Independent(Geometric(50), Geometric(20)),
        Independent(Uniform(0, 100), Uniform(1, 60)),
        Independent(Geometric(50), LogNormal(100, 1.2)),
        Independent(Fixed(7), Fixed(9)),
        JointEmpirical([5, 500, 50], [3, 200, 10]),
    ],
    ids=["geometric", "uniform", "log-normal", "fixed", "joint"],
)
def test_load_at_a_uniform_age_is_the_renewal_load(lengths: LengthPairs) -> None:
    rng = np.random.default_rng(11)
    prefill, decode = lengths.sample_resident(rng, SIZE)
    load = prefill + rng.integers(0, decode)
    assert abs(load.mean() - lengths.renewal_load()) <= 5 * load.std() / np.sqrt(SIZE) + 1e-9


@pytest.mark.parametrize("age", [0, 1, 9, 40, 10_000])
def test_load_beyond_an_age_is_what_older_requests_carry(age: int) -> None:
    joint = JointEmpirical([5, 500, 50], [3, 200, 10])
    pairs = zip([5, 500, 50], [3, 200, 10], strict=True)
    loads = [prompt + step for prompt, decode in pairs for step in range(age, decode)]
    assert joint.load_beyond(age) == pytest.approx(sum(loads) / 213)
    apart = joint.independent()
    assert apart.load_beyond(0) == pytest.approx(apart.renewal_load())
    # Geometric: ages are geometric from 0, so beyond k there is (1 - p)^k, with k more tokens each.
    geometric = Independent(Geometric(50), Geometric(20))
    assert geometric.load_beyond(age) == pytest.approx(0.95**age * (50 + age + 19), abs=1e-9)


def test_long_answers_are_met_in_proportion() -> None:
    rng = np.random.default_rng(3)
    prefill, decode = JointEmpirical([1, 2], [10, 30]).sample_resident(rng, SIZE)
    share = float((decode == 30).mean())
    assert abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / SIZE)
    assert ((prefill == 2) == (decode == 30)).all()
