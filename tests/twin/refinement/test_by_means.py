"""`twin calibrate refine` by metrics pages of servers whose truth is known: simulated ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.io.config_io import write_yaml
from tests.twin.refinement.conftest import plan_of, refine, short_run
from twin import cli
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation

Refined = Callable[..., tuple[Any, str]]

TRUTH = {"whole_step": 1.2}


def page(runs: list[Run]) -> str:
    """The page that a server shows after these runs, one after the other."""
    tables: list[dict[str, Any]] = [run.columns.table() for run in runs]
    names = ("arrival", "first_token", "last_token", "output_tokens", "prompt_tokens")
    arrival, first, last, tokens, prompts = (float(sum(np.sum(table[name]) for table in tables)) for name in names)
    requests = sum(len(table["arrival"]) for table in tables)
    histograms = {
        "time_to_first_token_seconds": (requests, first - arrival),
        "inter_token_latency_seconds": (tokens - requests, last - first),
        "e2e_request_latency_seconds": (requests, last - arrival),
        "request_prompt_tokens": (requests, prompts),
        "request_generation_tokens": (requests, tokens),
    }
    lines = ['vllm:cache_config_info{block_size="16",num_gpu_blocks="9000"} 1.0']
    for name, (count, total) in histograms.items():
        lines += [f'vllm:{name}_bucket{{le="0.05"}} {count / 2}', f'vllm:{name}_bucket{{le="+Inf"}} {count}']
        lines += [f"vllm:{name}_count {count}", f"vllm:{name}_sum {total}"]
    lines += [f"vllm:generation_tokens_total {tokens}", f"vllm:prompt_tokens_total {prompts}"]
    lines += [f'vllm:request_success_total{{finished_reason="length"}} {requests}']
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario, and pages of a server whose steps take a fifth longer than it says."""
    folder = tmp_path_factory.mktemp("means")
    (folder / "scenario.yaml").write_text(write_yaml(short_run(120, 10, (500, 0.5), (60, 0.5))))
    plan = plan_of(folder, detail="requests")
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


def test_one_factor_is_found_and_the_rest_predicted(folder: Path, refined: Refined) -> None:
    document, notes = refined(folder, "--factors", "whole_step")
    assert "engine.num_gpu_blocks: 8999, as the metrics page says" in notes
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
    folder: Path, refined: Refined, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refine(folder, run="two") == 0
    output = capsys.readouterr().out
    assert "learned from the mean of ITL of 240 requests" in output
    assert "tied to whole_step: only their sum is known" in output
    assert "P99 of TTFT lies" in output
    document, _ = refined(folder, run="two")
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
def test_what_means_do_not_say_is_refused(folder: Path, words: list[str], message: str, refine_refusal) -> None:
    error = refine_refusal(folder, *words)
    assert message in error
    assert error.strip().splitlines()[-1].count("expected") == 1


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--factors", "elementwise_kernels"], "of its deviations: something else may be wrong"),
        (["--factors", "whole_step", "--set", "workload.arrivals.rate=5"], "requests a second, the server answered"),
    ],
)
def test_what_is_doubtful_is_noted(folder: Path, words: list[str], note: str, refined: Refined) -> None:
    _, notes = refined(folder, *words)
    assert note in notes
