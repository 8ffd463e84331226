"""Where paths start: on the command line from the current folder, in a file from that file's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latency_models.io.config_io import write_yaml
from scenarios import afd, reading, serving, validation
from tests.twin.conftest import SMALL
from tests.twin.serving.scenarios import scenario

TRACE = "prompt_tokens,output_tokens\n" + "10,20\n300,40\n" * 20
FILE = Path("folder/s.yaml")


def at(document: Any, field: str) -> Any:
    for name in field.split("."):
        document = document[name]
    return document


SERVING = scenario(workload={"prefill": None, "decode": None, "trace": {"path": "t.csv"}})
KERNELS = {"source": "kernel_tables", "path": "tables", "model": "m.yaml"}
LINK = {"bandwidth": 1.0, "bytes_per_token": 1.0}
AFD = {
    "schema": "twin.scenario/1", "kind": "afd-bundle", "name": "x", "batch_size": 1, "calibration": "c.yaml",
    "workload": {"trace": {"path": "t.csv"}},
}  # fmt: skip
VALIDATION = {
    "schema": "twin.scenario/1", "kind": "validation", "name": "x", "model": {"path": "m"}, "calibration": "c.yaml",
    "workload": {
        "requests": 9,
        "prefill": {"distribution": "fixed", "mean": 3},
        "decode": {"distribution": "fixed", "mean": 3},
        "arrivals": {"process": "poisson"},
    },
    "engine": {"num_gpu_blocks": 9}, "loads": [0.5], "profiling": {"max_prompt_tokens": 9, "max_output_tokens": 9},
}  # fmt: skip
CASES = [
    (serving, {**SERVING, "step_time": KERNELS}, "step_time.path", "x"),
    (serving, {**SERVING, "step_time": KERNELS}, "step_time.model", "x.yaml"),
    (serving, {**SERVING, "step_time": {"source": "calibration_file", "path": "x"}}, "step_time.path", "y"),
    (serving, SERVING, "workload.trace.path", "a/x.csv"),
    (serving, {**SERVING, "measured": {"requests": "r"}}, "measured.requests", "x"),
    (serving, {**SERVING, "measured": {"requests": "r", "timeseries": "t"}}, "measured.timeseries", "x"),
    (
        serving,
        {**SERVING, "engine": {"kv_memory": {"memory": 1.0, "model": "m.yaml"}}},
        "engine.kv_memory.model",
        "./x",
    ),
    (
        serving,
        {**SERVING, "system": {"layout": "disaggregated", "link": LINK, "decode_step_time": KERNELS}},
        "system.decode_step_time.path",
        "x",
    ),
    (afd, AFD, "calibration", "x.yaml"),
    (afd, {**AFD, "calibration": {"hardware": "h.yaml", "model": "m.yaml"}}, "calibration.hardware", "x.yaml"),
    (afd, {**AFD, "calibration": {"hardware": "h.yaml", "model": "m.yaml"}}, "calibration.model", "x.yaml"),
    (afd, AFD, "workload.trace.path", "x.csv"),
    (validation, VALIDATION, "model.path", "x"),
    (validation, VALIDATION, "calibration", "x"),
]


def read(kind: Any, document: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    check = kind.check_validation if kind is validation else kind.check_scenario
    model: dict[str, Any] = check(document, settings, FILE).model_dump()
    return model


@pytest.mark.parametrize(("kind", "document", "field", "value"), CASES)
def test_a_path_in_a_setting_starts_here_and_one_in_the_file_stays(
    kind: Any, document: dict[str, Any], field: str, value: str
) -> None:
    assert at(read(kind, document, {}), field) == at(document, field)
    settings = reading.single_settings([f"{field}={value}"])
    assert at(read(kind, document, settings), field) == str(Path.cwd() / value)
    assert settings == {field: value}
    section, _, name = field.rpartition(".")
    if section:
        whole = reading.single_settings([f"{section}={json.dumps({**at(document, section), name: value})}"])
        assert at(read(kind, document, whole), field) == str(Path.cwd() / value)


def test_a_built_in_name_stays_a_name() -> None:
    assert read(afd, AFD, {"calibration": "deepseek-v3-ascend-910c"})["calibration"] == "deepseek-v3-ascend-910c"
    model = read(serving, {**SERVING, "step_time": KERNELS}, {"step_time.model": "qwen3-4b"})
    assert model["step_time"]["model"] == "qwen3-4b"


def test_a_trace_is_found_alike_by_flag_and_by_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    (tmp_path / "away/small.yaml").write_text(SMALL)
    (tmp_path / "away/in-file.yaml").write_text(write_yaml(AFD | {"calibration": "deepseek-v3-ascend-910c"}))
    (tmp_path / "here.csv").write_text(TRACE)
    (tmp_path / "away/t.csv").write_text(TRACE)
    common = ("--ratio", "1", "--set", "requests_per_instance=50", "--set", "batch_size=4", "--no-figures")
    points = []
    for arguments in (
        ("away/small.yaml", "--trace", "here.csv", "--set", "seed=0"),
        ("away/in-file.yaml", "--set", "workload.trace.path=here.csv"),
        ("away/in-file.yaml",),
    ):
        points.append(printed("sweep", *arguments, *common)["points"])
    assert points[0] == points[1] == points[2]
