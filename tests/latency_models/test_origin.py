"""The origin of imported tables is read and completed, and a scenario that contradicts it is refused."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from latency_models.deployment.models import Model, load_model
from latency_models.io.config_io import read_yaml
from latency_models.sources.aiconfigurator.kernels import ModelKernels, Placement, compose
from latency_models.sources.aiconfigurator.tables import read_tables
from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.registry import source_of
from latency_models.step_time import Origin, plain_name
from tests.latency_models.sources.aiconfigurator import small_tables as kernels
from tests.latency_models.sources.aiconfigurator.test_kernels import model
from tests.latency_models.sources.kernel_tables import small_tables as profiler
from twin.cli import run
from workloads.errors import BadInput

H200 = Origin("NVIDIA H200", "vllm", "0.12.0", "qwen3-32b", 2)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """aiconfigurator's, with a system file."""
    return kernels.make_tables(tmp_path / "lab_engine_1.0")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """LLMServingSim's, whose notes name GPU, model and vLLM's version."""
    return profiler.make_tables(tmp_path / "kernels")


def say_device(folder: Path) -> None:
    """The columns that the published tables have before the others."""
    path = folder / "gemm_perf.txt.gz"
    header, *rows = gzip.decompress(path.read_bytes()).decode().split("\n")
    kernels.write(path, f"framework,version,device,{header}", [f"VLLM,0.12.0,NVIDIA H200,{row}" for row in rows])


def test_flags_say_what_the_source_does_not() -> None:
    bare = Origin("NVIDIA H200", tensor_parallel=2)
    assert bare.completed(replace(H200, gpu="")) == H200
    assert H200.completed(Origin()) == H200
    assert Origin(**H200.document()) == H200
    assert Origin().document() == {}
    assert [note.split("; ")[1] for note in bare.unknown] == [
        "--engine records it",
        "--engine-version records it",
        "--model records it",
    ]
    with pytest.raises(BadInput, match=r"^--tensor-parallel: got 4, expected 2, as the tables say$"):
        bare.completed(Origin(tensor_parallel=4))


def test_a_model_is_the_same_however_it_is_spelt() -> None:
    source = Origin(model="meta-llama/Llama-3.1-8B")
    assert source.completed(Origin(model="llama-3.1-8b")) == source
    with pytest.raises(BadInput, match=r"^--model: got 'llama-3.1-70b', expected meta-llama/Llama-3.1-8B, as the"):
        source.completed(Origin(model="llama-3.1-70b"))


def test_kernels_record_what_their_tables_say_and_their_model(tables: Path) -> None:
    say_device(tables)
    result = compose(read_tables(tables), model(), Placement(tensor_parallel=2, expert_tensor_parallel=2))
    assert result.origin == Origin("NVIDIA H200", "vllm", "0.12.0", "small", 2)
    assert ModelKernels.from_document(result.document()) == result
    old = {name: value for name, value in result.document().items() if name != "origin"}
    assert ModelKernels.from_document(old) == replace(result, origin=Origin())


def test_an_unknown_bandwidth_is_said(tables: Path) -> None:
    assert not [note for note in compose(read_tables(tables), model(), Placement()).notes if "kv_token" in note]
    (tables.parent / "systems" / "lab.yaml").unlink()
    result = compose(read_tables(tables), model(), Placement())
    assert result.kv_token == 0.0
    assert [
        note
        for note in result.notes
        if note.startswith("kv_token is 0, no bound on decode attention: no file in ../sys")
    ]


def test_profiled_tables_record_flags_in_their_provenance(profile: Path) -> None:
    (profile / "meta.yaml").unlink()
    content = read_kernel_tables(profile)
    assert content.origin == Origin(tensor_parallel=1)
    recorded = content.recorded(H200)
    assert recorded.origin == H200
    assert recorded.provenance.versions == {"vllm": "0.12.0"}


def test_tables_may_be_plain_text(tables: Path) -> None:
    zipped = read_tables(tables)
    for path in tables.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert source_of(tables) == "aiconfigurator"
    assert read_tables(tables).tables == zipped.tables


def test_weights_in_fp8_say_what_else_runs_in_16_bits(tmp_path: Path) -> None:
    folder = kernels.make_tables(tmp_path / "lab_engine_1.0", formats=("fp8",))
    message = r"gemm_dtype: expected GEMMs in float16 too: the output head and routers run in it .*, found fp8$"
    with pytest.raises(BadInput, match=message):
        compose(read_tables(folder), model(), Placement(weights="fp8"))


def test_a_folder_of_another_source_is_named(tables: Path, profile: Path, tmp_path: Path) -> None:
    hint = r"the folder looks like one of source"
    with pytest.raises(BadInput, match=rf"expected a file dense.csv or dense.csv.gz; {hint} aiconfigurator$"):
        read_kernel_tables(tables)
    with pytest.raises(
        BadInput, match=rf"expected a file gemm_perf.parquet, gemm_perf.txt or .*; {hint} kernel_tables$"
    ):
        read_tables(profile)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"expected a file dense.csv or dense.csv.gz$"):
        read_kernel_tables(tmp_path / "empty")


def test_an_import_says_what_it_records_and_what_is_not_known(
    tables: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "made.yaml"
    assert run(["calibrate", "import", str(profile), "--tensor-parallel", "2", "-o", str(result)]) == 0
    assert read_kernel_tables(result).origin == Origin("Some GPU", "vllm", "0.19.0", "lab/tiny", 2)
    assert capsys.readouterr().err == ""
    (profile / "meta.yaml").unlink()
    flags = ["--gpu", "NVIDIA H200", "--engine", "sglang", "--engine-version", "0.5"]
    assert run(["calibrate", "import", str(profile), "-o", str(result), *flags]) == 0
    assert read_kernel_tables(result).origin == Origin("NVIDIA H200", "sglang", "0.5", "", 1)
    message = capsys.readouterr().err
    assert "the tables do not say their model; --model records it" in message
    assert "taken as 1 rank" in message
    (tmp_path / "small.yaml").write_text(_yaml(model()))
    line = ["calibrate", "import", str(tables), "--model", str(tmp_path / "small.yaml"), "-o", str(result)]
    assert run([*line, "--gpu", "Lab GPU"]) == 0
    assert read_yaml(result)["origin"] == {"gpu": "Lab GPU", "model": "small", "tensor_parallel": 1}
    assert "the tables do not say their engine version; --engine-version records it" in capsys.readouterr().err


def _yaml(model: Model) -> str:
    from latency_models.io.config_io import write_yaml

    return write_yaml(model.model_dump(mode="json", by_alias=True, exclude_none=True))


def test_built_in_models_have_plain_names_of_their_own() -> None:
    from latency_models.io.files import builtin_names

    names = builtin_names("models")
    assert len({plain_name(name) for name in names}) == len(names)
    assert all(load_model(name).name == name for name in names)
