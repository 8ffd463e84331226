"""Memory, model and step times of a scenario must speak of the same deployment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from latency_models.deployment.models import load_model
from latency_models.io.config_io import write_yaml
from latency_models.sources.aiconfigurator.kernels import ModelKernels
from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.step_time import MeasuredDeployment, Origin, StepTime
from reports.serving_sentences import footnote
from scenarios.serving import check_scenario
from schedulers.batches import Batch
from tests.latency_models.sources.aiconfigurator.test_step_time import KERNELS
from tests.latency_models.sources.kernel_tables.small_tables import make_tables
from tests.twin.serving.scenarios import scenario
from twin.serving.plan.plan import describe
from twin.serving.plan.pools import check_deployment
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

LINK = {"bandwidth": 1e9, "latency": 0.0, "source": "made up"}


class ConstantStepTime(StepTime):
    def seconds(self, batch: Batch) -> float:
        return 0.02

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return [0.02] * steps


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Kernels of llama-3.1-8b on two GPUs, from either source, in the current directory."""
    monkeypatch.chdir(tmp_path)
    origin = Origin("NVIDIA H200", "vllm", "0.12.0", "llama-3.1-8b", 2)
    kernels: ModelKernels = replace(KERNELS, origin=origin, notes=("stretched",))
    (tmp_path / "kernels.yaml").write_text(write_yaml(kernels.document()))
    tables = read_kernel_tables(make_tables(tmp_path / "profile_tp2")).recorded(origin)
    (tmp_path / "tables.yaml").write_text(write_yaml(tables.document()))
    return tmp_path


KERNELS_SPEC = {"source": "aiconfigurator", "path": "kernels.yaml"}
TABLES_SPEC = {
    "source": "kernel_tables",
    "path": "tables.yaml",
    "model": "llama-3.1-8b",
    "tensor_parallel": 2,
    "communication": LINK,
}


def plan(workspace: Path, step_time: dict[str, Any], **memory: Any) -> Any:
    kv_memory = {"memory": 1e11, "model": "llama-3.1-8b", "tensor_parallel_size": 2, **memory}
    settings = {"engine.num_gpu_blocks": None, "engine.kv_memory": kv_memory, "step_time": step_time}
    return prepare(scenario(), workspace / "s.yaml", [settings]).cases[0].plan


@pytest.mark.parametrize("spec", [KERNELS_SPEC, TABLES_SPEC], ids=["aiconfigurator", "kernel_tables"])
def test_what_agrees_is_recorded_and_shown(workspace: Path, spec: dict[str, Any]) -> None:
    description = describe(plan(workspace, spec))["step_time"]
    assert description["measured_on"] == {
        "gpu": "NVIDIA H200",
        "engine": "vllm",
        "engine_version": "0.12.0",
        "model": "llama-3.1-8b",
        "tensor_parallel": 2,
    }
    output = footnote({"note": "Simulated.", "step_time": description, "replications": 1, "draws": 0, "random": []})
    assert ", measured on NVIDIA H200, vllm 0.12.0, llama-3.1-8b, tensor parallel 2." in output
    guess = "the link between ranks is a guess (± 35 %; made up)"
    advice = "measure an all-reduce, or refine on a short run (twin calibrate refine)"
    assert description["notes"] == [f"{guess}: {advice}" if spec is TABLES_SPEC else "stretched"]
    assert f"{description['notes'][0][1:]}." in output


@pytest.mark.parametrize("spec", [KERNELS_SPEC, TABLES_SPEC], ids=["aiconfigurator", "kernel_tables"])
def test_memory_of_another_deployment_is_refused(workspace: Path, spec: dict[str, Any]) -> None:
    with pytest.raises(
        BadInput, match=r"engine.kv_memory.tensor_parallel_size: got 4, expected 2, as step_time is for$"
    ):
        plan(workspace, spec, tensor_parallel_size=4)
    with pytest.raises(BadInput, match=r"engine.kv_memory.model: got 'qwen3-4b', expected llama-3.1-8b, which"):
        plan(workspace, spec, model="qwen3-4b")


