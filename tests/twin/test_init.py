"""`twin init`: what it writes runs, for models and devices of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin import cli
from twin.api.starting_scenario import starting_scenario
from workloads.errors import BadInput


@pytest.mark.parametrize(
    ("model", "gpu", "weights", "devices"),
    [
        ("llama-3.1-8b", "h100-sxm", None, 1),
        ("llama-3.1-70b", "h200-sxm", "bf16", 2),
        ("gpt-oss-20b", "l40s", None, 1),
        ("gpt-oss-120b", "h100-sxm", None, 1),
        ("gpt-oss-120b", "h100-sxm", "mxfp4", 1),
        ("gpt-oss-120b", "h100-sxm", "bf16", 4),
        ("qwen3-235b-a22b", "mi300x", "fp8", 2),
        ("deepseek-v3", "h200-sxm", None, 8),
    ],
)
def test_it_names_the_fewest_devices(model: str, gpu: str, weights: str | None, devices: int) -> None:
    text = starting_scenario(model, gpu, weights)
    assert text.startswith(f"# {model} on {devices} {gpu}: the fewest")


def test_names_mean_what_they_mean_elsewhere() -> None:
    text = starting_scenario("meta-llama/Llama-3.3-70B-Instruct", "h200")
    assert text.startswith("# llama-3.3-70b on 2 h200-sxm: the fewest")
    assert "  model: meta-llama/Llama-3.3-70B-Instruct\n  hardware: h200-sxm\n" in text
    assert "Weights are in fp8.\n" in starting_scenario("llama-3.3-70b-fp8", "h200")
    assert "Weights are in bf16, experts in mxfp4.\n" in starting_scenario("gpt-oss-20b", "l40s")
    assert "  weights: int8\n" in starting_scenario("llama-3.3-70b", "h200", "int8")
    with pytest.raises(BadInput, match=r"--gpu: got 'h2000', expected a path or one of .*did you mean h200-sxm"):
        starting_scenario("llama-3.3-70b", "h2000")


def test_it_runs_as_it_is_and_is_not_overloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert cli.run(["init", "--model", "qwen3-30b-a3b", "--gpu", "h200-sxm", "-o", str(file)]) == 0
    assert "next: twin simulate" in capsys.readouterr().err
    words = ["simulate", str(file), "--no-figures", "--runs", str(tmp_path / "runs"), "--set", "workload.requests=150"]
    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert "150 requests" in out
    assert "1 × h200-sxm" in out
    assert "overloaded" not in out


def test_a_model_file_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario may be written to another folder: paths of the command line are made absolute."""
    monkeypatch.chdir(tmp_path)
    source = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama.json"
    (tmp_path / "tiny.json").write_text(source.read_text())
    assert f"model: {tmp_path / 'tiny.json'}\n" in starting_scenario("tiny.json", "l40s", "bf16", 3.0)


def test_what_cannot_be_begun(tmp_path: Path, refusal) -> None:
    with pytest.raises(BadInput, match="--weights: got 'fp7', expected one of bf16, fp8, int8, fp4, mxfp4"):
        starting_scenario("llama-3.1-8b", "h100-sxm", "fp7")
    with pytest.raises(BadInput, match=r"--model: .*expected a model that fits: weights fp8: expected one that a100"):
        starting_scenario("llama-3.1-8b", "a100-sxm-80gb", "fp8")
    file = tmp_path / "there.yaml"
    file.touch()
    assert "--output: got" in refusal("init", "-o", file)
    assert "--rate: got 0.0, expected a number above 0" in refusal("init", "--rate", "0")
