"""`twin adopt`: files from a server's pages and a few seconds of its requests, and each refusal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import twin
from latency_models.io.config_io import read_yaml
from tests.twin.recording.server import answering
from tests.twin.recording.test_server_pages import SGLANG, VLLM
from twin import cli
from twin.api.plan import scenario_question

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
H100 = {"nvidia_gpu_models": "GPU 0: NVIDIA H100 80GB HBM3"}
ITL, TTFT, RATE, PROMPT, ANSWER = 0.009, 0.04, 20.0, 300, 50


def served_page() -> str:
    """The metrics page of an engine that has served at RATE since the epoch began."""
    count = RATE * (time.time() % 1e5)
    sums = {
        "time_to_first_token_seconds": TTFT, "e2e_request_latency_seconds": TTFT + ITL * (ANSWER - 1),
        "request_prompt_tokens": PROMPT, "request_generation_tokens": ANSWER,
    }  # fmt: skip
    lines = [f"vllm:{name}_{part} {count * (mean if part == 'sum' else 1)}"
             for name, mean in sums.items() for part in ("sum", "count")]  # fmt: skip
    lines += [f"vllm:inter_token_latency_seconds_sum {count * (ANSWER - 1) * ITL}"]
    lines += [f"vllm:inter_token_latency_seconds_count {count * (ANSWER - 1)}"]
    lines += [f"vllm:request_success_total {count}", f"vllm:generation_tokens_total {count * ANSWER}"]
    return "\n".join([*lines, VLLM["/metrics"].splitlines()[0]]) + "\n"


def card(root: str) -> dict[str, Any]:
    return {"data": [{**VLLM["/v1/models"]["data"][0], "id": "served", "root": root}]}


def test_a_server_becomes_a_scenario_and_a_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--prompt-tokens", "30", "--answer-tokens", "12", "--rate", "12"]
    with answering(VLLM) as (port, _):
        words = ["adopt", f"127.0.0.1:{port}", "--into", str(tmp_path / "own"), "--replay", "4", *lengths, "--json"]
        assert cli.run([*words, "--set", "engine.max_num_seqs=8"]) == 0
    output, notes = capsys.readouterr()
    document = json.loads(output)
    assert document["server"] == {"engine": "vLLM", "version": "0.32.0", "weights": "model", "max_model_len": 1024}
    refinement = document["refinement"]
    assert refinement["fitted"] + refinement["held_out"] == 48
    assert {"ttft.mean", "tpot.mean", "e2e.mean", "output_throughput"} == refinement["rest"].keys()
    # The line goes through 4 ms a token and 20 ms of a prompt's step, up to what this machine adds.
    assert 0.003 < refinement["rest"]["tpot.mean"]["after"] < 0.02
    assert "vLLM 0.32.0 serves model" in notes
    assert notes.count("next: twin ") == 2
    scenario = read_yaml(tmp_path / "own" / "scenario.yaml")
    assert scenario["engine"]["max_num_seqs"] == 8
    assert scenario["engine"]["scheduler"] == "vllm-0.32"
    simulated = twin.simulate(tmp_path / "own" / "scenario.yaml", jobs=1).document["summary"]
    # The same requests as in the run, half of which the row is about.
    assert simulated["tpot"]["mean"] == pytest.approx(refinement["rest"]["tpot.mean"]["after"], rel=0.1)
    question = scenario_question(tmp_path / "own" / "plan.yaml", {})
    assert [goal.name for goal in question.goals] == ["ttft_p99", "tpot_p99"]
    assert question.document["workload"]["arrivals"]["rate"] == pytest.approx(48, rel=0.3)


def test_observed_means_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"scheduler_config": {"max_num_seqs": 64, "async_scheduling": True}, "device_config": {"device": "cuda"}}
    info = {"vllm_config": config, "system_env": H100}
    pages = {"/v1/models": card(LLAMA), "/server_info?config_format=json": info, "/metrics": served_page}
    with answering(pages) as (port, _):
        assert (
            cli.run(["adopt", f"127.0.0.1:{port}", "--into", str(tmp_path / "own"), "--observe", "0.8", "--json"]) == 0
        )
    document = json.loads(capsys.readouterr().out)
    row = document["refinement"]["rest"]["itl.mean"]
    assert row["measured"] == pytest.approx(ITL)
    assert row["after"] == pytest.approx(ITL, rel=0.05)
    assert abs(row["after_error"]) < abs(row["before_error"])
    scenario = read_yaml(tmp_path / "own" / "scenario.yaml")
    assert scenario["workload"]["prefill"]["mean"] == pytest.approx(PROMPT, rel=0.02)
    assert scenario["system"]["pools"][0]["device"] == {"type": "h100-sxm", "count": 1}
    section = read_yaml(tmp_path / "own" / "refined.yaml")["step_time"]
    assert section == {"source": "roofline", "model": LLAMA, "hardware": "h100-sxm"}
    assert read_yaml(tmp_path / "own" / "plan.yaml")["plan"]["goals"]["itl_mean"] == pytest.approx(1.25 * ITL, rel=0.02)


@pytest.mark.parametrize(
    ("pages", "words", "message"),
    [
        ({}, [], "URL: got '127.0.0.1:PORT', expected a server that answers /v1/models: status 404"),
        ({"/v1/models": card(LLAMA)}, [], "--gpu: expected the server's GPU, which it does not publish"),
        ({"/v1/models": card(LLAMA)}, ["--gpu", "h1000"], "--gpu: got 'h1000', expected a path or one of"),
        ({"/v1/models": card("/weights/own")}, ["--gpu", "h100"], "--model-config: expected the config.json of /we"),
        ({"/v1/models": card("x")}, ["--gpu", "h100", "--model-config", "no.json"], "--model-config: got 'no.json'"),
        (VLLM, ["--model", "other"], "--model: got 'other', expected one of model"),
        (VLLM, ["--observe", "5", "--rate", "2"], "--observe: got 5.0, expected none beside --replay"),
        (VLLM, ["--replay", "0"], "--replay: got 0.0, expected a number above 0"),
        (VLLM, ["--vocabulary", "3"], "--vocabulary: got 3, expected a whole number from 11 up"),
        (VLLM, ["--into", "full"], "--into: got 'full', expected a folder that is empty or not there"),
        (VLLM, ["--requests", "n.csv"], "n.csv: --requests: expected a trace with arrival times"),
        (VLLM, ["--requests", "t.csv"], "t.csv: --requests: got 2, expected 4 requests or more in 300 s"),
        (SGLANG, ["--gpu", "h100"], "URL: expected --observe SECONDS, or --replay SECONDS to send more: 4 requests"),
        (VLLM, [], "URL: expected a server that completes token ids: status 501"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    pages: dict[str, Any], words: list[str], message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "n.csv").write_text("prompt_tokens,output_tokens\n1,1\n")
    (tmp_path / "t.csv").write_text("arrival,prompt_tokens,output_tokens\n0,1,1\n1,1,1\n400,1,1\n")
    with answering(pages, completes="--requests" in words) as (port, _):
        assert cli.run(["adopt", f"http://127.0.0.1:{port}", *words]) == 2
    assert message.replace("PORT", str(port)) in capsys.readouterr().err.splitlines()[-1]
