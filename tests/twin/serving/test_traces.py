"""Traces in serving scenarios: how many requests a trace gives under each arrival process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.io.config_io import write_yaml
from tests.twin.serving.scenarios import PLAIN
from twin.cli import run
from twin.serving.run.simulation import realisation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

ROWS = [(0.0, 10, 1), (1.5, 20, 2), (4.0, 30, 3), (10.0, 40, 4)]
POISSON = {"process": "poisson", "rate": 5}
REPLAY = {"process": "replay", "speed": 2.0}


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [{"arrival": at, "prompt_tokens": prompt, "output_tokens": output} for at, prompt, output in ROWS]
    (tmp_path / "plain.jsonl").write_text("\n".join(map(json.dumps, lines)))
    hashed = [
        {"timestamp": 1000 * at, "input_length": prompt, "output_length": output, "hash_ids": [row]}
        for row, (at, prompt, output) in enumerate(ROWS)
    ]
    (tmp_path / "hashed.jsonl").write_text("\n".join(map(json.dumps, hashed)))
    return tmp_path


def document(arrivals: dict[str, Any], trace: str = "plain.jsonl", **fields: Any) -> dict[str, Any]:
    return {**PLAIN, "workload": {"trace": {"path": trace, **fields}, "arrivals": arrivals}}


def lengths(content: dict[str, Any], requests: int, replication: int = 0) -> list[tuple[int, int]]:
    plan = prepare(content, Path("s.yaml"), [{"workload.requests": requests}]).cases[0].plan
    return [(request.prompt_tokens, answer) for request, answer in realisation(plan, replication)]


@pytest.mark.parametrize("arrivals", [POISSON, {"process": "closed_loop", "concurrency": 3}])
def test_rows_are_drawn_with_replacement_and_keep_their_answers(workspace: Path, arrivals: dict[str, Any]) -> None:
    sample = lengths(document(arrivals), 4000)
    counts = np.array([sample.count((prompt, output)) for _, prompt, output in ROWS])
    assert counts.sum() == 4000
    assert np.abs(counts - 1000).max() < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert lengths(document(arrivals), 4000, replication=1) != sample


def test_prompts_and_answers_may_be_drawn_apart(workspace: Path) -> None:
    assert len(set(lengths(document(POISSON, pairing="independent"), 4000))) == 16


def test_rows_with_prefix_ids_come_once_and_in_order(workspace: Path) -> None:
    content = document(POISSON, "hashed.jsonl")
    assert lengths(content, 3) == [(10, 1), (20, 2), (30, 3)]
    message = (
        r"workload\.requests: got 5, expected at most the 4 rows of the trace, which come once and in order, since "
    )
    with pytest.raises(BadInput, match=message):
        lengths(content, 5)
    assert len(lengths(document(POISSON, "hashed.jsonl", pairing="independent"), 5)) == 5


def test_a_replay_has_no_more_requests_than_the_trace_has_rows(workspace: Path) -> None:
    assert lengths(document(REPLAY), 4) == [(prompt, output) for _, prompt, output in ROWS]
    with pytest.raises(BadInput, match=r"requests: got 5, expected at most the 4 rows .*which replay plays once"):
        lengths(document(REPLAY), 5)


@pytest.mark.parametrize("command", ["simulate", "sweep"])
def test_a_replay_that_ends_early_says_so(workspace: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (workspace / "s.yaml").write_text(write_yaml(document(REPLAY)))
    message = "replay: the first 3 of 4 rows of the trace, 2 of 5 seconds"
    assert run([command, "s.yaml", "--no-figures", "--json", "--set", "workload.requests=3"]) == 0
    captured = capsys.readouterr()
    assert message in captured.err
    printed = json.loads(captured.out)
    result = printed["points"][0] if command == "sweep" else printed
    assert result["replayed"] == {"requests": 3, "rows": 4, "seconds": 2.0, "recorded_seconds": 5.0}
    assert run([command, "s.yaml", "--no-figures", "--set", "workload.requests=3"]) == 0
    assert message in capsys.readouterr().out
    assert run([command, "s.yaml", "--no-figures"]) == 0
    assert "replay:" not in "".join(capsys.readouterr())
