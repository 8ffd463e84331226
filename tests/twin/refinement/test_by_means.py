"""`twin calibrate refine` by metrics pages of servers whose truth is known: simulated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.io.config_io import write_yaml
from scenarios.reading import read_scenario
from twin import cli
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

TRUTH = {"whole_step": 1.2}
SCENARIO: dict[str, Any] = {
    "schema": "twin.scenario/1",
    "kind": "serving",
    "name": "pages",
    "workload": {
        "requests": 120,
        "prefill": {"distribution": "lognormal", "mean": 500, "cv": 0.5},
        "decode": {"distribution": "lognormal", "mean": 60, "cv": 0.5},
        "arrivals": {"process": "poisson", "rate": 10},
    },
    "engine": {"num_gpu_blocks": 20000, "max_num_seqs": 64},
    "step_time": {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h100-sxm"},
}


def page(runs: list[Run]) -> str:
    """The page that a server shows after these runs, one after the other."""
    sums = dict.fromkeys(("ttft", "decoding", "e2e", "tokens", "prompts", "requests", "gaps"), 0.0)
    for run in runs:
        table: dict[str, Any] = run.columns.table()
        first, last = np.asarray(table["first_token"]), np.asarray(table["last_token"])
        arrival, tokens = np.asarray(table["arrival"]), np.asarray(table["output_tokens"])
        sums["ttft"] += float((first - arrival).sum())
        sums["decoding"] += float((last - first).sum())
        sums["e2e"] += float((last - arrival).sum())
        sums["tokens"] += float(tokens.sum())
        sums["gaps"] += float((tokens - 1).sum())
        sums["prompts"] += float(np.sum(table["prompt_tokens"]))
        sums["requests"] += len(tokens)
    histograms = {
        "time_to_first_token_seconds": (sums["requests"], sums["ttft"]),
        "inter_token_latency_seconds": (sums["gaps"], sums["decoding"]),
        "e2e_request_latency_seconds": (sums["requests"], sums["e2e"]),
        "request_prompt_tokens": (sums["requests"], sums["prompts"]),
        "request_generation_tokens": (sums["requests"], sums["tokens"]),
    }
    lines = ['vllm:cache_config_info{block_size="16",num_gpu_blocks="9000"} 1.0']
    for name, (count, total) in histograms.items():
        lines += [f'vllm:{name}_bucket{{le="0.05"}} {count / 2}', f'vllm:{name}_bucket{{le="+Inf"}} {count}']
        lines += [f"vllm:{name}_count {count}", f"vllm:{name}_sum {total}"]
    lines += [f"vllm:generation_tokens_total {sums['tokens']}", f"vllm:prompt_tokens_total {sums['prompts']}"]
    lines += [f'vllm:request_success_total{{finished_reason="length"}} {sums["requests"]}']
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario, and pages of a server whose steps take a fifth longer than it says."""
    folder = tmp_path_factory.mktemp("means")
    source = folder / "scenario.yaml"
    source.write_text(write_yaml(SCENARIO))
    plan = prepare(read_scenario(source, "serving"), source, [{"detail": "requests"}]).cases[0].plan
    plan = plan.with_step_time(plan.step_time.vary(TRUTH))
    runs = [Simulation(plan, 100 + i).run() for i in range(4)]
    (folder / "run").mkdir()
    at = 1e9
    for count in (0, 2, 4):
        (folder / "run" / f"metrics-{at:.3f}.prom").write_text(page(runs[:count]))
        at += sum(run.end for run in runs[count : count + 2])
    (folder / "two").mkdir()
    for name in sorted(file.name for file in (folder / "run").iterdir())[:2]:
        (folder / "two" / name).write_text((folder / "run" / name).read_text())
    return folder


def refine(folder: Path, *words: str, run: str = "run") -> int:
    paths = ["--run", str(folder / run), "-o", str(folder / "refined.yaml")]
    return cli.run(["calibrate", "refine", str(folder / "scenario.yaml"), *paths, *words])


def test_one_factor_is_found_and_the_rest_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refine(folder, "--factors", "whole_step", "--json") == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert "engine.num_gpu_blocks: 8999, as the metrics page says" in output.err
    assert (document["kind"], document["learned_from"], document["fitted"]) == ("means", "itl.mean", 240)
    assert (document["held_out"], document["pages"]) == (240, 3)
    (unknown,) = document["unknowns"]
    assert unknown["verdict"] == "learned"
    assert abs(unknown["score"] - TRUTH["whole_step"]) < 3 * unknown["left"]
    rest = document["rest"]
    for name in ("itl.mean", "e2e.mean"):
        assert abs(rest[name]["before_error"]) > 0.1
        assert abs(rest[name]["after_error"]) < 0.05
        low, high = rest[name]["interval"]
        assert low < rest[name]["measured"] < high
    assert document["buckets"]["ttft.p50"]["low"] == 0.0
    words = ["--set", f"step_time={{source: refined, path: {folder / 'refined.yaml'}}}", "--no-figures", "--json"]
    assert cli.run(["simulate", str(folder / "scenario.yaml"), *words, "--runs", str(folder / "runs")]) == 0


def test_all_factors_hang_together_and_two_pages_hold_nothing_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refine(folder, run="two") == 0
    output = capsys.readouterr().out
    assert "learned from the mean of ITL of 240 requests" in output
    assert "tied to whole_step: only their sum is known" in output
    assert "P99 of TTFT lies" in output
    assert refine(folder, "--json", run="two") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rest"] is None
    fit = document["fit"]["itl.mean"]
    assert abs(fit["after_error"]) < 0.03 < abs(fit["before_error"])
    # Together they explain it, and no sum of them is known better than that one number.
    deviation = np.array([unknown["left"] for unknown in document["unknowns"]])
    assert (deviation > 0.05).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--factors", "whole_step,linear_kernels"],
            "--factors: got 'whole_step,linear_kernels', expected one: means tell one factor",
        ),
        (["--factors", "all_reduce_kernels"], "expected some of"),
        (["--factors", "prompt_attention_kernels"], "expected a run that shows some of the factors"),
        (["--first", "10"], "--first: got 10, expected none: a metrics page has no first requests"),
        (["--set", "workload.prefill.mean=300"], "workload.prefill: got '3"),
        (["--set", "workload.decode.mean=90"], "output tokens on average"),
    ],
)
def test_what_means_do_not_say_is_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refine(folder, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().splitlines()[-1].count("expected") == 1


def test_a_factor_that_would_have_to_move_far_is_doubted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refine(folder, "--factors", "elementwise_kernels") == 0
    assert "of its deviations: something else may be wrong" in capsys.readouterr().err


def test_another_load_is_noted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refine(folder, "--factors", "whole_step", "--set", "workload.arrivals.rate=5", "--json") == 0
    assert "requests a second, the server answered" in capsys.readouterr().err
