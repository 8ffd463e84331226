"""Scenarios that would exhaust memory are refused before anything is built, with what they would take and the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import twin
from scenarios import fields
from scenarios.reading import combinations
from tests.twin.conftest import SMALL
from tests.twin.serving.scenarios import scenario
from twin.sweeps import ratio_sweep
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

FILE = Path("s.yaml")
LINK = {"bandwidth": 1e9, "bytes_per_token": 1}


def split(**fields: Any) -> dict[str, Any]:
    return {"layout": "disaggregated", "link": LINK, **fields}


def ring(virtual_nodes: float, replicas: int = 2) -> dict[str, Any]:
    routing = {"policy": "consistent_hashing", "virtual_nodes": virtual_nodes}
    return {"layout": "colocated", "replicas": replicas, "routing": routing}


def sessions(turns: int = 3, growth: int = 10, **fields: Any) -> dict[str, Any]:
    lengths = {name: {"distribution": "fixed", "mean": mean} for name, mean in (("turns", turns), ("growth", growth))}
    return {"source": "drawn", **lengths, **fields}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workload.requests": 10**12}, "workload.requests: got 1000000000000, expected at most 10,000,000 requests: "
         "so many would take some 220 TB of memory"),
        ({"system": {"layout": "colocated", "replicas": 10**9}}, "system.replicas: got 1000000000, expected at most "
         "100,000 engines: so many would take some 6 TB of memory"),
        ({"system": split(decode_replicas=10**9)}, "system.decode_replicas: got 1000000000, expected at most 100,000"),
        ({"engine.data_parallel_size": 10**9},
         "engine.data_parallel_size: got 1000000000, expected at most 100,000 engines"),
        ({"workload.models.count": 10**9}, "workload.models.count: got 1000000000, expected at most 100,000 models"),
        ({"workload.models.count": 1000, "system": split(prefill_replicas=60, decode_replicas=60)},
         "system: got 120000, expected at most 100,000 engines: so many would take some 780 MB of memory; found 1,000 "
         "models, 120 engines of each, 0 shared, 1 ranks an engine"),
        ({"workload.arrivals": {"process": "closed_loop", "concurrency": 10**9}}, "workload.arrivals.concurrency: got "
         "1000000000, expected at most 1,000,000 clients: so many would take some 900 GB of memory"),
        ({"workload.prefixes": {"groups": 10**9, "tokens": 16}}, "workload.prefixes.groups: got 1000000000, expected"),
        ({"workload.prefixes": {"groups": 10, "tokens": 10**9}}, "workload.prefixes.tokens: got 1000000000, expected "
         "at most 10,000,000 ids of prompt blocks: so many would take some 25 GB of memory; a rubric has 62,500,000"),
        ({"workload.prefixes": {"groups": 1, "tokens": 16, "cache_suffix": True},
          "workload.prefill": {"distribution": "fixed", "mean": 10**9}},
         "workload.prefixes.block_tokens: got 16, expected at most 10,000,000 ids of prompt blocks"),
        ({"workload.prefill": {"distribution": "fixed", "mean": 10**12}}, "workload.prefill.mean: got 1000000000000, "
         "expected a number of at most 1000000000"),
        ({"workload.prefill": {"distribution": "uniform", "low": 9, "high": 8}}, "workload.prefill.high: got 8, "
         "expected at least low (9)"),
        ({"engine.num_gpu_blocks": 10**10},
         "engine.num_gpu_blocks: got 10000000000, expected at most 1,000,000,000 KV blocks"),
        ({"engine.num_gpu_blocks": None, "engine.kv_memory": {"memory": 1e300, "model": "llama-3.1-8b"}},
         "engine.kv_memory.memory: got 1e+300, expected at most 1,000,000,000 KV blocks, found room for "),
        ({"engine.block_size": 10**7}, "engine.block_size: got 10000000, expected at most 1,000,000 tokens a"),
        ({"engine.max_num_seqs": 10**7}, "engine.max_num_seqs: got 10000000, expected at most 1,000,000 sequences"),
        ({"system": ring(10**6)}, "system.routing.virtual_nodes: got 1000000, expected at most 10,000 virtual nodes"),
        ({"system": ring(10**4, replicas=10**4)}, "system.routing: got 100000000, expected at most 20,000,000 virtual"),
        ({"workload.sessions": sessions(growth=10**9)}, "workload.sessions: expected at most 1,000,000 ids of prompt "
         "blocks; the last of 3 turns has some 125,000,006 of 16 tokens"),
        ({"workload.sessions": sessions(think={"mean": 1e12})},
         "workload.sessions.think.mean: got 1000000000000.0, expected a number of at most 1e+09"),
        ({"workload.arrivals": {"process": "closed_loop", "concurrency": 1, "think": 1e12}},
         "workload.arrivals.think: got 1000000000000.0, expected a number of at most 1e+09"),
        ({"workload.arrivals": {"process": "gamma", "rate": 1, "cv": 1e3}}, "workload.arrivals.cv: got 1000.0"),
        ({"system": {"layout": "colocated", "autoscaling": {"engine": {
            "policy": "queue_length", "target": 4, "max_replicas": 2, "sync_period": 1e-6}}}},
         "system.autoscaling.engine.sync_period: got 1e-06, expected a number of at least 0.05"),
        ({"engine.max_num_batched_tokens": 10**9}, "engine.max_num_batched_tokens: got 1000000000, expected at most "
         "100,000,000 tokens a step"),
    ],
)  # fmt: skip
def test_a_serving_system_beyond_the_limits(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        prepare(scenario(), FILE, [settings])
    assert str(error.value).startswith("s.yaml: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((10**9, 0), "--replications: got 1000000000, expected at most 10,000 replications"),
        ((1, 10**9), "--draws: got 1000000000, expected at most 10,000 draws"),
    ],
)
def test_more_runs_than_a_command_makes(numbers: tuple[int, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(scenario(), FILE, replications=numbers[0], draws=numbers[1])


def test_more_runs_than_a_sweep_makes() -> None:
    with pytest.raises(BadInput, match="got 101000, expected at most 100,000 runs"):
        prepare(scenario(), FILE, [{"seed": seed} for seed in range(100)], replications=1000, draws=10)


def test_combinations_are_counted_before_they_are_made() -> None:
    with pytest.raises(BadInput, match="got 1000000000000, expected at most 10,000 combinations of values"):
        next(combinations({name: list(range(1000)) for name in "abcd"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 10**9}, "batch_size: got 1000000000, expected at most 10,000,000 slots of a bundle: so many "
         "would take some 600 GB of memory"),
        ({"batch_size": 4_000_000}, "batch_size: got 4000000, expected at most 10,000,000 slots of a bundle: so many "
         "would take some 14 GB of memory; there are 24,000,000 with 3 attention instances"),
        ({"microbatches": 10**9}, "microbatches: got 1000000000, expected at most 1,000 microbatches"),
        ({"requests_per_instance": 10**9}, "requests_per_instance: got 1000000000, expected at most 10,000,000"),
        ({"layers": 10**9}, "layers: got 1000000000, expected at most 10,000 layers"),
    ],
)  # fmt: skip
def test_a_bundle_beyond_the_limits(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        ratio_sweep.prepare(yaml.safe_load(SMALL), FILE, configurations=[settings])
    assert str(error.value).startswith("s.yaml: ")
    assert message in str(error.value)


def test_requests_are_counted_over_all_attention_instances() -> None:
    document = yaml.safe_load(SMALL) | {"requests_per_instance": 20_000}
    with pytest.raises(BadInput, match=r"requests_per_instance: got 20000, .*there are 81,920,000 with 4,096"):
        ratio_sweep.prepare(document, FILE, "4096")


def test_what_is_at_the_limit_is_accepted() -> None:
    settings = {
        "workload.requests": fields.REQUESTS.maximum,
        "workload.prefill": {"distribution": "fixed", "mean": 9000},
        "workload.prefixes": {"groups": 10**7, "tokens": 9000, "block_tokens": 16},
        "engine.num_gpu_blocks": fields.KV_BLOCKS.maximum,
        "system": split(decode="shared", prefill_replicas=1, decode_replicas=fields.ENGINES.maximum - 1),
    }
    sweep = prepare(scenario(), FILE, [settings], replications=10_000)
    assert sweep.cases[0].plan.requests == 10_000_000


CLOSED = {"process": "closed_loop", "concurrency": 4, "think": 0.01}


@pytest.mark.parametrize(
    ("settings", "enough"),
    [
        ({"workload.arrivals": CLOSED | {"concurrency": 10**6}}, {"workload.arrivals": CLOSED | {"concurrency": 60}}),
        (
            {"workload.arrivals": CLOSED | {"concurrency": 10**6}, "workload.sessions": sessions()},
            {"workload.arrivals": CLOSED | {"concurrency": 60}, "workload.sessions": sessions()},
        ),
        (
            {"workload.arrivals": CLOSED, "workload.sessions": sessions(turns=10**9)},
            {"workload.arrivals": CLOSED, "workload.sessions": sessions(turns=60)},
        ),
    ],
)
def test_clients_and_turns_beyond_the_requests_cost_nothing(
    tmp_path: Path, settings: dict[str, Any], enough: dict[str, Any]
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(scenario()))
    many, few = (twin.simulate(file, overrides).document["summary"] for overrides in (settings, enough))
    assert many == few


@pytest.mark.parametrize(
    ("command", "setting", "expected"),
    [
        ("simulate", "mean: 100000}", "engine.num_gpu_blocks: request 0: expected at most 400 KV blocks"),
        ("sweep", "mean: 100000}", "engine.num_gpu_blocks: request 0: expected at most 400 KV blocks"),
        ("simulate", "mean: 70}", "engine.max_num_batched_tokens: request 0: expected at most 64 prompt tokens"),
    ],
)
def test_a_request_that_fits_no_engine_names_the_file(
    tmp_path: Path, command: str, setting: str, expected: str, refusal
) -> None:
    file = tmp_path / "s.yaml"
    chunked = "64 prompt tokens" not in expected
    file.write_text(yaml.safe_dump(scenario(engine={"enable_chunked_prefill": chunked})))
    overrides = ["--set", f"workload.prefill={{distribution: fixed, {setting}"]
    assert f"{file}: {expected}" in refusal(
        command, str(file), *overrides, "--runs", str(tmp_path / "runs"), "--no-figures"
    )


def test_requests_so_rare_that_autoscaling_decides_for_ever() -> None:
    scaled = {"autoscaling": {"engine": {"policy": "scheduled", "schedule": [[0, 1]], "max_replicas": 2}}}
    arrivals = {"process": "poisson", "rate": 1e-9}
    document = scenario(workload={"arrivals": arrivals}, system={"layout": "colocated", **scaled})
    expected = "workload.arrivals.rate: got 1e-09, expected at most 10,000,000 decisions of autoscaling: at this rate"
    with pytest.raises(BadInput, match=expected):
        prepare(document, FILE)
