"""`twin adapt text`, `quantise`, `diagnose` and `compensate`, on a small folder of sources."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from live.adaptation import language_model
from live.adaptation.compensation import weight_bytes
from live.adaptation.language_model import is_held_out
from live.adaptation.training import TrainingSettings
from live.adaptation.weights import read_model
from live.loaded_model import LoadedModel, ModelSource
from live.models.linear import Compensated
from reports.adaptation import measured_report
from reports.blocks import Table
from schedulers.engine_config import EngineConfig
from tests.live.adaptation.typed import adapt, refused
from twin.cli import run

SOURCES = ("--sources", "sources")
SMALLEST = dataclasses.replace(
    language_model.TEXT_SIZES["reduced"], layers=2, hidden=64, window=16,
    training=TrainingSettings(steps=5, batch_size=4, learning_rate=3e-3),
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources, and a barely trained language model of the smallest size in `model`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "sources").mkdir()
    for i in range(40):
        (folder / f"sources/m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(language_model.TEXT_SIZES, "reduced", SMALLEST)
        patch.chdir(folder)
        assert run(["adapt", "text", "model", *SOURCES]) == 0
    return folder


@pytest.fixture
def model(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trained model in the current folder."""
    monkeypatch.setitem(language_model.TEXT_SIZES, "reduced", SMALLEST)
    monkeypatch.chdir(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))
    return tmp_path / "model"


def test_a_finished_training_is_not_trained_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (model / "training.safetensors").stat().st_mtime_ns
    again = adapt(capsys, "text", "model", *SOURCES)
    assert again == json.loads((model / "training.json").read_text())
    assert len(again["losses"]) == 5
    held_out = sum(is_held_out(f"m{i}.py") for i in range(40))
    assert again["corpus"]["files"] == [40 - held_out, held_out]
    assert 0 < held_out < 20
    assert (model / "training.safetensors").stat().st_mtime_ns == before
    assert {path.name for path in model.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "training.json", "training.safetensors", "loss.svg",
    }  # fmt: skip


def test_a_model_is_diagnosed_compensated_and_loaded(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (*SOURCES, "--bits", "3", "--sequences", "8", "--full-rank", "6")
    plain = adapt(capsys, "quantise", "model", "plain", *common[:-2])
    diagnosis = adapt(capsys, "diagnose", "model", *common, "--figure", "map.svg")
    assert diagnosis["damage"].keys() == {
        f"layers.{i}.{kind}" for i in range(2) for kind in ("qkv", "o", "gate_up", "down")
    }
    assert plain["quantised"] == diagnosis["quantised"]
    ElementTree.fromstring(Path("map.svg").read_text())
    document = adapt(capsys, "compensate", "model", "made", *common, "--steps", "3", "--gate-steps", "2")
    assert document["modules"] == diagnosis["modules"]
    assert document["rank"] == diagnosis["rank"] >= 1
    assert len(document["losses"]) == 5
    assert json.loads(Path("made/compensation.json").read_text()) == document
    loaded = LoadedModel(ModelSource(Path("made"), random=False, dtype="float32", device="cpu", threads=1))
    loaded.engine(EngineConfig(max_num_seqs=2, num_gpu_blocks=8, block_size=4))
    layers = read_model(Path("made"))[1].layers
    carrying = {f"layers.{i}.qkv" for i, layer in enumerate(layers) if isinstance(layer.qkv, Compensated)}
    assert carrying == {name for name in document["modules"] if name.endswith("qkv")}


def test_compensators_on_all_modules_take_twice_the_budget(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SOURCES, "--sequences", "8", "--steps", "1", "--gate-steps", "1")
    every = adapt(capsys, "compensate", "model", "every", *arguments, "--placement", "all")
    some = adapt(capsys, "compensate", "model", "some", *arguments)
    assert len(every["modules"]) == 8
    assert every["rank"] == 8
    assert some["bytes"] <= every["bytes"] // 2


@pytest.mark.slow  # twelve seconds: two models are profiled and replayed
def test_quality_and_speed_stand_in_one_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*SOURCES, "--sequences", "8", "--bits", "3", "--steps", "3", "--gate-steps", "2")
    trained = adapt(capsys, "compensate", "model", "made", *arguments)
    measured = ("model", "made", *SOURCES, "--requests", "4", "--rounds", "10", "--concurrency", "2")
    document = adapt(capsys, "measure", *measured)
    dense, compensated = document["models"]
    assert dense["kl"] == pytest.approx(0, abs=1e-6)
    assert compensated["perplexity"] == pytest.approx(trained["compensated"]["perplexity"], rel=1e-3)
    assert compensated["kl"] == pytest.approx(trained["compensated"]["kl"], rel=1e-2, abs=1e-6)
    assert compensated["accuracy"] == pytest.approx(trained["compensated"]["accuracy"], abs=2e-3)
    assert dense["bytes"] == 4 * json.loads(Path("model/training.json").read_text())["trained_parameters"]
    assert compensated["bytes"] == weight_bytes(read_model(Path("made"))[1])
    for row in document["models"]:
        assert row["metrics"].keys() == {"tpot.mean", "ttft.mean", "output_throughput"}
        for metric in row["metrics"].values():
            assert min(metric["measured"], metric["predicted"]) > 0
        summary = json.loads((Path(row["run"]["directory"]) / "summary.json").read_text())
        assert summary["clock"] == "direct"
        assert summary["loads"][0]["metrics"]["tpot.mean"]["measured"] == row["metrics"]["tpot.mean"]["measured"]
    table = next(block for block in measured_report(document) if isinstance(block, Table))
    assert [row[0] for row in table.rows] == ["model", "made"]
    assert table.rows[1][2] == f"{100 * compensated['accuracy']:.1f}"
    assert f"{compensated['bytes'] / 2**20:.2f}" in table.rows[1]


