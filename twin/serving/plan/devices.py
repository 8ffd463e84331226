"""Devices of a system, and their price."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from scenarios.pools import DeviceSpec
from twin.serving.plan.pools import PlannedPool


def describe_devices(pools: Sequence[PlannedPool]) -> dict[str, Any] | None:
    """Devices in total and of each type, and their price per hour; None if those of a pool are not known.

    They are those that the pool states, else those that its step times were computed for. The price is None where that
    of a device is not given. Of a pool that is autoscaled, they are those of as many engines as there may be at most.
    """
    by_type: dict[str, Fraction] = {}
    cost: float | None = 0.0
    for pool in pools:
        device = devices_of(pool)
        if device is None:
            return None
        count = Fraction(len(pool.names) * device.count, pool.spec.engines_per_device)
        by_type[device.type] = by_type.get(device.type, Fraction()) + count
        price = device.price_per_hour
        cost = None if cost is None or price is None else cost + float(count) * price
    counts = {name: ceil(count) for name, count in by_type.items()}
    return {"total": sum(counts.values()), "by_type": counts, "cost_per_hour": cost}


def devices_of(pool: PlannedPool) -> DeviceSpec | None:
    """The devices of one engine of a pool; None if they are not known."""
    return pool.spec.device or _computed_for(pool)


def _computed_for(pool: PlannedPool) -> DeviceSpec | None:
    """The devices of computed step times."""
    measured = pool.step_time.measured_deployment()
    return DeviceSpec(type=measured.device, count=measured.devices) if measured and measured.devices else None


def cost_per_million_tokens(devices: dict[str, Any] | None, output_throughput: float | None) -> float | None:
    """The price of a million output tokens at a throughput in tokens/s; None where devices have no price."""
    if devices is None or devices["cost_per_hour"] is None or not output_throughput:
        return None
    return float(devices["cost_per_hour"]) / 3600 / output_throughput * 1e6
