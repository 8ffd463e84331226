"""Folders and files of kernel tables: what is read, what comes back from a document, and every fault in one line."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from latency_models.io.config_io import read_yaml_text, write_yaml
from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.kernel_tables.tables import KernelTables
from tests.latency_models.sources.kernel_tables.small_tables import decode_time, make_tables, mixed_time, prefill_time
from workloads.errors import BadInput

SKEW = "regime,n,nb,ratio,skew,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_max_us,t_skew_us,alpha"


def add_skew(folder: Path) -> Path:
    """Nine shots of four decodes, α 0.5 throughout."""
    shots = [f"pure,4,1,0.25,4.0,0,0,{kv},{4 * kv},{7 * kv // 4},10,30,20,0.5" for kv in (128, 256, 512)] * 3
    (folder / "skew.csv").write_text("\n".join([SKEW, *shots]) + "\n")
    return folder


def add_experts(folder: Path) -> Path:
    rows = [f"{ep},{n},{e},{10 + n + 100 * e / ep}" for ep in (1, 2) for n in (1, 64) for e in (1, 4)]
    (folder / "moe.csv").write_text("\n".join(["ep,tokens,activated_experts,time_us", *rows]) + "\n")
    return folder


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_what_is_read(folder: Path) -> None:
    tables = read_kernel_tables(add_experts(add_skew(folder)))
    assert tables.tensor_parallel == 1
    assert tables.dense["qkv_proj"].points()[(1,)] == 10.3
    regimes = tables.attention.regimes
    assert regimes.decode[4, 128] == decode_time(4, 128)
    assert regimes.prefill[64, 512] == prefill_time(64, 512)
    assert regimes.mixed[64, 512, 4, 128] == mixed_time(64, 512, 4, 128)
    assert tables.moe.of_degree(2) == {(1, 1): 61.0, (1, 4): 211.0, (64, 1): 124.0, (64, 4): 274.0}
    assert tables.moe.of_degree(4) == {}
    assert tables.skew.alphas("pure", 4) == [0.5] * 6


@pytest.mark.parametrize("message", ["skew_profile: {enabled: false}", "skew_profile: false"])
def test_shots_that_the_notes_disable_are_not_used(folder: Path, message: str) -> None:
    """A profiler may leave another machine's shots behind; its notes say so."""
    notes = add_skew(folder) / "meta.yaml"
    notes.write_text(f"{notes.read_text()}\n{message}\n")
    assert read_kernel_tables(folder).skew is None
    notes.write_text(notes.read_text().replace("false", "perhaps"))
    with pytest.raises(BadInput, match=r"meta.yaml: skew_profile.enabled: got 'perhaps', expected true or false"):
        read_kernel_tables(folder)


def test_where_it_came_from(folder: Path) -> None:
    source = read_kernel_tables(folder).provenance
    assert (source.device, source.model, str(source.date)) == ("Some GPU", "lab/tiny", "2026-04-24")
    assert source.versions == {"vllm": "0.19.0", "profiler": "1.0.0"}
    assert source.note == "mean of 3 forward passes a point"
    assert source.files["dense.csv"] == hashlib.sha256((folder / "dense.csv").read_bytes()).hexdigest()
    (folder / "meta.yaml").unlink()
    assert read_kernel_tables(folder).provenance.device == "unknown"
    (folder.parent / "kernels_meta.yaml").write_text("gpu: Another\nprofiled_at: someday\n")
    source = read_kernel_tables(folder).provenance
    assert (source.device, source.date) == ("Another", None)


