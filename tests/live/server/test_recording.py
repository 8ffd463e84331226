"""Observe, replay, refine: the three verbs on the live server of this project."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from latency_models.io.config_io import read_yaml, write_yaml
from tests.live.server.conftest import Setting
from tests.twin.recording.server import serving
from twin import cli
from twin.recording.run_writer import RunWriter
from twin.recording.server_pages import HISTOGRAMS, Growth, Upstream, between, cache_settings, read_scrapes
from twin.recording.traffic import Proxy
from twin.refinement.question import read_measured_run


def test_observe_replay_refine(server: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay through the proxy is seen alike on both sides, and teaches a scenario of one line its speed."""
    trace = tmp_path / "trace.csv"
    rows = [f"{0.05 * i:.2f},{20 + 7 * (i % 5)},{6 + 3 * (i % 4)}" for i in range(24)]
    trace.write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows]) + "\n")
    writer = RunWriter(tmp_path / "observed", {"source": "test"})
    with serving(Proxy(("127.0.0.1", 0), Upstream.of(server.client.base, "--upstream"), writer)) as port:
        words = ["--url", f"http://127.0.0.1:{port}", "-o", str(tmp_path / "replayed"), "--vocabulary", "250"]
        assert cli.run(["replay", str(trace), *words]) == 0, capsys.readouterr().err
    writer.close()
    observed, replayed = (read_measured_run(tmp_path / name) for name in ("observed", "replayed"))
    lengths = sorted((20 + 7 * (i % 5), 6 + 3 * (i % 4)) for i in range(24))
    for run in (observed, replayed):
        assert sorted(zip(run.prompts.tolist(), run.answers.tolist(), strict=True)) == lengths
    scenario = {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "line",
        "workload": {"trace": {"path": "trace.csv"}, "arrivals": {"process": "replay"}},
        "engine": {"num_gpu_blocks": 400, "block_size": 4, "max_num_seqs": 32},
        "step_time": {"source": "linear", "overhead": 0.1, "per_token": 1e-5, "spread": 1.5},
    }
    (tmp_path / "scenario.yaml").write_text(write_yaml(scenario))
    capsys.readouterr()
    paths = ["--run", str(tmp_path / "replayed"), "-o", str(tmp_path / "refined.yaml")]
    assert cli.run(["calibrate", "refine", str(tmp_path / "scenario.yaml"), *paths, "--first", "12", "--json"]) == 0
    # Of the requests that it learned from: another process may slow the rest down, or stop doing so.
    values = json.loads(capsys.readouterr().out)["fit"]["tpot.mean"]
    before, after = (abs(math.log(values[name] / values["measured"])) for name in ("before", "after"))
    assert after < 0.2 * before


def test_metrics_pages_teach_one_factor(server: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pages of this project's server, before and after requests, say its cache and its mean time between tokens."""
    pages = tmp_path / "pages"
    pages.mkdir()

    def scrape(at: float) -> None:
        (pages / f"metrics-{at:.3f}.prom").write_bytes(server.client.get("/metrics").body)

    scrape(1e9)
    fields = {"max_tokens": 12, "ignore_eos": True}
    for _ in range(10):
        assert server.client.post("/v1/completions", prompt=list(range(30)), **fields).status == 200
    scrape(1e9 + 5)
    first, last = read_scrapes(pages)
    values, growth = between(first, last), Growth(first, last)
    counts = [growth.of(f"{HISTOGRAMS[name][0]}_count") for name in ("ttft", "itl")]
    assert (values.finished, counts) == (10, [10, 110])
    assert (values.means["prompt_tokens"], values.means["output_tokens"]) == (30.0, 12.0)
    blocks = cache_settings(last.text)["num_gpu_blocks"] - 1  # vLLM counts its placeholder
    scenario = {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "line",
        "workload": {
            "requests": 30,
            "prefill": {"distribution": "uniform", "low": 30, "high": 30},
            "decode": {"distribution": "uniform", "low": 12, "high": 12},
            "arrivals": {"process": "closed_loop", "concurrency": 1},
        },
        "engine": {"num_gpu_blocks": blocks + 1, "block_size": 4, "max_num_seqs": 32},
        "step_time": {"source": "linear", "overhead": 0.1, "per_token": 1e-5, "spread": 1.5},
    }
    (tmp_path / "scenario.yaml").write_text(write_yaml(scenario))
    capsys.readouterr()
    paths = ["--run", str(pages), "-o", str(tmp_path / "refined.yaml")]
    assert cli.run(["calibrate", "refine", str(tmp_path / "scenario.yaml"), *paths, "--json"]) == 0
    output = capsys.readouterr()
    assert f"engine.num_gpu_blocks: {blocks}, as the metrics page says" in output.err
    fit = json.loads(output.out)["fit"]["itl.mean"]
    assert fit["measured"] == pytest.approx(values.means["itl.mean"])
    assert abs(fit["after_error"]) < 0.05 < abs(fit["before_error"])


def test_a_server_is_adopted(server: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command: the cache's settings from the metrics page, and a line of step times from seconds of requests."""
    words = ["--gpu", "cpu", "--vocabulary", "250", "--replay", "3", "--rate", "12", "--prompt-tokens", "24"]
    words += ["--answer-tokens", "12", "--set", "engine.max_num_seqs=32", "--json"]
    assert cli.run(["adopt", server.client.base, "--into", str(tmp_path / "own"), *words]) == 0
    output, notes = capsys.readouterr()
    document = json.loads(output)
    assert document["server"]["engine"] == "serving-twin"
    assert document["server"]["max_model_len"] == 256
    assert "taken to be vLLM's defaults" in notes
    engine = read_yaml(tmp_path / "own" / "scenario.yaml")["engine"]
    assert engine.items() >= {"block_size": 4, "num_gpu_blocks": 400, "max_num_seqs": 32}.items()
    verdicts = {unknown["name"]: unknown["verdict"] for unknown in document["refinement"]["unknowns"]}
    assert set(verdicts.values()) & {"learned", "tied"}  # steps of a few milliseconds tell terms apart or not
    row = document["refinement"]["fit"]["tpot.mean"]
    assert abs(row["after_error"]) < 0.5  # of 18 requests on a machine that others may use
