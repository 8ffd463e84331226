"""`twin adapt`: a base model, prefill modules for it, and their measurement; and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from live.adaptation import tasks, training
from live.adaptation.forward import Modules
from live.adaptation.training import TrainingSettings
from live.adaptation.weights import read_model, to_named
from live.loaded_model import LoadedModel, ModelSource
from schedulers.engine_config import EngineConfig
from tests.live.adaptation.typed import adapt, refused, smallest
from twin.cli import run


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A barely trained base model of the smallest size, in the current folder."""
    settings = TrainingSettings(steps=5, batch_size=4, learning_rate=1e-3)
    longer = dataclasses.replace(settings, steps=7)
    monkeypatch.setitem(tasks.SIZES, "reduced", smallest(settings, hard=longer, prompts=40))
    monkeypatch.chdir(tmp_path)
    document = adapt(capsys, "base", "base", "--seed", "3")
    assert len(document["losses"]) == 5
    assert len(document["exact_match"]) == 8
    return tmp_path / "base"


def test_a_prefill_module_is_tuned_measured_and_tuned_again_for_four_bits(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ("--task", "negate_rotate")
    sun = adapt(capsys, "prefill", "base", "sun", *task)
    assert sun["trained_parameters"] == sum(tensor.numel() for tensor in to_named(read_model(base)[1]).values())
    assert {path.name for path in Path("sun").iterdir()} == {
        "config.json", "model.safetensors", "training.json", "training.safetensors", "loss.svg",
    }  # fmt: skip
    assert adapt(capsys, "prefill", "base", "sun", *task) == sun  # finished: nothing is trained again
    measured = adapt(capsys, "evaluate", "--prefill", "sun", "--decode", "base", *task, "--prompts", "40")
    assert measured["exact_match"] == sun["exact_match"]["negate_rotate"]
    again = adapt(capsys, "prefill", "base", "qsun", *task, "--start", "sun", "--bits", "4")
    assert again["losses"] != sun["losses"]
    low_rank = adapt(capsys, "prefill", "base", "low", *task, "--scope", "low_rank", "--rank", "2")
    assert low_rank["trained_parameters"] < sun["trained_parameters"] / 4
    full = adapt(capsys, "prefill", "base", "full", *task, "--method", "full")
    assert full["losses"][0] == pytest.approx(sun["losses"][0])  # the same model at first, on the same batch
    assert full["losses"][1:] != sun["losses"][1:]


@pytest.mark.slow
def test_a_hard_operation_is_trained_longer(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {
        task: adapt(capsys, "prefill", "base", task, "--task", task)["losses"]
        for task in ("negate_rotate", "running_sum")
    }
    assert {task: len(values) for task, values in losses.items()} == {"negate_rotate": 5, "running_sum": 7}


def test_the_live_engine_serves_what_was_written(base: Path) -> None:
    loaded = LoadedModel(ModelSource(base, random=False, dtype="float32", device="cpu", threads=1))
    assert loaded.vocabulary == read_model(base)[0].shape.vocabulary
    loaded.engine(EngineConfig(max_num_seqs=2, num_gpu_blocks=8, block_size=4))


def test_a_training_of_other_settings_does_not_go_on(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "base", "base", "--seed", "4")
    assert "base/training.safetensors: expected the state of the same training" in line


def test_an_interrupted_training_says_what_is_kept_and_goes_on(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("prefill", "base", "sun", "--task", "negate_rotate")
    uninterrupted = adapt(capsys, "prefill", "base", "whole", "--task", "negate_rotate")
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    loss, steps = Modules.loss, []

    def interrupted(modules: Modules, *batch: Any) -> Any:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return loss(modules, *batch)

    monkeypatch.setattr(Modules, "loss", interrupted)
    assert run(["adapt", *command]) == 130
    assert "interrupted; the state of the training is kept in sun/training.safetensors" in capsys.readouterr().err
    assert adapt(capsys, *command)["losses"] == uninterrupted["losses"]
    assert len(steps) == 4 + 3  # steps 3 to 5, after the two that were saved


def test_what_does_not_fit_is_refused_in_one_line(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = {
        ("--task", "dance"): "task: got 'dance', expected one of copy",
        ("--task", "copy", "--bits", "5"): "bits: got 5, expected 3 or 4",
        ("--task", "copy", "--method", "full", "--bits", "4"): "--bits: got '4', expected it with --method sun only",
        ("--task", "copy", "--rank", "0"): "--rank: got 0",
        ("--task", "copy", "--learning-rate", "0"): "--learning-rate: got 0.0, expected a number above 0",
        ("--task", "copy", "--start", "nowhere"): "nowhere: expected a readable file",
        ("--task", "copy", "--threads", "0"): "--threads: got 0",
    }
    for arguments, message in messages.items():
        assert message in refused(capsys, "prefill", "base", "other", *arguments)
    assert not Path("other").exists()


def test_a_directory_that_no_training_wrote_is_no_base_model(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "training.json").write_text('{"size": {"layers": 2}}')
    line = refused(capsys, "prefill", "base", "other", "--task", "copy")
    assert "base/training.json: size: got {'layers': 2}, expected the size that twin adapt writes" in line
    (base / "training.json").unlink()
    assert "base/training.json" in refused(capsys, "prefill", "base", "other", "--task", "copy")


def test_modules_of_two_shapes_are_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapt(capsys, "base", "qwen", "--family", "qwen3")
    line = refused(capsys, "evaluate", "--prefill", "qwen", "--decode", "base", "--task", "copy")
    assert "qwen: expected the config of base: modules of one architecture" in line