def test_gzipped_and_plain_are_the_same(folder: Path) -> None:
    plain = read_kernel_tables(folder)
    for path in folder.glob("*.csv"):
        path.with_suffix(".csv.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    zipped = read_kernel_tables(folder)
    assert (zipped.dense, zipped.attention) == (plain.dense, plain.attention)
    assert set(zipped.provenance.files) == {"dense.csv.gz", "per_sequence.csv.gz", "attention.csv.gz"}


def test_the_folder_says_how_many_ranks(tmp_path: Path) -> None:
    assert read_kernel_tables(make_tables(tmp_path / "tp4")).tensor_parallel == 4
    assert read_kernel_tables(make_tables(tmp_path / "some")).tensor_parallel == 1


def test_a_document_reads_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    tables = read_kernel_tables(add_experts(add_skew(folder)), describe=True)
    path = tmp_path / "tables.yaml"
    path.write_text(write_yaml(tables.document()))
    assert read_kernel_tables(path) == tables
    assert KernelTables.from_document(read_yaml_text(path.read_text())) == tables
    assert tables.ranges["attention.kv_decode"] == (0.0, 1024.0)
    assert tables.held_out["attention.mixed.kv_prefill"].p90 == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (
            "dense",
            "qkv_proj,64,29.2",
            "qkv_proj,64,fast",
            "dense.csv:12: time_us: got 'fast', expected a finite number",
        ),
        ("dense", "qkv_proj,64,", "qkv_proj,32,", "dense.csv:12: tokens: got '32', expected each point once"),
        ("dense", "qkv_proj,64,", "qkv_proj,0.5,", "tokens: got '0.5', expected a whole number of at least 1"),
        ("dense", "layer,tokens", "layer,rows", "dense.csv:1: tokens: expected this column, found layer, rows"),
        ("per_sequence", "lm_head,1,22", "lm_head,1,0", "per_sequence.csv:2: time_us: got '0', expected a finite"),
        ("attention", "0,0,1,16,", "0,0,0,16,", "attention.csv:2: n_decode: got '0', expected at least 1"),
        ("attention", "0,0,1,128,", "0,0,1,16,", "attention.csv:3: n_decode: got '1', expected each point once"),
        ("attention", "0,0,1,16,", "0,0,-1,16,", "expected a whole number of at least 0"),
        ("skew", "pure,4", "odd,4", "skew.csv:2: regime: got 'odd', expected pure or mixed"),
        ("skew", "kvs,kv_big", "kvs,kv_max", "skew.csv:1: kv_big: expected this column"),
        ("moe", "1,1,1,", "0,1,1,", "moe.csv:2: ep: got '0', expected a whole number of at least 1"),
        ("moe", "1,1,4,", "1,1,1,", "moe.csv:3: tokens: got '1', expected each point once"),
    ],
)
def test_faults_of_tables(folder: Path, file: str, old: str, new: str, expected: str) -> None:
    add_experts(add_skew(folder))
    change(folder / f"{file}.csv", old, new)
    with pytest.raises(BadInput) as error:
        read_kernel_tables(folder)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_regime_that_was_not_measured(folder: Path) -> None:
    path = folder / "attention.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if line.startswith(("prefill", "0,0,"))))
    with pytest.raises(BadInput, match=r"attention.csv: n_decode: expected points of a prompt alone"):
        read_kernel_tables(folder)


def test_files_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected a folder of kernel tables, or a YAML file"):
        read_kernel_tables(tmp_path / "absent")
    (folder / "attention.csv").unlink()
    with pytest.raises(BadInput, match=r"kernels_tp1: expected a file attention.csv or attention.csv.gz"):
        read_kernel_tables(folder)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema: twin.step-time/1", "schema: twin.step-time/2", "schema"),
        ("rows: 1 32 64 512", "rows: 1 32 64", "dense.act_fn.rows: got 3, expected as many numbers as time_us has (4)"),
        ("rows: 1 32 64 512", "rows: 1 32 64 64", "dense.act_fn.rows: got [64], expected each point once"),
        ("rows: 1 32 64 512", "rows: 1 32 64 many", "dense.act_fn.rows"),
        ("rows: 1 32 64 512", "rows: 1 32 64 -2", "dense.act_fn.rows"),
        ("kind: kernel-tables", "kind: other", "kind"),
    ],
)
def test_faults_of_documents(tmp_path: Path, old: str, new: str, expected: str) -> None:
    folder = make_tables(tmp_path / "tp1", layers={"act_fn": 1.0})
    path = tmp_path / "tables.yaml"
    path.write_text(write_yaml(read_kernel_tables(folder).document()))
    change(path, old, new)
    with pytest.raises(BadInput) as error:
        read_kernel_tables(path)
    assert str(error.value).startswith(f"{path}")
    assert expected in str(error.value)
