"""Whole steps by hand: layers counted, ranks and experts, what is refused, and both answers alike to the last bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from latency_models.io.config_io import checked
from latency_models.sources.kernel_tables.attention import AttentionTimes
from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.kernel_tables.layers import distinct_experts
from latency_models.sources.kernel_tables.settings import Communication, KernelTableSettings
from latency_models.sources.kernel_tables.spec import KernelTableStepTime
from latency_models.sources.kernel_tables.tables import KernelTables
from schedulers.parallel_cores import GroupBatch
from tests.latency_models.sources.kernel_tables.small_tables import (
    PER_ROW,
    TINY,
    batch,
    decode_time,
    dense_time,
    experts_of,
    head_seconds,
    load,
    make_tables,
    mixed_time,
    rows_seconds,
)
from tests.latency_models.sources.kernel_tables.test_files import add_experts, add_skew
from workloads.errors import BadInput

LINK = {"latency": 1e-5, "bandwidth": 1e9, "source": "made up"}
MOE = experts_of(TINY)


def moe_time(tokens: float, experts: float, ep: int = 1) -> float:
    """`add_experts`, microseconds."""
    return 10 + tokens + 100 * experts / ep


# -- one rank ------------------------------------------------------------------------------------------------------


def test_a_decode_step(folder: Path) -> None:
    result = load(folder).seconds(batch(lengths=[101, 101]))
    assert result == pytest.approx(rows_seconds(2) + head_seconds(2) + 3e-6 * decode_time(2, 100))


def test_a_mixed_step_counts_prompts_that_are_not_done_as_rows_of_the_head(folder: Path) -> None:
    result = load(folder).seconds(batch([(100, 50)], [101, 101]))
    assert result == pytest.approx(rows_seconds(102) + head_seconds(3) + 3e-6 * mixed_time(100, 50, 2, 100))


def test_time_between_kernels_and_between_steps(folder: Path) -> None:
    """Three layers of 8 linear kernels and 2 of attention, embedding, last norm, head and sampler."""
    single = batch(lengths=[101])
    plain = load(folder).seconds(single)
    assert load(folder, overhead=1e-3).seconds(single) == pytest.approx(plain + 1e-3)
    assert load(folder, kernel_gap=1e-6).seconds(single) == pytest.approx(plain + 34e-6)
    assert load(folder, time_scale=2.0).seconds(single) == pytest.approx(2 * plain)


def test_rows_are_read_upward_where_points_are_as_close_as_tiles(tmp_path: Path) -> None:
    folder = make_tables(tmp_path / "kernels_tp1", rows=(1, 16, 32, 64))
    assert load(folder).seconds(batch(lengths=[101] * 5)) == pytest.approx(
        rows_seconds(16) + head_seconds(5) + 3e-6 * decode_time(5, 100)
    )
    finer = load(folder, row_tile=1)
    assert finer.seconds(batch(lengths=[101] * 5)) == pytest.approx(
        rows_seconds(5) + head_seconds(5) + 3e-6 * decode_time(5, 100)
    )
    assert finer.seconds(batch([(40, 0)])) - finer.seconds(batch([(39, 0)])) < 1e-6 * 3 * 10
    assert load(folder).seconds(batch([(40, 0)])) == finer.seconds(batch([(40, 0)]))


def test_padding_to_captured_sizes(folder: Path) -> None:
    padded, plain = load(folder, capture_sizes=[1, 2, 4, 8, 16]), load(folder)
    lengths = [101] * 5
    expected = plain.seconds(batch(lengths=lengths)) - rows_seconds(5) + rows_seconds(8)
    assert padded.seconds(batch(lengths=lengths)) == pytest.approx(expected)
    assert padded.seconds(batch([(40, 0)])) == plain.seconds(batch([(40, 0)]))


def test_layers_that_other_models_lack_or_have(tmp_path: Path) -> None:
    """An operation that is not known by name counts once a layer."""
    layers = {name: PER_ROW[name] for name in ("qkv_proj", "qk_norm", "down_proj")}
    folder = make_tables(tmp_path / "kernels_tp1", layers=layers)
    result = load(folder).seconds(batch(lengths=[101]))
    rows = 3e-6 * sum(dense_time(layer, 1) for layer in layers)
    assert result == pytest.approx(rows + head_seconds(1) + 3e-6 * decode_time(1, 100))


def test_rows_beyond_the_table_go_on_along_its_upper_half(folder: Path) -> None:
    model = load(folder)
    fresh = batch([(256, 0), (256, 0), (256, 0)])
    result = model.seconds(fresh)
    assert model.outside() == {"attention.prefill_chunk": 768, "dense.tokens": 768}
    together = AttentionTimes(model.tables.attention, None, 3e-6, lambda axis, value: None).mixed(fresh)
    assert result == pytest.approx(rows_seconds(768) + head_seconds(3) + together)


def test_the_farthest_value_is_remembered(folder: Path) -> None:
    model = load(folder)
    for length in (1500, 3001, 2000):
        model.seconds(batch(lengths=[length]))
    model.decode_seconds(1, 3001, 3001, 50)
    model.seconds(batch(lengths=[1400]))
    assert model.outside() == {"attention.kv_decode": 3049}


# -- both answers alike --------------------------------------------------------------------------------------------


def test_copies_share_tables_but_not_what_lay_outside(folder: Path) -> None:
    single = load(folder)
    second = copy.deepcopy(single)
    far = batch([(64, 3)], [100_000, 512])
    assert second.seconds(far) == single.seconds(far)
    assert single.outside() == second.outside() != {}
    third = copy.deepcopy(load(folder))
    third.seconds(batch(lengths=[5000] * 3))
    assert single.outside() != third.outside()
    assert second.tables is single.tables


def test_loading_the_file_gives_the_same_times_as_the_folder(folder: Path, tmp_path: Path) -> None:
    add_skew(folder)
    again = KernelTables.from_document(read_kernel_tables(folder).document())
    settings = KernelTableSettings(model="tiny")
    single, second = load(folder), KernelTableStepTime(again, settings, TINY)
    for some in (batch([(64, 3)], [77, 512]), batch(lengths=[5, 900]), batch([(30, 0), (31, 9)])):
        assert single.seconds(some) == second.seconds(some)


# -- several ranks -------------------------------------------------------------------------------------------------


def test_collectives_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Two ranks: seven all-reduces of 2 rows of 100, each element once, and 2 rows of 1,000 logits, half a time."""
    model = load(make_tables(tmp_path / "kernels_tp2"), tensor_parallel=2, communication=LINK)
    separate = load(make_tables(tmp_path / "kernels_tp1"))
    two = batch(lengths=[101, 101])
    collectives = 7 * (1e-5 + 200 * 2 / 1e9) + 1e-5 + 2000 * 2 / 2 / 1e9
    assert model.seconds(two) == pytest.approx(separate.seconds(two) + collectives)


