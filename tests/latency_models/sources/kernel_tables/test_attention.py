"""Attention by hand: each regime, several chunks, uneven decodes, and what is flagged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from latency_models.interpolation import make_grid
from latency_models.sources.kernel_tables.attention import AttentionTimes
from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.kernel_tables.skew import SkewFit, SkewLevels
from tests.latency_models.sources.kernel_tables.small_tables import (
    batch,
    decode_time,
    make_tables,
    mixed_time,
    prefill_time,
)
from tests.latency_models.sources.kernel_tables.test_files import add_skew
from tests.latency_models.test_interpolation import multilinear

ALPHA = 0.25


def flat_skew(pure: float = ALPHA, mixed: float = ALPHA) -> SkewFit:
    """The same α everywhere."""
    return SkewFit(
        pure=SkewLevels(n_decode=(2,), alpha=((pure,) * 6,)),
        mixed=SkewLevels(n_decode=(2,), alpha=((mixed,) * 6,)),
        shots=1,
        heldout_median_error=0.0,
        heldout_p90_error=0.0,
        uncorrected_median_error=0.0,
        uncorrected_p90_error=0.0,
    )


class Flags:
    """The flags raised."""

    def __init__(self) -> None:
        self.axes: dict[str, float] = {}

    def __call__(self, axis: str, value: float) -> None:
        self.axes[axis] = max(value, self.axes.get(axis, 0.0))


@pytest.fixture
def flags() -> Flags:
    return Flags()


@pytest.fixture
def attention(folder: Path, flags: Flags) -> AttentionTimes:
    """In microseconds, without a correction for uneven decodes."""
    return AttentionTimes(read_kernel_tables(folder).attention, None, 1.0, flags)


def test_uneven_decodes_cost_a_share_of_the_way_to_the_longest(folder: Path, flags: Flags) -> None:
    attention = AttentionTimes(read_kernel_tables(folder).attention, flat_skew(), 1.0, flags)
    lengths = [101, 201, 401, 901]
    mean, longest = 400.0, 900.0
    even, worst = decode_time(4, mean), decode_time(4, longest)
    assert attention.decode(4, sum(lengths), 901) == pytest.approx(even + ALPHA * (worst - even))
    even, worst = mixed_time(64, 0, 4, mean), mixed_time(64, 0, 4, longest)
    assert attention.mixed(batch([(64, 0)], lengths)) == pytest.approx(even + ALPHA * (worst - even))
    assert attention.decode(4, 4 * 401, 401) == pytest.approx(decode_time(4, mean))


def test_a_chunk_of_one_token_may_be_the_longest_decode(folder: Path, flags: Flags) -> None:
    attention = AttentionTimes(read_kernel_tables(folder).attention, flat_skew(), 1.0, flags)
    assert attention.mixed(batch([(1, 900)], [101, 101])) == attention.decode(3, 1103, 901)


def test_a_chunk_of_one_token_is_a_decode(attention: AttentionTimes) -> None:
    separate = attention.mixed(batch([(1, 100)], [101, 101]))
    assert separate == attention.decode(3, 303, 101)
    joint = attention.mixed(batch([(1, 128), (64, 0)], [129, 129]))
    assert joint == attention.mixed(batch([(64, 0)], [129] * 3))


def test_chunks_at_one_context_cost_what_one_chunk_of_their_work_costs(attention: AttentionTimes) -> None:
    """64 + 64 tokens at 128: W = 2 · 64 · 160, so that 128 tokens have it at context 96."""
    result = attention.mixed(batch([(64, 128), (64, 128)]))
    assert result == pytest.approx(attention.mixed(batch([(128, 96)])))


def test_fresh_prompts_together_have_less_work_than_one_of_their_length(attention: AttentionTimes) -> None:
    """Two of 128 tokens at 0 are 256 tokens at -64: as far below 256 at 0 as 256 at 64 is above."""
    result = attention.mixed(batch([(128, 0), (128, 0)]))
    assert result == pytest.approx(2 * prefill_time(256, 0) - prefill_time(256, 64))
    assert prefill_time(128, 0) < result < prefill_time(256, 0)


def test_beside_decodes_further_chunks_add_what_they_add_to_prompts(attention: AttentionTimes) -> None:
    largest = attention.mixed(batch([(128, 0)], [129] * 4))
    together, first = attention.mixed(batch([(128, 0), (64, 128)])), attention.mixed(batch([(128, 0)]))
    result = attention.mixed(batch([(64, 128), (128, 0)], [129] * 4))
    assert result == pytest.approx(largest + together - first)


@pytest.mark.parametrize(
    ("chunks", "lengths", "axis", "value"),
    [
        ([], [2001], "attention.kv_decode", 2000),
        ([], [101] * 9, "attention.n_decode", 9),
        ([(300, 0)], [], "attention.prefill_chunk", 300),
        ([(64, 600)], [], "attention.kv_prefill", 600),
        ([(64, 600)], [101], "attention.kv_prefill", 600),
        ([(300, 0)], [101], "attention.prefill_chunk", 300),
        ([(64, 0)], [101] * 12, "attention.n_decode", 12),
        ([(64, 0)], [101, 1901], "attention.kv_decode", 1900),
    ],
)
def test_beyond_the_table_lines_go_on_and_are_flagged(
    attention: AttentionTimes, flags: Flags, chunks: list[tuple[int, int]], lengths: list[int], axis: str, value: float
) -> None:
    count, mean = len(lengths), sum(lengths) / max(len(lengths), 1) - 1
    if not chunks:
        assert attention.decode(count, sum(lengths), max(lengths)) == pytest.approx(decode_time(count, mean))
    elif lengths:
        expected = mixed_time(*chunks[0], count, mean)
        assert attention.mixed(batch(chunks, lengths)) == pytest.approx(expected)
    else:
        low, high = prefill_time(64, chunks[0][1]), prefill_time(256, chunks[0][1])
        expected = low + (high - low) * (chunks[0][0] - 64) / 192
        assert attention.mixed(batch(chunks)) == pytest.approx(expected)
    assert flags.axes == {axis: value}


def test_a_corner_that_did_not_fit_into_memory_is_flagged(tmp_path: Path, flags: Flags) -> None:
    """Without the largest decodes at the longest histories, for decodes alone and beside a prompt."""
    folder = make_tables(tmp_path / "kernels_tp1")
    path = folder / "attention.csv"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if ",8,1024," not in line))
    attention = AttentionTimes(read_kernel_tables(folder).attention, None, 1.0, flags)
    assert attention.decode(4, 4 * 1001, 1001) == pytest.approx(decode_time(4, 1000))
    assert attention.mixed(batch([(64, 0)], [1001] * 4)) == pytest.approx(mixed_time(64, 0, 4, 1000))
    assert attention.decode(8, 8 * 101, 101) == pytest.approx(decode_time(8, 100))
    assert not flags.axes
    assert attention.decode(8, 8 * 1001, 1001) == pytest.approx(decode_time(8, 1000))
    assert flags.axes == {"attention.kv_decode": 1000}
    flags.axes.clear()
    assert attention.mixed(batch([(64, 0)], [901] * 6)) == pytest.approx(mixed_time(64, 0, 6, 900))
    assert flags.axes == {"attention.kv_decode": 900}


# -- the written-out lookups against the definition ----------------------------------------------------------------


def test_lookups_equal_the_weighted_sum_over_all_corners(folder: Path, flags: Flags) -> None:
    """Inside the table, between its points and beyond its end."""
    table = read_kernel_tables(folder).attention
    attention = AttentionTimes(table, None, 1.0, flags)
    regimes = table.regimes
    source = random.Random(7)
    for _ in range(200):
        chunk, context = source.randint(2, 600), source.choice([0, source.randint(1, 900)])
        count, length = source.randint(1, 12), source.randint(1, 1500)
        history = float(length - 1)
        expected = (
            (attention.decode(count, count * length, length), regimes.decode, (count, history)),
            (attention.mixed(batch([(chunk, context)])), regimes.prefill, (chunk, context)),
            (
                attention.mixed(batch([(chunk, context)], [length] * count)),
                regimes.mixed,
                (chunk, context, count, history),
            ),
        )
        for result, points, point in expected:
            assert result == pytest.approx(multilinear(make_grid(points, 1.0), *point), rel=1e-12)


def test_a_run_equals_single_lookups_to_the_last_bit(folder: Path) -> None:
    """Runs that begin anywhere, cross points of the table and end beyond it; what lies outside is flagged alike."""
    add_skew(folder)
    tables = read_kernel_tables(folder)
    source = random.Random(11)
    for _ in range(100):
        count, steps = source.randint(1, 12), source.randint(0, 900)
        lengths = [source.randint(1, 1200) for _ in range(count)]
        kv, longest = sum(lengths), max(lengths)
        by_run, one_by_one = Flags(), Flags()
        run = AttentionTimes(tables.attention, tables.skew, 1.0, by_run)
        single = AttentionTimes(tables.attention, tables.skew, 1.0, one_by_one)
        result = run.decode_run(count, kv, longest, steps, 3.0)
        assert result == [3.0 + single.decode(count, kv + count * i, longest + i) for i in range(steps)]
        if steps:
            assert by_run.axes == one_by_one.axes
