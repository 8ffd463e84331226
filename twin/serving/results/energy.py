"""The energy of a run, from the power limits of its devices and the tokens that a step computes.

In a step a device draws a share of its limit that grows with each doubling of the step's tokens. Its two points are an
H100 SXM of 700 W that decodes: 300 W with one sequence and 600 W with 128 (ML.ENERGY Benchmark v3.0), and what it draws
with more. Between steps it draws its idle power. `python -m benchmarks.power` compares it with measured engines.
"""

from __future__ import annotations

from math import log2
from typing import Any

from scenarios.pools import DeviceSpec
from twin.serving.plan.plan import ServingPlan
from twin.serving.plan.pools import devices_of
from twin.serving.run.simulation import Run

ONE_TOKEN = 300 / 700
MANY_TOKENS, MANY = 600 / 700, 128

IDLE = 0.15
"""Share of the limit that a device with loaded weights draws between steps, where its own is not stated."""

ERROR = 0.12
"""Median relative error of the power of 565 measured engines on H100 and B200 (docs/accuracy.md)."""


def step_share(tokens: float) -> float:
    """The share of its power limit that a device draws in steps of so many tokens."""
    return ONE_TOKEN + (MANY_TOKENS - ONE_TOKEN) * log2(min(max(tokens, 1.0), MANY)) / log2(MANY)


def idle_watts(device: DeviceSpec) -> float:
    """What one device draws between steps."""
    assert device.power_limit is not None, "its power limit is stated"
    return IDLE * device.power_limit if device.idle_power is None else device.idle_power


def energy_summary(run: Run, plan: ServingPlan) -> dict[str, Any] | None:
    """The energy of all devices while they are paid for; None where a pool's devices have no power limit."""
    joules = 0.0
    engines = {engine.name: (engine, log) for engine, log in zip(run.engines, run.logs, strict=True)}
    for pool in plan.pools:
        device = devices_of(pool)
        if device is None or device.power_limit is None:
            return None
        for name in pool.names:
            engine, log = engines[name]
            decoded = sum(int(decodes @ repeats) for _, decodes, repeats in log.step_parts(1 << 20))
            tokens = engine.counters.prefill_tokens + decoded
            watts = device.power_limit * step_share(tokens / log.num_steps) if log.num_steps else 0.0
            idle = max(run.engine_seconds(name) - log.busy, 0.0)
            joules += device.count / pool.spec.engines_per_device * (log.busy * watts + idle * idle_watts(device))
    output_tokens = sum(run.columns.output_tokens)
    return {
        "kwh": joules / 3.6e6,
        "mean_kw": joules / run.end / 1e3 if run.end else None,
        "joules_per_output_token": joules / output_tokens if output_tokens else None,
        "error": ERROR,
    }