def test_ring_collectives() -> None:
    link = Communication(latency=1.0, bandwidth=8.0, element_bytes=2.0, source="made up")
    assert link.all_reduce(4, 16) == 1 + 16 * 2 * 2 * 3 / 4 / 8
    assert link.all_gather(4, 16) == 1 + 16 * 2 * 3 / 4 / 8


@pytest.mark.parametrize(("tokens", "ranks", "expected"), [(1, 1, 2.0), (1, 4, 0.5), (2, 1, 3.5), (1000, 2, 4.0)])
def test_distinct_experts(tokens: int, ranks: int, expected: float) -> None:
    """A model of 8 experts, 2 a token."""
    assert distinct_experts(8, 2, tokens, ranks) == pytest.approx(expected)


def test_experts_in_place_of_the_ffn(folder: Path) -> None:
    """Two tokens touch 3.5 of 8 experts. The last two of three layers have experts, the first has the dense FFN."""
    model = load(add_experts(folder), experts_of(TINY, dense_layers=1))
    ffn = sum(dense_time(layer, 2) for layer in ("gate_up_proj", "act_fn", "down_proj"))
    expected = rows_seconds(2) - 2e-6 * ffn + 2e-6 * moe_time(2, 3.5)
    expected += head_seconds(2) + 3e-6 * decode_time(2, 100)
    assert model.seconds(batch(lengths=[101, 101])) == pytest.approx(expected)
    assert model.outside() == {}


