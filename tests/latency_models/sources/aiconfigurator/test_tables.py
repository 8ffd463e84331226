"""Reading a folder of kernel timings."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from latency_models.sources.aiconfigurator.tables import AttentionKind, ExpertKind, read_tables
from tests.latency_models.sources.aiconfigurator.small_tables import (
    HEADERS,
    all_reduce_time,
    context_time,
    expert_time,
    gemm_time,
    generation_time,
    write,
)
from workloads.errors import BadInput

KIND = AttentionKind("float16", "float16", 4, 2, 64)


@pytest.mark.parametrize(("n", "k", "measured"), [(1024, 64, True), (65536, 65536, True), (500, 64, False)])
def test_a_gemm_is_in_seconds_and_says_whether_its_shape_was_measured(
    tables: Path, n: int, k: int, measured: bool
) -> None:
    curve, expected = read_tables(tables).gemm("float16", n, k)
    assert expected is measured
    for m in (1, 100, 8192):
        assert curve.at(m) == pytest.approx(gemm_time(m, n, k))


def test_a_gemm_beyond_the_largest_shape_grows_in_proportion(tables: Path) -> None:
    curve, measured = read_tables(tables).gemm("float16", 131072, 64)
    assert not measured
    assert curve.at(8192) == pytest.approx(2 * gemm_time(8192, 65536, 64))


def test_a_shape_missing_from_the_grid_is_made_of_its_neighbours(tables: Path) -> None:
    rows = [f"float16,{m},{n},64,{m * n}.0" for m in (1, 2) for n in (64, 256)] + ["float16,1,64,1024,7.0"]
    write(tables / "gemm_perf.txt.gz", HEADERS["gemm"], rows)
    curve, measured = read_tables(tables).gemm("float16", 256, 64)
    assert measured
    assert curve.at(2) == pytest.approx(0.512)


def test_attention_is_of_one_prompt_uncached_and_of_whole_contexts(tables: Path) -> None:
    content = read_tables(tables)
    context, generation = (content.find(f"{name}_attention", KIND) for name in ("context", "generation"))
    for tokens in (16, 1000, 16384):
        assert context.at(tokens) == pytest.approx(context_time(tokens))
    for count, cached in ((1, 2), (8, 3000), (100, 65536)):  # isl + step
        assert generation.at(count, cached) == pytest.approx(generation_time(count, cached))


def test_experts_and_all_reduces_inside_graphs(tables: Path) -> None:
    content = read_tables(tables)
    assert content.find("moe", ExpertKind("float16", 256, 128, 2, 8, 1, 2)).at(500) == pytest.approx(expert_time(500))
    assert content.find("custom_allreduce", 4).at(5000) == pytest.approx(all_reduce_time(5000))


def test_the_system_file_beside_the_tables_describes_the_device(tables: Path) -> None:
    device = read_tables(tables).device
    assert (device.memory_bandwidth, device.memory_capacity, device.reserved) == (1e12, 8e10, 4e9)


def test_without_system_file_experts_or_all_reduce_the_rest_is_read(tables: Path) -> None:
    (tables.parent / "systems" / "lab.yaml").unlink()
    for name in ("moe", "custom_allreduce"):
        (tables / f"{name}_perf.txt.gz").unlink()
    content = read_tables(tables)
    assert content.device is None
    assert content.tables.keys() == {"gemm", "context_attention", "generation_attention"}
    with pytest.raises(BadInput, match=r"custom_allreduce_perf.txt.gz: devices: got 2, expected one of none"):
        content.find("custom_allreduce", 2, "devices")


def test_what_is_not_in_the_tables_is_told_with_what_is(tables: Path) -> None:
    content = read_tables(tables)
    with pytest.raises(BadInput, match=r"gemm_perf.txt.gz: weights: got 'fp4', expected one of float16"):
        content.gemm("fp4", 64, 64)
    for table, kind in (
        ("context_attention", AttentionKind("fp8", "float16", 4, 2, 64)),
        ("generation_attention", AttentionKind("float16", "float16", 3, 1, 64)),
        ("moe", ExpertKind("float16", 256, 128, 2, 8, 8, 1)),
    ):
        with pytest.raises(
            BadInput, match=f"{table}_perf.txt.gz: {table}: got {type(kind).__name__}.*, expected one of "
        ):
            content.find(table, kind)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("float16,0,64,64,1.0", r"gemm_perf.txt.gz:2: m: got '0', expected a whole number of at least 1"),
        ("float16,1.5,64,64,1.0", r":2: m: got '1.5', expected a whole number"),
        ("float16,1,64,64,-1.0", r":2: latency: got '-1.0', expected a finite number above 0"),
        ("float16,1,64,64,nan", r":2: latency: got 'nan', expected a finite number above 0"),
        ("float16,1,64,64", r":2: got 4, expected 5 cells"),
    ],
)
def test_a_cell_that_will_not_do_is_told_with_its_line(tables: Path, row: str, message: str) -> None:
    write(tables / "gemm_perf.txt.gz", HEADERS["gemm"], [row])
    with pytest.raises(BadInput, match=message):
        read_tables(tables)


def test_a_missing_file_and_a_missing_column_are_told(tables: Path) -> None:
    write(tables / "gemm_perf.txt.gz", "gemm_dtype,m,n,latency", ["float16,1,1,1.0"])
    with pytest.raises(BadInput, match=r"gemm_perf.txt.gz:1: k: expected this column, found gemm_dtype, m, n, latency"):
        read_tables(tables)
    (tables / "gemm_perf.txt.gz").unlink()
    with pytest.raises(
        BadInput, match=r"lab_engine_1.0: expected a file gemm_perf.parquet, gemm_perf.txt or gemm_perf.txt.gz$"
    ):
        read_tables(tables)


@pytest.mark.parametrize("value", ["fast", "-1", "true", "null"])
def test_a_system_file_needs_its_numbers(tables: Path, value: str) -> None:
    text = f"gpu:\n  mem_bw: {value}\n  mem_capacity: 1\nmisc:\n  other_mem: 1\n"
    (tables.parent / "systems" / "lab.yaml").write_text(text)
    with pytest.raises(BadInput, match=r"lab.yaml: gpu.mem_bw: (got .*, )?expected a number above 0"):
        read_tables(tables)


def test_a_broken_gzip_file_is_told(tables: Path) -> None:
    path = tables / "gemm_perf.txt.gz"
    path.write_bytes(gzip.compress(b"m,n\n1,2\n" * 100)[:-9])
    with pytest.raises(BadInput, match=r"gemm_perf.txt.gz: expected a whole gzip file"):
        read_tables(tables)


def test_the_published_tables_are_read_whole(real_tables: Path) -> None:
    content = read_tables(real_tables / "h100_sxm_vllm_0.12.0")
    assert {name: len(shapes) for name, shapes in content.tables["gemm"].items()} == {
        "float16": 440,
        "fp8": 440,
        "fp8_block": 360,
    }
    assert content.device.memory_bandwidth == 3.35e12
    # By hand: `fp8,8192,65536,10240,7.548380533854167` is among the first lines.
    assert content.gemm("fp8", 65536, 10240)[0].at(8192) == pytest.approx(7.548380533854167e-3)
    graph = 0.004586560130119323e-3  # of two lines for 2 devices and 128 elements, the one inside a graph
    assert content.find("custom_allreduce", 2, "devices").at(128) == pytest.approx(graph)
