"""Files and settings that use the earlier names of fields give the same scenario, and one note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from latency_models.io import earlier_names
from latency_models.sources.registry import StepTimeSpec  # noqa: F401  (registers the sources)
from latency_models.sources.specification import SourceSpec
from scenarios.engine import EngineSpec
from scenarios.kv_memory import KVMemorySpec
from scenarios.serving import check_scenario
from scenarios.steps import SloChunksSpec
from tests.twin.serving.scenarios import scenario
from twin.cli import run
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

FILE = Path("s.yaml")
CHUNKS = {"tokens": [1, 64], "seconds": [0.001, 0.004]}

EARLIER: dict[str, Any] = {
    "kv_memory": {"memory": 1e11, "utilization": 0.8, "model": "llama-3.1-8b", "tensor_parallel": 2},
    "block_tokens": 32,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "prefix_caching": False,
    "share": "computed",
    "lead_cold_prefixes": True,
    "order": "priority",
    "reserve": "answer",
    "data_parallel": 2,
    "chunking": {"policy": "slo", "goal": 0.005, "smallest": 2, "largest": 32, "step": 2, **CHUNKS},
}

PRESENT: dict[str, Any] = {
    "kv_memory": {"memory": 1e11, "gpu_memory_utilization": 0.8, "model": "llama-3.1-8b", "tensor_parallel_size": 2},
    "block_size": 32,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "cache_blocks_on": "computed",
    "in_batch_prefix_caching": True,
    "scheduling_policy": "priority",
    "kv_reservation": "max_tokens",
    "data_parallel_size": 2,
    "chunking": {
        "policy": "slo", "slo_seconds": 0.005, "min_tokens": 2, "max_tokens": 32, "granularity": 2, **CHUNKS,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    earlier_names.print_note.cache_clear()


def document(engine: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return scenario(**sections) | {"engine": engine}


def test_a_file_of_earlier_names_is_the_same_scenario_with_one_note(capsys: pytest.CaptureFixture[str]) -> None:
    present = check_scenario(document(PRESENT), {}, FILE)
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert check_scenario(document(EARLIER), {}, FILE) == present
    note = capsys.readouterr().err
    assert note.count("\n") == 1
    for old, new in EngineSpec.renamed.items():
        assert (f"engine.{old} is now called engine.{new}" in note) == (old != "kv_blocks")
    for section, names in (("kv_memory", KVMemorySpec.renamed), ("chunking", SloChunksSpec.renamed)):
        for old, new in names.items():
            assert f"engine.{section}.{old} is now called engine.{section}.{new}" in note
    assert "engine.kv_reservation: answer is now called max_tokens" in note


@pytest.mark.parametrize("file", [EARLIER, PRESENT])
@pytest.mark.parametrize(("old", "new"), [("order", "scheduling_policy"), ("block_tokens", "block_size")])
def test_settings_of_either_name_replace_fields_of_either(file: dict[str, Any], old: str, new: str) -> None:
    value = {"order": "shortest_prompt", "block_tokens": 8}[old]
    for name in (old, new):
        engine = check_scenario(document(file), {f"engine.{name}": value}, FILE).engine
        assert engine.model_dump()[new] == value


def test_a_sweep_over_an_earlier_name_is_told_by_the_present_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario(workload={"requests": 5})))
    setting = ["--set", "engine.order=fcfs,shortest_prompt", "--jobs", "1", "--no-figures", "--json"]
    assert run(["sweep", "s.yaml", *setting]) == 0
    told = capsys.readouterr()
    settings = [point["settings"] for point in json.loads(told.out)["points"]]
    assert settings == [{"engine.scheduling_policy": "fcfs"}, {"engine.scheduling_policy": "shortest_prompt"}]
    assert told.err.count("is now called") == 1
    (manifest,) = tmp_path.glob("runs/*/manifest.json")
    engines = [each["engine"] for each in json.loads(manifest.read_text())["scenarios"]]
    assert [each["scheduling_policy"] for each in engines] == ["fcfs", "shortest_prompt"]
    assert not any("order" in each for each in engines)


def test_a_field_under_both_names_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^s\.yaml: engine\.scheduling_policy: expected scheduling_policy alone: order"):
        check_scenario(document({**PRESENT, "order": "fcfs"}), {}, FILE)
    both = {"engine.order": "fcfs", "engine.scheduling_policy": "priority"}
    with pytest.raises(BadInput, match=r"^--set: got 'engine\.scheduling_policy', expected engine\.scheduling_policy "):
        check_scenario(document(PRESENT), both, FILE)


@pytest.mark.parametrize(("old", "new"), SourceSpec.renamed_values["source"].items())
def test_step_time_sources_are_read_by_their_earlier_names(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for section in ("step_time", "system"):
        earlier_names.print_note.cache_clear()
        named: dict[str, Any] = {"source": old, "path": "somewhere"}
        system = {"layout": "disaggregated", "link": {"bandwidth": 1, "bytes_per_token": 1}, "decode_step_time": named}
        changes = {"step_time": named} if section == "step_time" else {"system": system}
        checked = check_scenario(scenario() | changes, {}, FILE)
        assert new in str(checked.model_dump()[section])
        assert f"source: {old} is now called {new}" in capsys.readouterr().err


def test_a_prepared_sweep_has_present_names() -> None:
    (case,) = prepare(document(EARLIER), FILE, [{"engine.reserve": "prompt"}]).cases
    assert case.settings == {"engine.kv_reservation": "prompt"}