def test_ranks_that_share_experts(folder: Path) -> None:
    """Experts of both ranks see the tokens of both; rows cross to the experts and back in each of three layers."""
    settings = {"data_parallel": 2, "expert_parallel": True, "communication": LINK}
    model = load(add_experts(folder), MOE, **settings)
    single, three = batch(lengths=[101]), batch(lengths=[101, 101, 101])
    ffn = 3e-6 * sum(dense_time(layer, 3) for layer in ("gate_up_proj", "act_fn", "down_proj"))
    experts = 3e-6 * moe_time(4, distinct_experts(8, 2, 4, 2), 2) + 3 * 2 * (1e-5 + 4 * 100 * 2 / 2 / 1e9)
    expected = rows_seconds(3) - ffn + head_seconds(3) + 3e-6 * decode_time(3, 100) + experts
    assert model.group_seconds(GroupBatch([single, three], 1)) == pytest.approx(expected)
    assert model.seconds(batch(lengths=[101, 101])) == model.rank_seconds(batch(lengths=[101, 101]), 4)


def test_idle_ranks_take_part(folder: Path) -> None:
    model = load(add_experts(folder), MOE, data_parallel=2, expert_parallel=True, communication=LINK)
    two = batch(lengths=[101, 101])
    assert model.group_seconds(GroupBatch([two, None], 1)) == model.rank_seconds(two, 2)
    assert 0 < model.rank_seconds(None, 2) < model.rank_seconds(two, 2)
    run = model.group_decode_seconds([(2, 202, 101), (0, 0, 0)], 3)
    steps = [batch(lengths=[101 + i, 101 + i]) for i in range(3)]
    assert run == [model.group_seconds(GroupBatch([step, None], 1)) for step in steps]
    assert load(folder).rank_seconds(None, 2) == 0.0


# -- what is refused -----------------------------------------------------------------------------------------------


def test_tables_of_another_degree(tmp_path: Path) -> None:
    folder = make_tables(tmp_path / "kernels_tp2")
    with pytest.raises(BadInput, match=r"kernels_tp2: tensor_parallel: got 1, expected 2, for which the tables"):
        load(folder)


def test_experts_of_one_rank_are_divided(folder: Path) -> None:
    """A table without degrees: each of two ranks has half of the tokens, for half of the experts."""
    rows = [f"{n},{a},{20 + 2 * n + 5 * a}" for n in (1, 64) for a in (1, 8)]
    (folder / "moe.csv").write_text("\n".join(["tokens,activated_experts,time_us", *rows]) + "\n")
    link = {"latency": 0.0, "bandwidth": 1e15, "source": "no time", "spread": 0.1}
    single, step = load(folder, MOE), batch(lengths=[20] * 16)
    two = load(folder, MOE, expert_parallel=True, data_parallel=2, communication=link)
    deployment = two.measured_deployment()
    assert deployment.notes[0].startswith("experts were measured on one rank: each of 2 is taken to have 1/2")

    def experts(tokens: float, active: float) -> float:
        return 1e-6 * MOE.layers * (20 + 2 * tokens + 5 * active)

    remainder = single.seconds(step) - experts(16, distinct_experts(8, 2, 16, 1))
    assert two.seconds(step) == pytest.approx(remainder + experts(16, distinct_experts(8, 2, 32, 2)), rel=1e-6)


def test_experts_that_were_not_measured(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"moe.ep: expected a table of MoE blocks for 1 expert-parallel ranks"):
        load(folder, MOE)
    add_experts(folder)
    with pytest.raises(BadInput, match=r"moe.ep: got \[1, 2\], expected a table of MoE blocks for 4"):
        load(folder, MOE, data_parallel=4, expert_parallel=True, communication=LINK)


def test_an_ffn_that_was_not_measured(tmp_path: Path) -> None:
    folder = make_tables(tmp_path / "kernels_tp1", layers={"qkv_proj": 0.3})
    with pytest.raises(BadInput, match=r"dense: got \['qkv_proj'\], expected one of gate_up_proj"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tensor_parallel": 2}, "communication: expected latency, bandwidth and source, since there are 2 ranks"),
        ({"data_parallel": 2, "communication": LINK}, "data_parallel: got 2, expected 1 without expert_parallel"),
        ({"capture_sizes": [4, 2]}, "capture_sizes: got [4, 2], expected rising numbers"),
        ({"overhead": -1.0}, "overhead"),
        ({"tensor_parallel": 2, "communication": {**LINK, "source": ""}}, "communication.source"),
        ({"speed": 3}, "speed"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], expected: str) -> None:
    with pytest.raises(BadInput) as error:
        checked(KernelTableSettings, {"model": "tiny", **settings}, None)
    assert expected in str(error.value)
