"""The fit of kernel efficiencies to timings of several devices.

`launch`, `compute`, `memory` (and `padding` of decodes, `each_device` of all-reduces) minimise the error of the
logarithm of the time, with a loss that lets few unusual kernels count little. Fits of one device use all its timings.
`any` is the geometric mean over chips. Its error is that of chips which were left out: kernels of a chip are predicted
by the mean of the others'. Devices with the same chip (H100 and H200, B200 and GB200) count as one and are left out
together. Where one chip alone was measured, nothing can be left out, and other devices are assumed to differ by
ONE_CHIP_SPREAD at least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from latency_models.fitting.estimator import Floats
from latency_models.sources.roofline.efficiency import Kind, KindOfKernel, Reached
from latency_models.sources.roofline.timings import Timings

SAME_CHIP = {"h200-sxm": "h100-sxm", "gb200": "b200-sxm"}
MOST_TIMINGS = 6000
"""Timings of one device and kind that are fitted: every so manieth where there are more."""

LOSS_SCALE = 0.1
"""Relative error up to which errors count by their square."""

ONE_CHIP_SPREAD = 0.3

_LEAST = np.log([1e-7, 1e-9, 0.01, 0.01, 1e-3])
_MOST = np.log([2e-4, 1e-4, 1.5, 8.0, 2048.0])
_START = np.log([5e-6, 1e-6, 0.6, 0.75, 64.0])


def fit_kind(timings: Sequence[Timings]) -> KindOfKernel:
    """The fits of one kind of kernel, from timings of one or more devices."""
    by_device: dict[str, list[Timings]] = defaultdict(list)
    for each in timings:
        by_device[each.device].append(thinned(each))
    kind = timings[0].kind
    logs = {device: _fit(kind, known) for device, known in by_device.items()}
    devices = {device: _describe(kind, logs[device], known) for device, known in by_device.items()}
    chips = sorted({_chip(device) for device in by_device})
    bias, shapes, errors = [], [], []
    for chip in chips:
        others = [chip] if len(chips) == 1 else [other for other in chips if other != chip]
        mean = _mean(logs, others)
        left_out = [part for device, known in by_device.items() if _chip(device) == chip for part in known]
        error = np.concatenate([_errors(mean, part) for part in left_out])
        bias.append(float(np.median(error)))
        shapes.append(_shape_spread(mean, left_out))
        errors.append(error)
    whole = np.concatenate(errors)
    spread = float(np.sqrt(np.mean(np.square(bias)) + np.mean(np.square(shapes))))
    anyone = _reached(
        kind,
        _mean(logs, chips),
        spread=spread if len(chips) > 1 else max(spread, ONE_CHIP_SPREAD),
        error=_median_error(whole),
        kernels=len(whole),
    )
    return KindOfKernel(any=anyone, devices=devices)


def thinned(timings: Timings) -> Timings:
    """Every so manieth timing, at most MOST_TIMINGS."""
    stride = -(-len(timings) // MOST_TIMINGS)
    if stride == 1:
        return timings
    arrays = {
        name: getattr(timings, name)[::stride] for name in ("flops", "size", "seconds", "padding", "devices", "shape")
    }
    return Timings(
        timings.kind, timings.device, timings.source, peak=timings.peak, bandwidth=timings.bandwidth, **arrays
    )


def predicted(logs: Floats, timings: Timings) -> Floats:
    """Seconds of each kernel under parameters: the logarithms of launch, each_device, compute, memory and padding."""
    launch, each_device, compute, memory, padding = np.exp(logs)
    size = timings.size + padding * timings.padding
    moved = size / (timings.bandwidth * memory)
    computed = timings.flops / (timings.peak * compute)
    seconds: Floats = launch + each_device * np.maximum(timings.devices - 2, 0.0) + np.maximum(moved, computed)
    return seconds


def _fit(kind: Kind, known: Sequence[Timings]) -> Floats:
    from scipy.optimize import least_squares  # slow to import, and only a fit needs it

    used = _used(kind)

    def misfit(free: Floats) -> Floats:
        logs = _START.copy()
        logs[used] = free
        logs[~used] = _UNUSED[~used]
        return np.concatenate([_errors(logs, part) for part in known])

    start = np.clip(_START, _LEAST + 1e-6, _MOST - 1e-6)[used]
    found = least_squares(misfit, start, bounds=(_LEAST[used], _MOST[used]), loss="soft_l1", f_scale=LOSS_SCALE).x
    logs = _UNUSED.copy()
    logs[used] = found
    return logs


_UNUSED = np.log([5e-6, 1e-12, 1e6, 0.75, 1e-9])
"""Parameters that a kind does not have: no time for each device, no limit by FLOPs, no padding."""


def _used(kind: Kind) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    computes = kind != "elementwise" and not kind.startswith(("all_reduce", "decode_attention"))
    return np.array([True, kind.startswith("all_reduce"), computes, True, kind.startswith("decode")])


def _errors(logs: Floats, timings: Timings) -> Floats:
    """Logarithms of fitted over measured time."""
    errors: Floats = np.log(predicted(logs, timings) / timings.seconds)
    return errors


def _mean(logs: Mapping[str, Floats], chips: Iterable[str]) -> Floats:
    """The geometric mean over chips, each of which is that of its devices."""
    of_chips = [np.mean([each for device, each in logs.items() if _chip(device) == chip], axis=0) for chip in chips]
    mean: Floats = np.mean(of_chips, axis=0)
    return mean


def _chip(device: str) -> str:
    return SAME_CHIP.get(device, device)


def _median_error(errors: Floats) -> float:
    return float(np.median(np.abs(np.expm1(errors))))


def _shape_spread(logs: Floats, known: Sequence[Timings]) -> float:
    """Standard deviation over shapes of a shape's mean error."""
    means: list[float] = []
    for part in known:
        errors, counts = _errors(logs, part), np.bincount(part.shape)
        sums = np.bincount(part.shape, errors)
        means += (sums[counts > 0] / counts[counts > 0]).tolist()
    return float(np.std(means))


def _describe(kind: Kind, logs: Floats, known: Sequence[Timings]) -> Reached:
    errors = np.concatenate([_errors(logs, part) for part in known])
    return _reached(
        kind, logs, spread=_shape_spread(logs, known), error=_median_error(errors), kernels=sum(map(len, known))
    )


def _reached(kind: Kind, logs: Floats, *, spread: float, error: float, kernels: int) -> Reached:
    launch, each_device, compute, memory, padding = (float(f"{value:.4g}") for value in np.exp(logs))
    used = _used(kind)
    return Reached(
        launch=launch,
        each_device=each_device if used[1] else 0.0,
        compute=compute if used[2] else None,
        memory=memory,
        padding=padding if used[4] else 0.0,
        spread=float(f"{spread:.3g}"),
        error=float(f"{error:.3g}"),
        kernels=kernels,
    )
