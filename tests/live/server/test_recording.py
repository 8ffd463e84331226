"""Observe, replay, refine: the three verbs on the live server of this project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latency_models.io.config_io import write_yaml
from tests.live.server.conftest import Setting
from tests.twin.recording.server import serving
from twin import cli
from twin.recording.proxy import Proxy
from twin.recording.run_writer import RunWriter
from twin.recording.upstream import Upstream
from twin.refinement.measured_run import read_measured_run


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
    assert replayed.prompts.tolist() == observed.prompts.tolist() == [20 + 7 * (i % 5) for i in range(24)]
    assert replayed.answers.tolist() == observed.answers.tolist() == [6 + 3 * (i % 4) for i in range(24)]
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
    rest = json.loads(capsys.readouterr().out)["rest"]
    assert abs(rest["tpot.mean"]["after_error"]) < 0.2 * abs(rest["tpot.mean"]["before_error"])