def test_any_source_may_say_what_it_was_measured_for(workspace: Path) -> None:
    class OnFour(ConstantStepTime):
        def measured_deployment(self) -> MeasuredDeployment:
            return MeasuredDeployment(Origin(gpu="Some GPU"), ranks=4, notes=("by hand",))

    pool = plan(workspace, KERNELS_SPEC).pools[0]
    engine, stated = pool.spec.engine, pool.spec.step_time.provenance()
    origin = {"measured_on": {"gpu": "Some GPU"}, "notes": ["by hand"]}
    assert replace(pool, step_time=OnFour()).describe()["step_time"] == stated | origin
    with pytest.raises(BadInput, match=r"tensor_parallel_size: got 2, expected 4, as step_time is for$"):
        check_deployment(engine, workspace, OnFour())
    assert replace(pool, step_time=ConstantStepTime()).describe()["step_time"] == stated
    check_deployment(engine, workspace, ConstantStepTime())


def test_tables_of_another_model_are_refused(workspace: Path) -> None:
    with pytest.raises(BadInput, match=r"step_time.model: got 'qwen3-4b', expected llama-3.1-8b, whose kernels"):
        plan(workspace, {**TABLES_SPEC, "model": "qwen3-4b"}, model="qwen3-4b")


def test_a_model_file_of_the_same_layers_is_the_same_model(workspace: Path) -> None:
    copy = load_model("llama-3.1-8b").model_copy(update={"name": "ours", "source": "a fine-tune"})
    (workspace / "ours.yaml").write_text(write_yaml(copy.model_dump(mode="json", by_alias=True, exclude_none=True)))
    ours, expected = (describe(plan(workspace, TABLES_SPEC, model=model)) for model in ("ours.yaml", "llama-3.1-8b"))
    assert ours["num_gpu_blocks"] == expected["num_gpu_blocks"] > 0


def test_a_folder_in_place_of_the_imported_file(workspace: Path) -> None:
    with pytest.raises(BadInput, match=r"expected the file that twin calibrate import makes of this folder$"):
        plan(workspace, {**KERNELS_SPEC, "path": "."})


@pytest.mark.parametrize("settings", [{"system.replicas": 3}, {"system": {"replicas": 3}}])
def test_a_system_without_a_layout_is_colocated(settings: dict[str, Any]) -> None:
    checked = check_scenario(scenario(), settings, Path("s.yaml"))
    assert checked.system.model_dump() == {
        "layout": "colocated", "replicas": 3, "routing": "least_loaded", "kv_events": None, "autoscaling": None,
        "device": None, "frontend": {"route": 0.0, "deliver": 0.0, "hand_over": 0.0},
    }  # fmt: skip
    with pytest.raises(BadInput, match=r"system.layout: expected this field, which is missing$"):
        check_scenario(scenario(), {"system.decode_replicas": 3}, Path("s.yaml"))


def pools_plan(workspace: Path, spec: dict[str, Any], device: dict[str, Any]) -> Any:
    pools = [{"name": "p", "device": device, "engine": {"num_gpu_blocks": 1000}, "step_time": spec}]
    return prepare(scenario(), workspace / "s.yaml", [{"system": {"pools": pools}}]).cases[0].plan


def test_devices_of_another_deployment_are_refused(workspace: Path) -> None:
    for device in ({"type": "H200", "count": 2}, {"type": "NVIDIA H200 SXM", "count": 2}, {"type": "ours", "count": 2}):
        assert pools_plan(workspace, KERNELS_SPEC, device).pools
    with pytest.raises(BadInput, match=r"system.pools.p.device.count: got 4, expected 2, as its step_time is for$"):
        pools_plan(workspace, KERNELS_SPEC, {"type": "H200", "count": 4})
    with pytest.raises(BadInput, match=r"system.pools.p.device.type: got 'H100', expected NVIDIA H200, which its"):
        pools_plan(workspace, KERNELS_SPEC, {"type": "H100", "count": 2})
    roofline = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "l40s"}
    with pytest.raises(BadInput, match=r"system.pools.p.device.type: got 'H100', expected l40s, which its step_time"):
        pools_plan(workspace, roofline, {"type": "H100"})


def test_a_roofline_knows_its_devices(workspace: Path) -> None:
    step_time = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "l40s", "tensor_parallel": 2}
    settings = {"engine.num_gpu_blocks": None, "step_time": step_time, "system": {"replicas": 3}}
    described = describe(prepare(scenario(), workspace / "s.yaml", [settings]).cases[0].plan)
    assert described["devices"] == {"total": 6, "by_type": {"l40s": 6}, "cost_per_hour": None}
    assert "measured_on" not in described["step_time"]
    assert described["num_gpu_blocks"] > 10000
