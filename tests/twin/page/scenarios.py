"""Scenarios of what-if pages."""

from __future__ import annotations

from typing import Any


def roofline(**changes: Any) -> dict[str, Any]:
    """Llama-3.1-8B on one H100, step times from data sheets: 320 requests, 4 a second."""
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "what-if",
        "workload": {
            "requests": 320,
            "prefill": {"distribution": "lognormal", "mean": 500, "cv": 1.0},
            "decode": {"distribution": "geometric", "mean": 100},
            "arrivals": {"process": "poisson", "rate": 4},
        },
        "engine": {"max_num_seqs": 128, "max_num_batched_tokens": 4096},
        "step_time": {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h100-sxm", "weights": "bf16"},
        "measure": {"slo": {"ttft": 0.5}},
        **changes,
    }
