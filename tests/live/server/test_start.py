"""A server that cannot start ends with one line and exit code 2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from live import device
from live.server.loading import default_cache_bytes
from live.server.options import MAX_SETTING

DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
Refuse = Callable[..., str]


@pytest.fixture
def refuse(refusal: Refuse, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """The line with which the server refuses to start, on a machine with 8 GiB available."""
    monkeypatch.setattr(device, "available_bytes", lambda device: 8 << 30)

    def refused(*flags: str | Path) -> str:
        line = refusal("serve-live", *flags)
        assert len(line) < 500
        return line

    return refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-gpu-blocks 1000000000000",
            "got 1000000000000, expected less: blocks of 4096 bytes take 3,814,697.27 GiB",
        ),
        ("--num-gpu-blocks 1" + "0" * 400, "expected less: blocks of 4096 bytes take"),
        ("--kv-cache-memory-bytes 1e18", "expected less: blocks of 4096 bytes take 931,322,574.62 GiB of cpu"),
        ("--kv-cache-memory-bytes 8202M", "take 8.01 GiB of cpu memory, and 8.00 GiB are available"),
        ("--kv-cache-memory-bytes 1e300", "got 1e+300, expected memory for a block at least (4096 bytes), and at most"),
        ("--kv-cache-memory-bytes 4k", "got 4000.0, expected memory for a block at least (4096 bytes), and at most"),
        ("--kv-cache-memory-bytes nan", "got 'nan', expected a number of bytes, such as 2e9, 512M or 4G"),
        ("--kv-cache-memory-bytes 1..2G", "got '1..2G', expected a number of bytes, such as"),
        ("--threads 100000", "got 100000, expected 1 to "),
        ("--threads 0", "got 0, expected 1 to "),
        (f"--max-num-seqs {10**12} --max-num-batched-tokens {10**12}", "block tables of so many sequences take"),
        ("--num-gpu-blocks 0", "expected a whole number from 1 up"),
        ("--num-gpu-blocks 5 --kv-cache-memory-bytes 1G", "found both"),
        ("--kv-cache-memory-bytes 0", "expected memory for a block at least"),
        ("--max-num-seqs 0", "expected a whole number from 1 up"),
        ("--max-queue 0", "expected a whole number from 1 up"),
        ("--max-concurrency 0", "expected a whole number from 1 up"),
        ("--drain-seconds 0", "expected a number above 0"),
        ("--header-seconds 0", "expected a number above 0"),
        ("--body-seconds inf", "expected a number above 0"),
        ("--write-seconds -1", "expected a number above 0"),
        ("--max-body-mib 1e308", f"got 1e+308, expected a number above 0, of at most {MAX_SETTING:g}"),
        ("--drain-seconds inf", "got inf, expected a number above 0"),
    ],
    ids=lambda value: value[:30],
)
def test_settings_beyond_the_machine_or_the_range(flags: str, message: str, folder: Path, refuse: Refuse) -> None:
    line = refuse("--model", folder / "config.json", "--random-weights", *flags.split())
    assert message in line
    assert flags.split()[0] in line or "found both" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere"], "expected a readable file"),
        (["--tokenizer", "/nowhere"], "tokenizer.json"),
        (["--host", "192.0.2.1"], "--host, --port"),
        (["--port", "99999"], "--host, --port"),
        (["--host", ""], "--host: "),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size: got 0, expected a whole number from 1 up"),
        (["--tensor-parallel-size", "7"], "tensor_parallel_size: got 7, expected a divisor of the model's"),
        (["--tensor-parallel-size", "2", "--lora-modules", "a=b"], "--tensor-parallel-size: got 2, expected none"),
    ],
    ids=" ".join,
)
def test_places_that_do_not_exist(flags: list[str], message: str, folder: Path, refuse: Refuse) -> None:
    model = [] if "--model" in flags else ["--model", folder / "config.json"]
    assert message in refuse("--random-weights", *model, *flags)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_files_that_are_nested_too_deeply(name: str, folder: Path, tmp_path: Path, refuse: Refuse) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    document = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (tmp_path / name).write_text(json.dumps({**document, "model": "@"}).replace('"@"', DEEP))
    line = refuse("--model", tmp_path / "config.json", "--random-weights", "--tokenizer", tmp_path)
    assert str(tmp_path / name) in line


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (DEEP, "expected JSON nested at most 64 deep"),
        ('{"weight_map": ["model.safetensors"]}', "weight_map: got ['model.safetensors'], expected an object"),
        ('{"weight_map": {}}', "weight_map: got {}, expected an object of shards by tensor"),
        ('{"weight_map": {"a": 5, "b": "x"}}', "weight_map.a: got 5, expected a file name"),
        ('{"weight_map": {"a": ["x"]}}', "weight_map.a: got ['x'], expected a file name"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "weight_map.a: got '../x.safetensors', expected a file name"),
        ('{"weight_map": {"a": "x.safetensors"}}', "x.safetensors: expected this shard, which the index lists"),
    ],
)
def test_an_index_of_shards_that_is_none(
    index: str, message: str, folder: Path, tmp_path: Path, refuse: Refuse
) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert message in refuse("--model", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 10**400}, "rope_theta: got 1000"),
        ({"hidden_size": 10**9}, "expected less: weights in float32 take "),
        ({"num_hidden_layers": 10**9}, "expected less: weights in float32 take "),
        ({"vocab_size": 10**9}, "expected less: weights in float32 take "),
        ({"head_dim": 10**6, "max_position_embeddings": 10**9}, "expected less: weights in float32 take "),
    ],
)
def test_models_beyond_the_machine(
    change: dict[str, int], message: str, folder: Path, tmp_path: Path, refuse: Refuse
) -> None:
    document = json.loads((folder / "config.json").read_text()) | change
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    line = refuse("--model", file, "--random-weights")
    assert message in line
    assert str(file) in line


def test_by_default_the_kv_cache_takes_what_a_gpu_has_free_beside_the_largest_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("live.server.loading.available_bytes", lambda device: 100 << 30)
    steps: list[tuple[int, int]] = []

    def peak(sequences: int, tokens: int) -> int:
        steps.append((sequences, tokens))
        return 3 << 30

    loaded = {device: SimpleNamespace(device=device, peak_step_bytes=peak) for device in ("cpu", "cuda")}
    assert default_cache_bytes(loaded["cpu"], 8, 512) == 1 << 30  # type: ignore[arg-type]
    assert steps == []
    assert default_cache_bytes(loaded["cuda"], 8, 512) == (90 << 30) - (3 << 30)  # type: ignore[arg-type]
    assert steps == [(8, 512)]
