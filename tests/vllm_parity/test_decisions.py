"""`EngineCore` decides as vLLM did, step by step: as recorded, and as the installed version does where there is one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from scenarios.engine import EngineSpec
from schedulers.engine_config import SCHEDULER_VERSIONS
from schedulers.hosted_core import HostedCore
from tests.vllm_parity.recorded import first_difference, read
from tests.vllm_parity.replay import HostedByOurs, OurScheduler, VllmScheduler, decisions, difference
from tests.vllm_parity.workloads import FAMILIES, make_workload


@pytest.mark.parametrize("scheduler", SCHEDULER_VERSIONS)
def test_every_step_is_as_recorded(scheduler: str) -> None:
    workloads, differences = 0, []
    for family, seed, expected in read(scheduler):
        workload = make_workload(family, seed).for_version(scheduler)
        found = [decision.digest() for decision in decisions(workload, OurScheduler(workload))]
        difference = first_difference(scheduler, family, seed, expected, found)
        workloads += 1
        if difference is not None:
            differences.append(difference)
    assert not differences
    assert workloads >= 300


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_another_rule_is_noticed(seed: int) -> None:
    """The recorded steps of one version are not those of another."""
    recorded = {(family, number): expected for family, number, expected in read("vllm-0.19")}
    different = 0
    for family in ("shared_prefixes", "sessions", "priorities", "tiny_caches"):
        for number in range(seed, 30, 3):
            workload = make_workload(family, number).for_version("vllm-0.33")
            found = [decision.digest() for decision in decisions(workload, OurScheduler(workload))]
            different += found != recorded[family, number]
    assert different


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hosted_scheduler_shows_what_its_host_decides(family: str) -> None:
    for seed in range(20):
        workload = make_workload(family, seed)
        if workload.reset_at:
            continue  # a host is asked for no empty cache
        hosted = HostedCore(workload.config, HostedByOurs(workload.config))
        expected = decisions(workload, OurScheduler(workload))
        assert difference(expected, decisions(workload, OurScheduler(workload, hosted))) is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"max_table_blocks": 10}, "expected no max_table_blocks with scheduler installed-vllm"),
        ({"one_shot": {}}, "expected no one_shot with scheduler installed-vllm"),
        ({"scheduling_policy": "deadline"}, "expected scheduling_policy fcfs or priority"),
    ],
)
def test_settings_that_vllm_lacks_are_refused_with_its_scheduler(setting: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        EngineSpec(num_gpu_blocks=100, scheduler="installed-vllm", **setting)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_version_decides_alike(family: str) -> None:
    from tests.vllm_parity.compare import scheduler_for
    from twin.serving.engine.installed_vllm import vllm_version

    for seed in range(200, 220):
        workload = make_workload(family, seed).for_version(scheduler_for(vllm_version()))
        found = decisions(workload, OurScheduler(workload))
        assert difference(decisions(workload, VllmScheduler(workload)), found) is None
