"""Reading a folder of kernel timings."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from latency_models.deployment.models import load_model
from latency_models.interpolation import Curve, Surface
from latency_models.io.files import read_columns
from latency_models.sources.aiconfigurator.kernels import Placement, attention_times
from latency_models.sources.aiconfigurator.tables import READERS, AttentionKind, ExpertKind, KernelTables, read_tables
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


def test_the_published_tables_are_read_whole(aiconfigurator_tables: Path) -> None:
    content = read_tables(aiconfigurator_tables / "h100_sxm_vllm_0.12.0")
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


MODULE = "op_name,model,kv_cache_dtype,gemm_type,num_heads,batch_size,isl,step,latency"
STATE = "op_name,kernel_source,phase,batch_size,seq_len,num_k_heads,head_k_dim,num_v_heads,head_v_dim,latency"


def tables_of(folder: Path, *kinds: AttentionKind, **rows: list[str]) -> KernelTables:
    """Tables of these rows, and of kinds of grouped queries, of 2 and 1 ms whatever the batch."""
    tables = {
        "context_attention": {kind: Curve([(1.0, 2e-3), (8192.0, 2e-3)]) for kind in kinds},
        "generation_attention": {
            kind: Surface({count: Curve([(1.0, 1e-3), (8192.0, 1e-3)]) for count in (1, 64)}) for kind in kinds
        },
    }
    for name, lines in rows.items():
        path = folder / f"{name}_perf.txt"
        path.write_text("\n".join(lines) + "\n")
        tables[name] = dict(READERS[name](read_columns(path)))
    return KernelTables(folder, tables)


@pytest.mark.parametrize(("name", "repository"), [("mla", "deepseek-ai/DeepSeek-V3"), ("dsa", "zai-org/GLM-5")])
def test_a_module_is_a_whole_attention_layer(name: str, repository: str, tmp_path: Path) -> None:
    model, other = load_model(repository), "another/model-of-an-unknown-shape"
    heads = model.attention.heads // 8
    formats = f"{repository},bfloat16,fp8_block,{heads}"
    modules = {
        f"{name}_context_module": [
            MODULE,
            f"c,{formats},1,256,0,0.4", f"c,{formats},1,512,0,0.7", f"c,{formats},4,256,0,9", f"c,{formats},1,256,64,9",
            f"c,{other},bfloat16,fp8_block,{heads},1,256,0,9",
        ],
        f"{name}_generation_module": [
            MODULE,
            f"g,{formats},8,1,1023,0.11", f"g,{formats},8,1,4095,0.13", f"g,{formats},16,1,1023,0.2",
            f"g,{formats},16,1,4095,0.3",
        ],
    }  # fmt: skip
    tables = tables_of(tmp_path, **modules)
    placement = Placement(tensor_parallel=8, weights="fp8_block")
    context, generation = attention_times(tables, model, placement)
    layers = model.layers
    assert [context.at(tokens) for tokens in (256, 512)] == pytest.approx([layers * 0.4e-3, layers * 0.7e-3])
    rows = {(8, 1024): 0.11e-3, (8, 4096): 0.13e-3, (16, 1024): 0.2e-3, (16, 4096): 0.3e-3}
    for (count, cached), seconds in rows.items():
        assert generation.at(count, cached) == pytest.approx(layers * seconds)
    with pytest.raises(BadInput, match=f"{name}_context_module: got ModuleKind"):
        attention_times(tables, model, Placement(tensor_parallel=4, weights="fp8_block"))


def test_linear_attention_adds_a_convolution_and_the_fastest_recurrence(tmp_path: Path) -> None:
    model = load_model("qwen3.5-397b-a17b")
    shape = "2,128,8,128"  # a rank of 8
    rows = [
        STATE,
        f"gdn,causal_conv1d_fn,context,1,512,{shape},0.02", f"gdn,chunked,context,1,512,{shape},0.03",
        f"gdn,causal_conv1d_update,generation,64,1,{shape},0.005", f"gdn,packed,generation,64,1,{shape},0.015",
        f"gdn,slower,generation,64,1,{shape},0.1", f"gdn,causal_conv1d_update,generation,1,1,{shape},0.001",
        f"gdn,packed,generation,1,1,{shape},0.002", f"gdn,causal_conv1d_fn,context,1,4096,{shape},0.2",
    ]  # fmt: skip  # the last has no recurrence
    tables = tables_of(tmp_path, AttentionKind("float16", "float16", 4, 1, 256), gdn=rows)
    context, generation = attention_times(tables, model, Placement(tensor_parallel=8))
    assert context.at(512) == pytest.approx(15 * 2e-3 + 45 * 0.05e-3)
    assert generation.at(64, 100) == generation.at(64, 8000) == pytest.approx(15 * 1e-3 + 45 * 0.02e-3)
    assert generation.at(1, 100) == pytest.approx(15 * 1e-3 + 45 * 0.003e-3)


def test_windows_have_kernels_of_their_own(tmp_path: Path) -> None:
    model = load_model("gpt-oss-120b")
    kinds = [AttentionKind("float16", "float16", 64, 8, 64, window) for window in (0, 128)]
    context = {kind: Curve([(1.0, seconds)]) for kind, seconds in zip(kinds, (2e-3, 1e-3), strict=True)}
    generation = {kind: Surface({1: Curve([(1.0, 3e-3)])}) for kind in kinds}
    tables = KernelTables(tmp_path, {"context_attention": context, "generation_attention": generation})
    prompts, decodes = attention_times(tables, model, Placement())
    assert (prompts.at(1), decodes.at(1, 1)) == pytest.approx((18 * 3e-3, 36 * 3e-3))
    del context[kinds[1]]
    with pytest.raises(BadInput, match=r"context_attention: got AttentionKind\(.*head_dim=64"):
        attention_times(tables, model, Placement())


def test_tables_of_a_convolution_alone_are_named(tmp_path: Path) -> None:
    """Mamba-2's have columns of other names, and no recurrence."""
    rows = ["op_name,kernel_source,nheads,latency", "mamba2,causal_conv1d_fn,32,0.1"]
    tables = tables_of(tmp_path, AttentionKind("float16", "float16", 32, 2, 128), mamba2=rows)
    with pytest.raises(
        BadInput, match="mamba2: expected the recurrence of mamba2, of which these tables have no timing"
    ):
        attention_times(tables, load_model("nemotron-3-nano-30b-a3b"), Placement())
