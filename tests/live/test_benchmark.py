"""`python -m benchmarks.live` runs, and its floors are those that one can work out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the live plant needs the extra [live]")

from benchmarks.live import MODES, WORKLOADS, floor, main, met, weight_bytes  # noqa: E402
from live.models.config import read_config  # noqa: E402
from live.models.decoder import Decoder  # noqa: E402
from live.models.linear import Rounding  # noqa: E402
from live.models.weights import random_weights  # noqa: E402

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


@pytest.mark.slow
def test_it_runs_on_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "live.json"
    command = ["--device", "cpu", "--tiny", "--only", "Qwen3-0.6B", "--repeats", "1", "--out", str(out)]
    assert main(command) == 0
    document = json.loads(out.read_text())
    assert [row["metric"] for row in document["workloads"]] == ["ttft", "tpot"]
    for row in document["workloads"]:
        assert set(row["modes"]) == set(MODES)
        for figures in row["modes"].values():
            assert figures["of_floor"] == pytest.approx(row["floor"] / figures[row["metric"]])
            assert figures["ttft"] > 0
    assert document["ceilings"]["copy"] > 0
    assert {"device", "versions", "commit", "date"} <= set(document)
    output = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in output] == [
        "Qwen3-0.6B, 128 in, 1 out, alone, ttft in ms", "Qwen3-0.6B, 128 in, 32 out, 4 at once, tpot in ms",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [["--only", "nobody"], ["--repeats", "0"]])
def test_bad_arguments_are_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "cpu", "--tiny", *wrong])
    assert wrong[0] in capsys.readouterr().err.splitlines()[-1]


def test_floors_by_hand() -> None:
    """256 wide, 4 layers of 8 heads on 4 of 32, 768 inside, 2,048 tokens in the vocabulary; 10 GB/s, 1 TFLOP/s."""
    config = read_config(MODELS / "tiny-llama.json")
    dense = Decoder(config, random_weights(config, torch.float32, "cpu"))
    layer = (256 + 2 * 128) * 256 + 256 * 256 + 3 * 768 * 256
    head = 2048 * 256
    assert weight_bytes(dense.weights) == 4 * (4 * layer + head)
    ceilings = {"copy": 1e10, "matmul": 1e12}
    single, together, first, last = (
        next(workload for workload in WORKLOADS if part in workload.name)
        for part in ("4B, 512 in, 1 out, alone", "96 at once", "32 out", "3.1-8B, 128")
    )
    computed = (512 * 8 * layer + 4 * 4 * 256 * 512 * 513 / 2 + 2 * head) / 1e12
    assert floor(single, dense, ceilings) == pytest.approx(max(computed, weight_bytes(dense.weights) / 1e10))
    assert floor(together, dense, ceilings) == pytest.approx(1 / computed)
    cached = 4 * 144 * 2 * 4 * 128 * 4
    assert floor(first, dense, ceilings) == pytest.approx((weight_bytes(dense.weights) + cached) / 1e10)
    packed = Decoder(config, random_weights(config, torch.float32, "cpu", 0, Rounding()))
    assert weight_bytes(packed.weights) - 4 * head < 4 * layer  # half a byte each, scales, rows that fill up
    assert floor(last, packed, ceilings) < floor(last, dense, ceilings)


def test_the_best_of_the_ways_is_judged() -> None:
    times = {"a": {"tpot": 0.9e-3}, "b": {"tpot": 0.7e-3}}
    assert met(next(workload for workload in WORKLOADS if "32 out" in workload.name), times)
    rates = {"a": {"requests": 170.0}, "b": {"requests": 189.0}}
    assert not met(next(workload for workload in WORKLOADS if "96 at once" in workload.name), rates)


@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-0.6b", 0.6e9), ("qwen3-4b", 4.0e9), ("llama-2-7b", 6.7e9), ("llama-3.1-8b", 8.0e9)]
)
def test_models_have_the_size_that_their_names_say(name: str, parameters: float) -> None:
    config = read_config(MODELS / f"{name}.json")
    shape = config.shape
    linear = shape.layers * sum(outputs * inputs for outputs, inputs in shape.linear().values())
    tables = shape.vocabulary * shape.hidden * (1 if config.tied else 2)
    assert linear + tables == pytest.approx(parameters, rel=0.01)
