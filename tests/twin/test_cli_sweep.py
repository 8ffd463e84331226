"""`twin sweep` from the outside: its document, its run folder, resuming, and what it says of bad input."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reports.pages.page_contents import Tables, columns, titles
from twin.cli import run

POINT_KEYS = {
    "ratio",
    "attention_instances",
    "ffn_instances",
    "throughput_per_instance",
    "throughput_per_instance_steady",
    "throughput_ci",
    "throughput_per_instance_theory",
    "throughput_per_instance_barrier",
    "tpot",
    "idle_attention",
    "idle_ffn",
}


def test_the_document_has_what_is_promised(sweep) -> None:
    document = sweep("--ratio", "1,7/2,4")
    assert document["schema"] == "twin.sweep/1"
    assert document["simulated"] is True
    assert document["theory"]["r_star"] > 0
    assert document["theory"]["regime"] in {"attention-bottleneck", "communication-bottleneck", "ffn-bottleneck"}
    assert [point["ratio"] for point in document["points"]] == [1, 3.5, 4]
    assert [(point["attention_instances"], point["ffn_instances"]) for point in document["points"]] == [
        (1, 1),
        (7, 2),
        (4, 1),
    ]
    assert all(point.keys() >= POINT_KEYS for point in document["points"])


def test_factors_between_theory_and_measurement_multiply_to_the_gap(sweep) -> None:
    for point in sweep("--set", "requests_per_instance=1500")["points"]:
        product = 1.0
        for factor in point["gaps"].values():
            product *= factor
        whole = point["throughput_per_instance"] / point["throughput_per_instance_theory"]
        assert product == pytest.approx(whole, rel=1e-9)


def test_a_seed_reproduces_and_another_does_not(sweep) -> None:
    first, again, reseeded = sweep(), sweep(), sweep("--set", "seed=8")
    assert first["points"] == again["points"]
    assert first["points"] != reseeded["points"]


def test_a_point_does_not_depend_on_its_company_nor_on_processes(sweep) -> None:
    single = sweep("--ratio", "2")["points"][0]
    among = sweep("--ratio", "1:4", "--jobs", "2")["points"][1]
    assert single == among


@pytest.mark.parametrize(
    "setting",
    [
        "refill=least_loaded",
        "start=stationary",
        "layers=3",
        "microbatches=3",
        "workload.arrivals={process: poisson, rate: 0.01}",
    ],
)
def test_every_option_runs(sweep, setting: str) -> None:
    document = sweep("--ratio", "2", "--set", setting)
    assert document["points"][0]["throughput_per_instance"] > 0
    assert document["points"][0]["requests"] == 240


def test_open_arrivals_have_no_closed_loop_theory(sweep) -> None:
    (point,) = sweep("--ratio", "2", "--set", "workload.arrivals={process: poisson, rate: 0.001}")["points"]
    assert point["throughput_per_instance_barrier"] is None
    assert point["gaps"] is None
    # Two attention instances at 0.001 requests a cycle each, 20 tokens a request, three instances in all.
    assert point["throughput_per_instance"] == pytest.approx(2 * 0.001 * 20 / 3, rel=0.4)


def test_the_run_folder(scenario: Path) -> None:
    assert run(["sweep", str(scenario), "--jobs", "1", "--ratio", "1:8"]) == 0
    (folder,) = (scenario.parent / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["scenarios"][0]["batch_size"] == 16
    assert manifest["seed"] == 7
    assert {"command", "version", "commit", "calibration_hash", "schema"} <= manifest.keys()
    summary = json.loads((folder / "summary.json").read_text())
    lines = (folder / "points.jsonl").read_text().splitlines()
    assert len(lines) == len(summary["points"]) == 8
    assert sorted(path.name for path in (folder / "figures").iterdir()) == ["idle.svg", "regimes.svg", "throughput.svg"]
    page = (folder / "report.html").read_text()
    assert Tables(page).loaded == []
    assert [title.partition(":")[0] for title in titles(page)] == [
        "Throughput", "Who waits for whom (eq. 23)", "What a decode step takes, cycles",
    ]  # fmt: skip
    figures, points = columns(page), summary["points"]
    for name in ("theory", "barrier"):
        assert summary["configurations"][0]["curves"][name] in [curve.get("y") for curve in figures]
    explored = next(curve for curve in figures if "throughput_per_instance_steady" in curve)
    assert explored["ratio"] == [point["ratio"] for point in points]
    assert explored["throughput_per_instance_steady"] == [point["throughput_per_instance_steady"] for point in points]


def test_requests_are_kept_on_demand(scenario: Path, sweep) -> None:
    import pyarrow.parquet as parquet

    document = sweep("--requests", "--ratio", "1,5/2", "--jobs", "2")
    folder = Path(document["run"]["directory"]) / "requests"
    assert sorted(path.name for path in folder.iterdir()) == ["0-1A-1F.parquet", "0-5A-2F.parquet"]
    table = parquet.read_table(folder / "0-5A-2F.parquet").to_pydict()
    assert len(table["request"]) == 600
    rows = zip(table["finish"], table["first_token"], table["decode_tokens"], strict=True)
    tpot = sum((finish - first) / tokens for finish, first, tokens in rows) / 600
    assert tpot == pytest.approx(document["points"][1]["tpot"], rel=1e-9)


def start(scenario: Path, *arguments: str, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twin", "sweep", str(scenario), "--no-figures", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_a_killed_sweep_is_taken_up_with_no_point_lost_or_repeated(scenario: Path, sweep) -> None:
    arguments = ("--ratio", "1:12", "--jobs", "1", "--set", "requests_per_instance=600")
    process = start(scenario, *arguments)
    points = None
    while points is None or points.read_text().count("\n") < 3:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)
        points = next(scenario.parent.glob("runs/*/points.jsonl"), None)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # A kill can tear a line in two.
    finished = points.read_text().splitlines()
    with points.open("a") as file:
        file.write(finished[0][:40])
    resumed = sweep(*arguments)
    assert Path(resumed["run"]["directory"]).name == points.parent.name
    lines = [json.loads(line) for line in points.read_text().splitlines()]
    assert len(lines) == 12
    assert len({line["key"] for line in lines}) == 12
    assert lines[: len(finished)] == [json.loads(line) for line in finished]
    whole = sweep(*arguments)
    assert whole["run"]["id"] != resumed["run"]["id"]
    assert whole["points"] == resumed["points"]


def test_a_run_that_is_alive_is_left_alone(scenario: Path, sweep) -> None:
    arguments = ("--ratio", "1:6", "--jobs", "1", "--set", "requests_per_instance=8000")
    process = start(scenario, *arguments)
    while not list(scenario.parent.glob("runs/*/points.jsonl")):
        time.sleep(0.005)
    document = sweep(*arguments)
    assert len(document["points"]) == 6
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert len(list((scenario.parent / "runs").iterdir())) == 2


def test_a_full_disk_is_one_line(scenario: Path) -> None:
    def no_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))

    process = start(scenario, "--jobs", "1", preexec_fn=no_large_files)
    _, error = process.communicate()
    assert process.returncode == 2
    (line,) = [line for line in error.splitlines() if "simulating" not in line]
    assert "runs/" in line
    assert "File too large" in line
    (folder,) = (scenario.parent / "runs").iterdir()
    assert {file.name for file in folder.iterdir()} == {"lock", "manifest.json", "points.jsonl"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["complete"] is False
    assert "File too large" in manifest["status"]
    assert (folder / "points.jsonl").read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ratio", "0"], ["--ratio", "'0'", "above 0"]),
        (["--ratio", "-1"], ["--ratio", "above 0"]),
        (["--ratio", "4:1"], ["--ratio", "'4:1'"]),
        (["--ratio", "1,,2"], ["--ratio"]),
        (["--ratio", "nan"], ["--ratio"]),
        (["--ratio", "1/0"], ["--ratio"]),
        (["--ratio", "1:1e9"], ["--ratio"]),
        (["--set", "batch_size=0"], ["small.yaml", "batch_size", "got 0", "above 0"]),
        (["--set", "batch_size=2.5"], ["batch_size", "2.5"]),
        (["--set", "batchsize=3"], ["batchsize", "unknown field", "batch_size"]),
        (["--set", "batch_size"], ["--set", "key=value"]),
        (["--set", "batch_size=1,,2"], ["--set"]),
        (["--set", "batch_size=1", "--set", "batch_size=2"], ["--set", "once"]),
        (["--set", "latency.attention.alpha=-1"], ["small.yaml", "latency.attention.alpha", "got -1", "at least 0"]),
        (["--set", "workload.decode.mean=.nan"], ["workload.decode.mean", "nan"]),
        (["--set", "workload.decode.distribution=zipf"], ["workload.decode", "zipf", "geometric"]),
        (["--set", "workload.arrivals.process=replay"], ["workload", "replay", "trace"]),
        (["--set", "calibration=nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["--set", "calibration=h100"], ["h100", "deepseek-v3-ascend-910c"]),
        (["--set", "name.first=x"], ["--set", "name"]),
        (["--trace", "nowhere.csv"], ["nowhere.csv", "expected a file"]),
        (["--trace", "x.csv", "--set", "workload.decode.mean=3"], ["--set", "workload.decode.mean", "--trace"]),
        (["--set", "latency.ffn.alpha=0"], ["latency.ffn.alpha", "above 0"]),
        (["--set", "ratio='1,2','4'"], ["--set ratio", "--ratio"]),
        (["--jobs", "0"], ["--jobs", "0"]),
        (["--jobs", "two"], ["--jobs", "two"]),
        (["--colour", "red"], ["--colour"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(scenario: Path, refusal, arguments: list[str], words: list[str]) -> None:
    line = refusal("sweep", str(scenario), *arguments)
    assert all(word in line for word in words), line
    assert not (scenario.parent / "runs").exists()


def test_bad_files_are_one_line(scenario: Path, refusal) -> None:
    assert "No such file" in refusal("sweep", "nowhere.yaml")
    assert "directory" in refusal("sweep", str(scenario.parent))
    broken = scenario.parent / "broken.yaml"
    broken.write_text("a: [1,\nb: 2\n")
    assert "broken.yaml:" in refusal("sweep", str(broken))
    broken.write_text("kind: unknown\n")
    assert "kind" in refusal("sweep", str(broken))
    trace = scenario.parent / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n10,20\n10,twenty\n")
    line = refusal("sweep", scenario, "--trace", trace)
    assert "trace.csv:3" in line
    assert "output_tokens" in line
    assert "twenty" in line


def test_time_units_are_not_mixed(scenario: Path, refusal) -> None:
    copy = scenario.parent / "own.yaml"
    assert run(["calibrate", "roofline", "--hardware", "h200-sxm", "--model", "qwen3-4b", "-o", str(copy)]) == 0
    line = refusal("sweep", str(scenario), "--set", f"calibration=deepseek-v3-ascend-910c,{copy}")
    assert "cycles and seconds" in line


def test_a_trace_replaces_the_synthetic_lengths(scenario: Path, sweep, capsys: pytest.CaptureFixture[str]) -> None:
    trace = scenario.parent / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "10,20\n300,40\n" * 20)
    document = sweep("--trace", str(trace), "--ratio", "1")
    assert document["theory"]["mean_prefill"] == 155
    assert document["theory"]["mean_decode"] == 30
    assert document["theory"]["slot_load_renewal_interval"][0] < document["theory"]["slot_load_renewal"]
    assert run(["sweep", str(scenario), "--no-figures", "--jobs", "1", "--trace", str(trace), "--ratio", "1"]) == 0
    low, high = document["theory"]["r_star_renewal_interval"]
    interval = (
        f"{document['theory']['r_star_renewal']:.2f} by the trace's pairs of lengths (95 %: {low:.2f} to {high:.2f})"
    )
    assert interval in " ".join(capsys.readouterr().out.split())


def test_replay_plays_the_trace_at_its_own_times(scenario: Path, sweep, refusal) -> None:
    trace = scenario.parent / "trace.csv"
    rows = [f"{0.5 * index},100,{10 + index % 7}" for index in range(60)]
    trace.write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows]))
    replay = ("--trace", str(trace), "--set", "workload.arrivals={process: replay, speed: 2}", "--ratio", "2")
    assert "in cycles" in refusal("sweep", str(scenario), *replay)
    seconds = ("--set", "calibration={hardware: h200-sxm, model: llama-3.1-8b}", "--requests")
    document = sweep(*replay, *seconds)
    (point,) = document["points"]
    assert point["requests"] == 60
    # The last request comes at 29.5 s, played twice as fast.
    assert 14.75 < point["simulated_time"] < 20


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(scenario: Path, refusal) -> None:
    scenario.parent.chmod(0o500)
    assert "Permission denied" in refusal("sweep", str(scenario), "--jobs", "1", "--no-figures")


def test_what_all_configurations_share_is_said_once(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--ratio", "1,2", "--jobs", "1", "--set", "seed=33"]
    assert run(["sweep", str(scenario), *common, "--set", "batch_size=8,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "All with seed=33."
    assert [line.split(":")[0] for line in lines if "r* =" in line] == ["batch_size=8", "batch_size=16"]
    assert " ".join(lines).count("seed") == 1
    (folder,) = (scenario.parent / "runs").iterdir()
    assert "seed" not in (folder / "figures/throughput.svg").read_text()
    page = (folder / "report.html").read_text()
    assert page[: page.index("How this was made")].count("seed=33") == 1
