"""`twin calibrate import` of aiconfigurator's tables: what is written, what is said, what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from latency_models.io.config_io import read_yaml, write_yaml
from latency_models.sources.aiconfigurator.kernels import ModelKernels
from latency_models.sources.kernel_tables.settings import Communication, note, resolve
from tests.latency_models.sources.aiconfigurator.small_tables import make_tables
from tests.latency_models.sources.aiconfigurator.test_kernels import model
from twin import cli


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small tables in a folder, and in the layout with a folder for each version; and a model of theirs."""
    make_tables(tmp_path / "lab_engine_1.0")
    inner = tmp_path / "data" / "lab" / "vllm" / "1.0"
    make_tables(inner)
    (tmp_path / "tiny.yaml").write_text(write_yaml(model().model_dump(mode="json", by_alias=True, exclude_none=True)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> int:
    return cli.run(["calibrate", "import", *words])


def test_every_parallelism_that_the_tables_have(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of one and of two ranks were timed: two files, and a line for those that are not there."""
    assert run("data", "--system", "lab", "--model", "./tiny.yaml", "--all", "-o", "kernels") == 0
    names = sorted(path.name for path in (here / "kernels").iterdir())
    assert names == [f"{model().name}-lab-vllm-1.0-float16-tp{degree}.yaml" for degree in (1, 2)]
    for degree, name in zip((1, 2), names, strict=True):
        kernels = ModelKernels.from_document(read_yaml(here / "kernels" / name))
        assert kernels.origin.tensor_parallel == degree
    message = capsys.readouterr().err
    assert f"{model().name} on 2 × devices that the tables do not name, vllm 1.0: weights in float16" in message
    assert "no file for tensor parallel 4: " in message
    assert "no bound on decode attention" in message  # no system file beside data/


def test_one_folder_is_as_before(here: Path) -> None:
    assert run("lab_engine_1.0", "--model", "./tiny.yaml", "--gpu", "Some GPU", "-o", "one.yaml") == 0
    kernels = ModelKernels.from_document(read_yaml(here / "one.yaml"))
    assert (kernels.origin.gpu, kernels.origin.tensor_parallel) == ("Some GPU", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "TABLES: expected a folder of tables, or --aiconfigurator"),
        (("data", "--system", "lab", "--all"), "--all: expected --output, a folder"),
        (("data", "--system", "lab"), "--model: expected a model"),
        (("data", "--system", "lab", "--model", "./tiny.yaml", "--backend", "sglang"), "--backend: got 'sglang'"),
        (("lab_engine_1.0", "--system", "lab", "--model", "./tiny.yaml"), "--system: got 'lab', expected none"),
        (("data", "--system", "lab", "--model", "gpt-oss-20b"), "got 'gpt-oss-20b (bf16, experts in mxfp4)'"),
        (
            ("data", "--system", "lab", "--model", "gpt-oss-20b", "--weights", "float16"),
            "context_attention: got AttentionKind(",
        ),
        (("data", "--system", "lab", "--model", "./tiny.yaml", "--tensor-parallel", "4"), "expected one of"),
    ],
)
def test_what_cannot_be_imported(
    here: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_the_package_that_is_not_installed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latency_models.sources.aiconfigurator.layout.PACKAGES", ("no_such_package_here",))
    assert run("--aiconfigurator", "--system", "lab", "--model", "./tiny.yaml") == 2
    assert "--aiconfigurator: expected aiconfigurator-core to be installed here" in capsys.readouterr().err


def test_the_package_that_is_installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of another name, with the tables where aiconfigurator has them."""
    package = here / "packages" / "tables_of_a_lab"
    (package / "systems").mkdir(parents=True)
    (package / "__init__.py").touch()
    (here / "data").rename(package / "systems" / "data")
    monkeypatch.syspath_prepend(str(here / "packages"))
    monkeypatch.setattr("latency_models.sources.aiconfigurator.layout.PACKAGES", ("tables_of_a_lab",))
    assert run("--aiconfigurator", "--system", "lab", "--model", "./tiny.yaml", "-o", "k.yaml") == 0
    assert (here / "k.yaml").exists()


def test_all_reduces_over_pcie_are_those_of_one_host(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = next((here / "lab_engine_1.0").glob("custom_allreduce_perf.txt*"))
    rows = [row.split(",") for row in gzip.decompress(table.read_bytes()).decode().splitlines()]
    latency = rows[0].index("latency")
    slow = [rows[0], *([*row[:latency], str(100 * float(row[latency])), *row[latency + 1 :]] for row in rows[1:])]
    table.write_bytes(gzip.compress("\n".join(map(",".join, slow)).encode()))
    assert run("lab_engine_1.0", "--collectives", "-o", "mine.yaml") == 0
    assert "a spread of 42 % is assumed, since other hosts of that GPU" in capsys.readouterr().err
    assert "refine" in (note(resolve(Communication(link="mine.yaml"), here)) or "")


def test_all_reduces_alone_are_a_link_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lab_engine_1.0", "--collectives", "-o", "mine.yaml") == 0
    link = resolve(Communication(link="mine.yaml"), here)
    assert "a spread of 10 % is assumed" in capsys.readouterr().err
    assert note(link) is None
    assert link.all_reduce(2, 4096) >= link.all_reduce(2, 512) > 0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(2, 256, 0.01), (2, 4096, 0.01)], "latency: got 0.01, expected the longest message among 2 devices to take"),
        ([(2, 256, 0.02), (2, 4096, 0.01)], "latency: got 0.01, expected the longest message among 2 devices to take"),
        ([(2, 256, 0.01)], "message_size: expected two sizes of messages among 2 devices"),
        ([(2, 256, 0.01), (2, 4096, 0.02), (4, 256, 0.01)], "expected two sizes of messages among 4 devices"),
    ],
)
def test_all_reduces_without_a_bandwidth(
    here: Path, capsys: pytest.CaptureFixture[str], rows: list[tuple[int, int, float]], message: str
) -> None:
    header = "backend,num_gpus,message_size,latency"
    lines = [header, *(f"vLLM_graph,{devices},{size},{latency}" for devices, size, latency in rows)]
    (file,) = (here / "lab_engine_1.0").glob("custom_allreduce_perf.txt*")
    file.unlink()
    file.with_name("custom_allreduce_perf.txt").write_text("\n".join(lines) + "\n")
    assert run("lab_engine_1.0", "--collectives", "-o", "mine.yaml") == 2
    stderr = capsys.readouterr().err
    assert "custom_allreduce_perf.txt: " in stderr
    assert message in stderr