def test_models_of_two_shapes_are_not_measured(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = dataclasses.replace(language_model.TEXT_SIZES["reduced"], hidden=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(language_model.TEXT_SIZES, "reduced", size)
        adapt(capsys, "text", "other", *SOURCES)
    assert "other: expected the shape of the first model" in refused(capsys, "measure", "model", "other", *SOURCES)
    assert "--load: got 1.0, expected a number between 0 and 1" in refused(capsys, "measure", "model", "--load", "1")
    assert "--rounds: got 2" in refused(capsys, "measure", "model", "--rounds", "2")


def test_tables_that_cannot_be_read_are_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from live.adaptation.placement import MEASURED

    text = MEASURED.read_text()
    Path("broken.yaml").write_text(text.replace("twin.ec-tables/1", "twin.ec-tables/9"))
    line = refused(capsys, "diagnose", "model", *SOURCES, "--sequences", "8", "--tables", "broken.yaml")
    assert "broken.yaml" in line


def test_what_does_not_fit_is_refused_in_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = {
        ("--bits", "5"): "bits: got 5, expected 2, 3 or 4",
        ("--bits", "2"): "bits: got 2, expected 3 or 4: no engine serves others",
        ("--group", "64"): "group: got 64, expected 128, or -1 for whole rows",
        ("--sequences", "0"): "--sequences: got 0",
        ("--threads", "0"): "--threads: got 0",
    }
    for arguments, message in messages.items():
        assert message in refused(capsys, "quantise", "model", "other", *SOURCES, *arguments)
    assert "model: expected text to train on and to hold out" in refused(
        capsys, "quantise", "model", "other", "--sources", "model"
    )
    assert "--full-rank: got 0" in refused(capsys, "diagnose", "model", "--full-rank", "0")
    assert "--cost-weight: got -1.0" in refused(capsys, "diagnose", "model", "--cost-weight", "-1")
    assert "nowhere" in refused(capsys, "quantise", "nowhere", "other")
    adapt(capsys, "quantise", "model", "plain", *SOURCES, "--sequences", "8")
    line = refused(capsys, "quantise", "plain", "other", *SOURCES)
    assert "plain: quantization_config: expected dense weights" in line
