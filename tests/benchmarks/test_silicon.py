"""Reading measured points."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.silicon import SiliconRow, read_silicon_rows
from latency_models.deployment.models import load_model
from latency_models.sources.aiconfigurator.kernels import Placement
from tests.latency_models.sources.aiconfigurator.small_tables import write
from workloads.errors import BadInput

ROW = {
    "id": "one",
    "silicon_data_source": "source_file=/data/Qwen3-32B.csv; silicon_concurrency=8",
    "backend": "trtllm",
    "model_path": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "128",
    "batch_size": "8.0",
    "tp_size": "2.0",
    "pp_size": "1.0",
    "moe_tp_size": "1.0",
    "moe_ep_size": "1.0",
    "silicon_ttft_ms": "271.5",
    "silicon_tpot_ms": "18.5",
    "split": "calib",
    "duplicate": "False",
    "kernel_tables": "h100_sxm_trtllm_1.0.0rc3",
}


def read(tmp_path: Path, *changes: dict[str, str]) -> list[SiliconRow]:
    path = tmp_path / "points.csv.gz"
    write(path, ",".join(ROW), [",".join((ROW | change).values()) for change in changes])
    return read_silicon_rows(path)


def test_a_row_is_in_seconds_and_knows_its_model(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {})
    assert [row.ttft, row.tpot] == pytest.approx([0.2715, 0.0185])
    assert (row.model, row.precision, row.isl, row.osl, row.concurrency) == ("qwen3-32b", "fp8", 1024, 128, 8)
    assert (row.tensor_parallel, row.split, row.tables) == (2, "calib", "h100_sxm_trtllm_1.0.0rc3")


def test_inferencex_lengths_are_nine_tenths_in_the_mean(tmp_path: Path) -> None:
    (row,) = read(tmp_path, {"silicon_data_source": "source_file=2026-04-06.csv; model=Llama-3.1-70B"})
    assert [row.isl, row.osl] == pytest.approx([921.6, 115.2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_path": "a/Unknown-7B"}, r":2: model_path: got 'a/Unknown-7B', expected one of"),
        ({"precision": "int3"}, r":2: precision: got 'int3', expected bf16, fp8 or nothing"),
        ({"pp_size": "2"}, r":2: pp_size: got '2', expected 1: pipelines are not known here"),
        ({"osl": "1"}, r":2: osl: got '1', expected a whole number of at least 2"),
        ({"batch_size": "0"}, r":2: batch_size: got '0', expected a finite number above 0"),
        ({"silicon_tpot_ms": ""}, r":2: silicon_tpot_ms: got '', expected a finite number above 0"),
    ],
)
def test_a_cell_that_will_not_do_is_told(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(tmp_path, change)


def test_formats_follow_precision_backend_and_kind_of_model(tmp_path: Path) -> None:
    dense, sparse = load_model("qwen3-32b"), load_model("qwen3-235b-a22b")
    trtllm, vllm, wide = read(
        tmp_path, {}, {"backend": "vllm", "moe_tp_size": "4"}, {"precision": "", "moe_ep_size": "2", "moe_tp_size": "2"}
    )
    assert trtllm.placement(dense) == Placement(2, 1, 1, "fp8", "fp8", "fp8")
    assert vllm.placement(dense) == Placement(2, 1, 1, "fp8", "fp8", "float16")
    assert vllm.placement(sparse) == Placement(2, 4, 1, "fp8_block", "float16", "float16")
    assert wide.placement(sparse) == Placement(2, 2, 2, "float16", "float16", "float16")


def test_the_published_points(real_rows: Path) -> None:
    rows = read_silicon_rows(real_rows)
    assert Counter(row.split for row in rows) == {"calib": 279, "dev": 113}
    assert Counter(row.backend for row in rows) == {"trtllm": 260, "vllm": 132}
    assert {round(row.isl, 6) for row in rows if row.model == "llama-3.1-70b"} == {921.6, 7372.8}
    assert min(row.tpot for row in rows) == pytest.approx(3.294469e-3)
