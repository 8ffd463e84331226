"""A router that prefers the engine with the longest cached prefix, in one file: `plugins/longest_prefix.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.twin.serving.scenarios import records, run, scenario

PLUGIN = Path(__file__).parent / "plugins" / "longest_prefix.py"


def document(routing: str, **engine: Any) -> dict[str, Any]:
    return scenario(
        plugins=[str(PLUGIN)],
        workload={
            "requests": 150,
            "arrivals": {"process": "poisson", "rate": 20.0},
            "prefixes": {"groups": 12, "tokens": 48, "block_tokens": 16},
        },
        engine={"num_gpu_blocks": 60, **engine},
        system={"layout": "colocated", "replicas": 4, "routing": routing},
    )


def test_more_of_the_prompts_is_found_in_the_caches() -> None:
    cached = {name: sum(records(run(document(name)))["cached_tokens"]) for name in ("round_robin", "longest_prefix")}
    assert cached["longest_prefix"] > 1.2 * cached["round_robin"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_it_sees_does_not_depend_on_fast_forwarding(asynchronous: bool, ranks: int) -> None:
    asked = document("longest_prefix", async_scheduling=asynchronous, data_parallel_size=ranks)
    fast, slow = (run({**asked, "fast_forward": mode}) for mode in (True, False))
    assert records(fast) == records(slow)
    assert sum(log.events for log in fast.logs) < 0.9 * sum(log.events for log in slow.logs)
