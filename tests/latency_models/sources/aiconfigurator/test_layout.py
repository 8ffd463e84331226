"""Tables are found in each layout in which they have been published, and missing ones are told."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest

from latency_models.io.files import read_columns
from latency_models.sources.aiconfigurator.kernels import Placement, compose, model_and_format
from latency_models.sources.aiconfigurator.layout import (
    data_folder,
    flat_tables,
    packaged_tables,
    systems,
    version_key,
)
from latency_models.sources.aiconfigurator.tables import read_tables
from tests.latency_models.sources.aiconfigurator.small_tables import SYSTEM, make_tables
from tests.latency_models.sources.aiconfigurator.test_kernels import model
from workloads.errors import BadInput

FAMILIES = {
    "gemm": "gemm", "context_attention": "attention", "generation_attention": "attention", "moe": "moe",
    "custom_allreduce": "comm",
}  # fmt: skip
"""The small tables, and the folder of each."""


def as_parquet(source: Path, target: Path) -> None:
    """Today's form of a table: Parquet, 16 bits called bfloat16, and a column of attention windows."""
    text = gzip.decompress(source.read_bytes()).decode().replace("float16", "bfloat16")
    if "attention" in source.name:
        header, *rows = text.splitlines()
        # A windowed kernel of each shape, whose time must not be taken for another's.
        windowed = [",".join([*row.split(",")[:-1], "99.0"]) + ",128" for row in rows]
        text = "\n".join([f"{header},window_size", *(f"{row},0" for row in rows), *windowed])
    target.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(pyarrow.BufferReader(text.encode())), target)


@pytest.fixture
def data(tables: Path, tmp_path: Path) -> Path:
    """The small tables as `systems/data` of a package, and the all-reduces in an earlier version alone."""
    root = tmp_path / "package" / "systems"
    for name, family in FAMILIES.items():
        version = "0.9.0" if family == "comm" else "0.24.0"
        target = root / "data" / "lab" / family / "vllm" / version / f"{name}_perf.parquet"
        as_parquet(tables / f"{name}_perf.txt.gz", target)
    (root / "lab.yaml").write_text(SYSTEM)
    return root / "data"


def test_a_package_reads_as_its_tables_did(tables: Path, data: Path) -> None:
    """The same kernels from today's layout as from a folder of gzipped CSV."""
    placement = Placement(tensor_parallel=2)
    then, now = (
        compose(read_tables(source), model(), placement) for source in (tables, packaged_tables(data, "lab", "vllm"))
    )
    assert (now.rows, now.head, now.context, now.generation) == (then.rows, then.head, then.context, then.generation)
    assert now.kv_token == then.kv_token > 0
    assert "custom_allreduce: of vllm 0.9.0, since 0.24.0 has no such table" in now.notes


def test_tables_that_are_not_read_are_named(data: Path) -> None:
    """With the reason, once for all tables that share it."""
    for family, table in (("moe", "wideep_moe"), ("comm", "wideep_deepep_ll"), ("msa", "msa_context_module")):
        folder = data / "lab" / family / "vllm" / "0.24.0"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{table}_perf.parquet").touch()
    notes = [note for note in packaged_tables(data, "lab", "vllm").notes if note.startswith("not read")]
    assert [note.partition(" (")[0] for note in notes] == [
        "not read: msa_context_module", "not read: wideep_deepep_ll, wideep_moe"
    ]  # fmt: skip


@pytest.mark.parametrize("part", ["", "systems", "systems/data"])
def test_a_package_is_found_by_any_of_its_folders(data: Path, part: str) -> None:
    assert data_folder(data.parents[1] / part) == data
    assert systems(data) == {"lab": {"vllm": ["0.24.0"]}}


def test_the_layout_between_has_a_folder_for_each_version(tables: Path, tmp_path: Path) -> None:
    for version in ("0.8.5", "0.12.0"):
        folder = tmp_path / "systems" / "data" / "lab" / "vllm" / version
        folder.mkdir(parents=True)
        for path in tables.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    data = tmp_path / "systems" / "data"
    assert systems(data) == {"lab": {"vllm": ["0.8.5", "0.12.0"]}}
    result = packaged_tables(data, "lab", "vllm")
    assert (result.version, result.notes) == ("0.12.0", ())
    assert read_tables(result).tables == read_tables(tables).tables


def test_a_later_version_never_fills_a_gap(data: Path) -> None:
    moe = data / "lab" / "moe" / "vllm"
    (moe / "0.24.0").rename(moe / "0.26.0")
    assert packaged_tables(data, "lab", "vllm").path("moe") is None


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (("h300", "vllm", None), "--system: got 'h300', expected one of lab"),
        (("lab", "sglang", None), "--backend: got 'sglang', expected one of vllm"),
        (("lab", "vllm", "0.7.0"), "--version: got '0.7.0', expected one of 0.24.0"),
    ],
)
def test_tables_that_are_not_there(data: Path, query: tuple[str, str, str | None], message: str) -> None:
    with pytest.raises(BadInput) as error:
        packaged_tables(data, *query)
    assert str(error.value) == message


def test_a_missing_table_is_named_when_it_is_read(tmp_path: Path) -> None:
    folder = make_tables(tmp_path / "lab_engine_1.0")
    (folder / "generation_attention_perf.txt.gz").unlink()
    assert flat_tables(folder).path("generation_attention") is None
    with pytest.raises(BadInput, match=r"generation_attention_perf.txt.gz: expected a readable file"):
        read_tables(folder)


def test_versions_sort_by_number_and_candidates_come_first() -> None:
    versions = ["0.5.6.post2", "0.5.14", "1.3.0", "1.3.0rc20", "1.3.0rc9", "0.24.0"]
    ordered = ["0.5.6.post2", "0.5.14", "0.24.0", "1.3.0rc9", "1.3.0rc20", "1.3.0"]
    assert sorted(versions, key=version_key) == ordered


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "gemm_perf.parquet"
    path.write_bytes(b"m,n,k\n1,2,3\n")
    with pytest.raises(BadInput, match=r"gemm_perf.parquet: expected a Parquet file"):
        read_columns(path)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama-3.1-8b", "float16"),
        ("Llama-3.1-8B-FP8", "fp8"),
        ("qwen3-30b-a3b-fp8", "fp8_block"),
        ("MiniMaxAI/MiniMax-M2.5", "fp8_block"),
    ],
)
def test_a_name_tells_the_format(name: str, weights: str) -> None:
    result, message = model_and_format(name)
    assert result.name == name.lower().rpartition("/")[2].removesuffix("-fp8")
    assert message == weights


@pytest.mark.parametrize(
    ("section", "weights"),
    [
        ("null", "float16"),
        ('{"quant_method": "fp8"}', "fp8"),
        ('{"quant_method": "fp8", "weight_block_size": [128, 128]}', "fp8_block"),
    ],
)
def test_a_config_tells_its_format(tmp_path: Path, section: str, weights: str) -> None:
    path = tmp_path / "config.json"
    sizes = '"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100'
    sizes += ', "intermediate_size": 128'
    path.write_text(f'{{"model_type": "llama", {sizes}, "quantization_config": {section}}}')
    assert model_and_format(str(path))[1] == weights
    path.write_text(path.read_text().replace('"quantization_config": ', '"quantization_config": ["awq"], "y": '))
    with pytest.raises(BadInput, match=r"quantization_config: got \['awq'\], expected an object of fields"):
        model_and_format(str(path))
