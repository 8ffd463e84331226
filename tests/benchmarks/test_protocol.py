"""The TTFT of closed-loop benchmarks: by hand, beside a simulated client, and learned from rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import twin
from benchmarks.closed_loop import ClosedLoop, closed_loop
from benchmarks.silicon import POSSIBLE, Protocol, SiliconRow, choose_protocol
from latency_models.sources.linear import LinearStepTime


def state(concurrency: float, residents: float | None = None) -> ClosedLoop:
    return ClosedLoop(0.0, 0.011, 0.01, 0.05, concurrency if residents is None else residents, round(concurrency))


def test_a_simulated_client_lies_among_the_protocols(tmp_path: Path) -> None:
    """Drawn lengths, ten rounds: the simulated mean TTFT has a steady share between the lowest and the highest."""
    step = {"source": "linear", "overhead": 0.01, "per_token": 5e-5, "per_kv_token": 1e-8}
    lengths = {"distribution": "uniform", "low": 205, "high": 256}
    scenario = {
        "schema": "twin.scenario/1", "kind": "serving", "name": "client", "step_time": step,
        "engine": {"num_gpu_blocks": 10**5, "max_num_batched_tokens": 256, "enable_prefix_caching": False},
        "workload": {
            "requests": 160, "prefill": lengths, "decode": lengths,
            "arrivals": {"process": "closed_loop", "concurrency": 16},
        },
    }  # fmt: skip
    (tmp_path / "client.yaml").write_text(yaml.safe_dump(scenario))
    simulated = twin.simulate(tmp_path / "client.yaml", jobs=1).document["summary"]["ttft"]["mean"]
    model = LinearStepTime(0.01, 5e-5, 1e-8, 0.0)
    loop = closed_loop(model, 16, 230.5, 230.5, ahead=1.0, max_batched_tokens=256)
    low, high = (Protocol(10, steady).ttft(loop, 16, 230.5) for steady in (1.0, 2.5))
    assert low < simulated < high


def row(concurrency: float, ttft: float, *, random_prompts: bool = False) -> SiliconRow:
    return SiliconRow(
        "id", "vllm", "h100_sxm", "llama-3.1-8b", "fp8", 1024, 101, concurrency, 1, 1, 1, ttft, 0.011, "calib", "t",
        "source.csv", random_prompts,
    )  # fmt: skip


@pytest.mark.parametrize("expected", [POSSIBLE[3], POSSIBLE[-2]])
def test_rows_tell_their_protocol(expected: Protocol) -> None:
    counts = (8.0, 16.0, 32.0, 64.0)
    loops = [state(count) for count in counts]
    rows = [row(count, expected.ttft(loop, count, 101)) for count, loop in zip(counts, loops, strict=True)]
    protocol = choose_protocol(rows, loops)
    assert protocol.protocol == expected
    assert protocol.half == pytest.approx(0.0, abs=1e-12)
