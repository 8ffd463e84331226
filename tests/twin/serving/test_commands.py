"""`twin simulate` and `twin sweep` on serving scenarios, from the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from twin.cli import run
from twin.sweeps import one_run

EXAMPLES = Path(__file__).parents[3] / "examples"
RUN = Path(__file__).parents[4] / "shared/data/measured/vllm_0.19_rtxpro6000_llama31_8b"


@pytest.fixture
def workspace(file: Path) -> Path:
    return file.parent


def test_requests_alone_may_be_kept(workspace: Path, printed) -> None:
    results = []
    for detail in ("true", "requests", "false"):
        document = printed("simulate", "s.yaml", "--set", f"detail={detail}")
        results.append((document, workspace / document["run"]["directory"] / "requests.parquet"))
    (full, requests), (short, streamed), (none, absent) = results
    assert parquet.read_table(streamed).equals(parquet.read_table(requests))
    assert not absent.exists()
    assert (short["series"], short["summary"]["kv_used"]) == (None, None)
    assert short["summary"] == none["summary"] == {**full["summary"], "kv_used": None}


def test_independent_engines_in_processes_leave_the_same_files(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_run, "WORTH_A_PROCESS", 10)
    system = "system={layout: colocated, replicas: 4, routing: round_robin}"
    results = []
    for jobs in ("1", "3"):
        assert run(["simulate", "s.yaml", "--json", "--set", system, "--no-figures", "--jobs", jobs]) == 0
        output = capsys.readouterr()
        assert "one process" not in output.err
        document = json.loads(output.out)
        requests = (workspace / document.pop("run")["directory"] / "requests.parquet").read_bytes()
        results.append((json.dumps(document), requests))
    assert results[0] == results[1]
    assert run(["simulate", "s.yaml", "--json", "--set", "system.replicas=4", "--no-figures", "--jobs", "2"]) == 0
    expected = "one process, since engines are not independent (system.routing: least_loaded looks at all engines"
    assert expected in capsys.readouterr().err


def test_outages_are_in_the_document_and_in_the_trace(workspace: Path, printed) -> None:
    failures = "failures=[{engine: engine-0, at: 0.5, duration: 0.5}, {engine: engine-0, at: 0.75, duration: 0.5}]"
    document = printed("simulate", "s.yaml", "--events", "--no-figures", "--set", failures)
    assert document["outages"] == [{"engine": "engine-0", "start": 0.5, "end": 1.25}]
    folder = workspace / document["run"]["directory"]
    events = json.loads(gzip.decompress((folder / "trace-events.json.gz").read_bytes()))
    (outage,) = [event for event in events if event["name"] == "outage"]
    assert (outage["ts"], outage["dur"]) == (0.5e6, 0.75e6)
    spans_do_not_overlap(events)
    at = [(event["ts"], event["args"]) for event in events if event["ph"] == "C" and event["name"] == "requests"]
    assert (0.5e6, {"running": 0.0, "waiting": 0.0}) in at


def spans_do_not_overlap(events: list[dict[str, Any]]) -> None:
    end = 0.0
    slices = [event for event in events if event["ph"] == "X"]
    for event in sorted(slices, key=lambda event: event["ts"]):
        assert event["ts"] >= end - 1e-3
        end = event["ts"] + event["dur"]
    spans = [event for event in events if event["ph"] in "be"]
    assert len(slices) > 10
    assert len(spans) == 4 * 60


def test_overload_is_said_in_the_table_the_document_and_the_report(
    workspace: Path, printed, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["simulate", "s.yaml", "--set", "workload.arrivals.rate=400", "--set", "workload.requests=300"]
    assert run(line) == 0
    assert "overloaded: " in capsys.readouterr().out
    (page,) = workspace.glob("runs/*/report.html")
    assert "overloaded: " in page.read_text()
    document = printed(*line, "--no-figures", "--replications", "2")
    result = document["overload"]
    assert document["saturated"] is True
    assert result["arrival_rate"] > 1.5 * result["service_rate"] > 0
    calm = printed("simulate", "s.yaml", "--no-figures")
    assert (calm["saturated"], calm["overload"]) == (False, None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("engine.num_gpu_blocks=1,2000", "num_gpu_blocks"),  # found when a request does not fit
        ("engine.max_num_seqs=0,16", "engine.max_num_seqs: got 0"),  # found before anything runs
    ],
)
def test_a_configuration_that_cannot_run_is_a_row_with_its_reason(
    values: str, reason: str, workspace: Path, printed, capsys: pytest.CaptureFixture[str]
) -> None:
    document = printed("sweep", "s.yaml", "--set", values)
    (point,), (infeasible,) = document["points"], document["infeasible"]
    ((field, value),) = infeasible["settings"].items()
    assert point["settings"].keys() == infeasible["settings"].keys()
    assert value == int(values.partition("=")[2].partition(",")[0])
    assert reason in infeasible["reason"]
    assert infeasible["reason"] in (workspace / document["run"]["directory"] / "report.html").read_text()
    assert run(["sweep", "s.yaml", "--set", values, "--no-figures"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"infeasible: {field}={value}: " in output


@pytest.mark.parametrize("values", ["engine.num_gpu_blocks=1,2", "engine.max_num_seqs=0,-1", "engine.no_such=1,2"])
def test_a_sweep_of_which_nothing_can_run_is_refused(
    values: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "s.yaml", "--set", values]) == 2
    message = capsys.readouterr().err.strip().splitlines()
    assert values.partition("=")[0] in message[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("engine.max_num_seqs=0", "engine.max_num_seqs"),
        ("engine.max_num_seqs=100", "max_num_batched_tokens"),
        ("engine.num_gpu_blocks=2", "KV blocks"),
        ("workload.arrivals.process=often", "workload.arrivals.process"),
        ("step_time.source=guess", "step_time"),
        ("system.layout=pile", "system"),
        ("engine.scheduling_policy=lifo", "engine.scheduling_policy"),
        ("engine.one_shot={activation_bytes: 1, bytes_per_token: 2}", "one_shot.activation_bytes"),
        ("workload.trace.path=none.csv", "workload"),
    ],
)
def test_bad_scenarios_are_told_in_one_line(workspace: Path, refusal, change: str, message: str) -> None:
    assert message in refusal("simulate", "s.yaml", "--set", change)


@pytest.mark.skipif(not RUN.exists(), reason="the measured run is not here")
def test_a_real_engine_is_predicted(tmp_path: Path, printed) -> None:
    """Each of four metrics is as close as the best published simulator of this run, LLMServingSim 2.0."""
    example = str(EXAMPLES / "vllm-rtxpro6000-llama31-8b.yaml")
    document = printed("simulate", example, "--no-figures", "--runs", str(tmp_path))
    limits = {"ttft.mean": 0.04, "tpot.mean": 0.01, "e2e.mean": 0.018, "tpot.p99": 0.01}
    assert {
        name: abs(document["comparison"][name]["error"]) <= limit for name, limit in limits.items()
    } == dict.fromkeys(limits, True)
    assert document["summary"]["requests"] == 300
    assert document["outside"] == {}


def test_interrupted_replications_are_taken_up(
    workspace: Path, printed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from twin.sweeps import serving_sweep

    command = ["simulate", "s.yaml", "--no-figures", "--replications", "4", "--jobs", "1"]
    total = printed(*command, "--runs", "whole")
    command.append("--json")
    simulated: list[int] = []
    work = serving_sweep.run_task

    def interrupted(task: serving_sweep.Task) -> dict[str, Any]:
        if len(simulated) == 2:
            raise KeyboardInterrupt
        simulated.append(task.replication)
        return work(task)

    with monkeypatch.context() as patch:
        patch.setattr(serving_sweep, "run_task", interrupted)
        assert run(command) == 130
    assert "interrupted; 2 finished points are kept in runs/" in capsys.readouterr().err
    assert run(command) == 0
    captured = capsys.readouterr()
    assert "3 of 4 runs are done" in captured.err
    resumed = json.loads(captured.out)
    assert resumed["intervals"] == total["intervals"]
    assert len(list((workspace / "runs").iterdir())) == 1
