"""The fit finds parameters that made the timings, and the built-in file is what the data say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kernel_fits import fit_kind
from benchmarks.kernel_timings import Timings
from latency_models.io.files import builtin_names
from latency_models.sources.roofline.efficiency import built_in_efficiency


def timings_of(
    device: str, launch: float, compute: float, memory: float, noise: float = 0.0, peak: float = 1e15
) -> Timings:
    """Linear layers whose times have these parameters."""
    rows, inner = (axis.reshape(-1) for axis in np.meshgrid(2.0 ** np.arange(14), [1024.0, 4096.0, 16384.0]))
    flops, size = 2 * rows * inner * inner, 2 * inner * inner + 4 * rows * inner
    seconds = launch + np.maximum(flops / (peak * compute), size / (3e12 * memory))
    seconds *= np.exp(noise * np.random.default_rng(0).normal(size=len(seconds)))
    zero, shape = np.zeros(len(rows)), inner.astype(np.int64)
    return Timings("linear_bf16", device, "made up", flops, size, seconds, zero, zero, shape, peak, 3e12)


def test_the_fit_finds_what_made_the_timings() -> None:
    result = fit_kind([timings_of("one", 4e-6, 0.7, 0.8, noise=0.03)])
    one = result.devices["one"]
    assert one.launch == pytest.approx(4e-6, rel=0.1)
    assert one.compute == pytest.approx(0.7, rel=0.05)
    assert one.memory == pytest.approx(0.8, rel=0.05)
    assert one.error == pytest.approx(0.02, abs=0.01)


def test_another_device_is_the_geometric_mean_and_less_certain() -> None:
    result = fit_kind([timings_of("one", 4e-6, 0.9, 0.9), timings_of("two", 4e-6, 0.4, 0.4)])
    assert result.any.compute == pytest.approx(0.6, rel=0.02)
    # Each is predicted by the other: 2.25 times too fast or too slow where not the launch decides.
    assert result.any.spread > 0.5
    assert result.devices["one"].spread < 0.01


def test_what_one_benchmark_adds_to_each_kernel_is_no_launch() -> None:
    """Launches from the host, timed in one table and not in another of the same or of another device."""
    graph, host = timings_of("one", 4e-6, 0.7, 0.8), timings_of("one", 1.4e-5, 0.7, 0.8)
    result = fit_kind(
        [
            graph,
            replace(host, source="another"),
            timings_of("two", 1.4e-5, 0.7, 0.8),
            timings_of("three", 4e-6, 0.7, 0.8),
        ]
    )
    for reached in (result.any, *result.devices.values()):
        assert reached.launch == pytest.approx(4e-6, rel=0.1)
        assert reached.compute == pytest.approx(0.7, rel=0.02)
        assert reached.error < 0.03


def test_the_built_in_file_is_of_built_in_devices_and_plausible() -> None:
    efficiency = built_in_efficiency()
    for kind, fits in efficiency.kernels.items():
        assert fits.devices.keys() <= set(builtin_names("hardware")), kind
        for reached in (fits.any, *fits.devices.values()):
            assert reached.compute is None or 0.05 < reached.compute < 1
            assert kind == "elementwise" or 0.05 < reached.memory <= 1, kind
            assert 0 < reached.launch < 2e-4
        assert fits.any.spread >= min(reached.spread for reached in fits.devices.values())
    assert 0 < efficiency.engine.layer < 1e-4


def test_a_message_beyond_one_shot_takes_a_second() -> None:
    """Four devices read more than 2 MB in one shot from 512 KB on; two devices never take two."""
    elements, devices = (axis.reshape(-1) for axis in np.meshgrid(2.0 ** np.arange(10, 24), [2.0, 4.0]))
    size = 2 * (devices - 1) / devices * elements * 2
    second = np.where((devices == 4) & (elements * 2 >= 2**19), 7e-6, 0.0)
    zero = np.zeros(len(size))
    timings = Timings(
        "all_reduce", "one", "made up", zero, size, 5e-6 + second + size / 2e11, zero, devices,
        devices.astype(np.int64), 1e15, 4e11,
    )  # fmt: skip
    reached = fit_kind([timings]).devices["one"]
    assert reached.two_shots == pytest.approx(7e-6, rel=0.05)
    assert reached.memory == pytest.approx(0.5, rel=0.02)
