"""The fit of kernel efficiencies to timings of several devices.

A table's time is `overhead + launch + each_device + two_shots + max(FLOPs / rate, bytes / rate)`. A table has one
overhead: what its benchmark spends on a kernel and a CUDA graph does not, such as launches from the host. It is not in
the result. All-reduces alone have `each_device` and, of messages beyond one shot, `two_shots`.
`launch` and `each_device` are shared over chips. The former is what the smallest kernel of a chip takes beyond its
FLOPs and bytes at the peaks, of the median chip.

The rates (`padding` of decodes and `two_shots` too) minimise the error of the logarithm of the time, with a loss that
lets few unusual kernels count little. Fits of one device use all its timings; a newer device is given at least the
rates of an older one (`SUCCESSORS`), whose kernels it could run. `any` is the geometric mean over chips. Its error is
that of chips which were left out: kernels of a chip are predicted by the mean of the others'. Devices with the same
chip (H100 and H200, B200 and GB200) count as one and are left out together. Where one chip alone was measured, nothing
can be left out, and other devices are assumed to differ by ONE_CHIP_SPREAD at least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from benchmarks.kernel_timings import Timings, Wholes
from latency_models.fitting.estimator import Floats
from latency_models.sources.roofline.efficiency import ONE_SHOT, Kind, KindOfKernel, Reached

SAME_CHIP = {"h200-sxm": "h100-sxm", "gb200": "b200-sxm"}

SUCCESSORS = (("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "gb200"), ("l40s", "rtx-pro-6000"))
"""Devices, each no slower than the ones before it in its row."""

MOST_TIMINGS = 6000
"""Timings of one device and kind that are fitted: every so manieth where there are more."""

LOSS_SCALE = 0.1
"""Relative error up to which errors count by their square."""

ONE_CHIP_SPREAD = 0.3

_LEAST = np.log([0.01, 0.01, 1e-3, 1e-8])
_MOST = np.log([1.5, 8.0, 2048.0, 1e-4])
_START = np.log([0.6, 0.75, 64.0, 5e-6])
_UNUSED = np.log([1e6, 0.75, 1e-9, 1e-12])
"""Parameters that a kind does not have: no limit by FLOPs, no padding, no second shot."""

_LEAST_OVERHEAD, _MOST_OVERHEAD, _START_OVERHEAD = np.log([1e-9, 5e-4, 2e-6])


@dataclass(frozen=True, slots=True)
class _Fit:
    """Parameters of one device: the logarithms of its four shares, and the overhead of each table."""

    shares: Floats
    overheads: dict[str, float]


def fit_kind(timings: Sequence[Timings]) -> KindOfKernel:
    """The fits of one kind of kernel, from timings of one or more devices."""
    by_device: dict[str, list[Timings]] = defaultdict(list)
    for timing in timings:
        by_device[timing.device].append(timing)
    kind = timings[0].kind
    fixed = _launch(by_device), _each_device(by_device) if kind.startswith("all_reduce") else 0.0
    by_device = {device: [thinned(part) for part in parts] for device, parts in by_device.items()}
    fits = {device: _fit(kind, fixed, parts) for device, parts in by_device.items()}
    overheads = {device: fit.overheads for device, fit in fits.items()}
    logs = _newer_no_slower({device: fit.shares for device, fit in fits.items()}, by_device)
    devices = {
        device: _describe(kind, fixed, logs[device], overheads[device], parts) for device, parts in by_device.items()
    }
    chips = sorted({chip(device) for device in by_device})
    bias, shapes, errors = [], [], []
    for one in chips:
        chips_left = [one] if len(chips) == 1 else [name for name in chips if name != one]
        mean = _mean(logs, chips_left)
        left_out = [
            (_errors(fixed, mean, overheads[device][part.source], part), part.shape)
            for device, parts in by_device.items()
            if chip(device) == one
            for part in parts
        ]
        error = np.concatenate([timing for timing, _ in left_out])
        bias.append(float(np.median(error)))
        shapes.append(_shape_spread(left_out))
        errors.append(error)
    whole = np.concatenate(errors)
    spread = float(np.sqrt(np.mean(np.square(bias)) + np.mean(np.square(shapes))))
    anyone = _reached(
        kind,
        fixed,
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


def predicted(fixed: tuple[float, float], shares: Floats, overhead: float, timings: Timings) -> Floats:
    """Seconds of each kernel in a table.

    Args:
        fixed: launch and each_device. shares: the logarithms of compute, memory, padding and two_shots.
    """
    (launch, each_device), (compute, memory, padding, second) = fixed, np.exp(shares)
    moved = (timings.size + padding * timings.padding) / (timings.bandwidth * memory)
    computed = timings.flops / (timings.peak * compute)
    devices = each_device * np.maximum(timings.devices - 2, 0.0)
    message = timings.size * timings.devices / np.maximum(2 * (timings.devices - 1), 1)
    shots = second * ((timings.devices > 2) & (timings.devices * message >= ONE_SHOT))
    seconds: Floats = overhead + launch + devices + shots + np.maximum(moved, computed)
    return seconds


def _launch(by_device: Mapping[str, Sequence[Timings]]) -> float:
    """Seconds of a kernel that does nothing, by the smallest kernels of the median chip."""
    smallest: dict[str, float] = {}
    for device, parts in by_device.items():
        for part in parts:
            at = int(np.argmin(part.seconds))
            floor = max(part.flops[at] / part.peak, part.size[at] / part.bandwidth)
            beyond = float(max(part.seconds[at] - floor, 0.0))
            smallest[chip(device)] = min(beyond, smallest.get(chip(device), beyond))
    return median_low(smallest.values())


def _each_device(by_device: Mapping[str, Sequence[Timings]]) -> float:
    """Seconds more for each device beyond the fewest, by the smallest messages of the median chip."""
    slopes: dict[str, float] = {}
    for device, parts in by_device.items():
        for part in parts:
            few, many = part.devices.min(), part.devices.max()
            if few == many:
                continue
            low, high = (part.seconds[part.devices == count].min() for count in (few, many))
            slope = float(max(high - low, 0.0) / (many - few))
            slopes[chip(device)] = min(slope, slopes.get(chip(device), slope))
    return median_low(slopes.values()) if slopes else 0.0


def _fit(kind: Kind, fixed: tuple[float, float], timings: Sequence[Timings]) -> _Fit:
    from scipy.optimize import least_squares  # slow to import, and only a fit needs it

    used, sources = _used(kind), sorted({part.source for part in timings})

    def unpacked(free: Floats) -> tuple[Floats, dict[str, float]]:
        shares = _UNUSED.copy()
        shares[used] = free[: used.sum()]
        return shares, dict(zip(sources, np.exp(free[used.sum() :]).tolist(), strict=True))

    def misfit(free: Floats) -> Floats:
        shares, overheads = unpacked(free)
        return np.concatenate([_errors(fixed, shares, overheads[part.source], part) for part in timings])

    tables = np.ones(len(sources))
    bounds = tuple(
        np.concatenate([shares[used], overhead * tables])
        for shares, overhead in ((_LEAST, _LEAST_OVERHEAD), (_MOST, _MOST_OVERHEAD))
    )
    start = np.concatenate([_START[used], _START_OVERHEAD * tables])
    solution = least_squares(misfit, start, bounds=bounds, loss="soft_l1", f_scale=LOSS_SCALE).x
    return _Fit(*unpacked(solution))


def _newer_no_slower(logs: Mapping[str, Floats], by_device: Mapping[str, Sequence[Timings]]) -> dict[str, Floats]:
    """Shares with which no device has lower rates, or more padding, than one that it succeeds."""
    raised = dict(logs)
    for row in SUCCESSORS:
        before: Floats | None = None
        for device in row:
            if device not in logs:
                continue
            compute, memory, padding, second = logs[device]
            part = by_device[device][0]
            peak, bandwidth = np.log(part.peak), np.log(part.bandwidth)
            rates = np.array([compute + peak, memory + bandwidth, memory + bandwidth - padding, -second])
            before = rates if before is None else np.maximum(rates, before)
            raised[device] = np.array([before[0] - peak, before[1] - bandwidth, before[1] - before[2], -before[3]])
    return raised


def _used(kind: Kind) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    computes = kind != "elementwise" and not kind.startswith(("all_", "decode_attention"))
    return np.array([computes, True, kind.startswith("decode"), kind == "all_reduce"])


def _errors(fixed: tuple[float, float], shares: Floats, overhead: float, timings: Timings) -> Floats:
    """Logarithms of fitted over measured time."""
    errors: Floats = np.log(predicted(fixed, shares, overhead, timings) / timings.seconds)
    return errors


def _mean(logs: Mapping[str, Floats], chips: Iterable[str]) -> Floats:
    """The geometric mean over chips, each of which is that of its devices."""
    of_chips = [np.mean([values for device, values in logs.items() if chip(device) == one], axis=0) for one in chips]
    mean: Floats = np.mean(of_chips, axis=0)
    return mean


def chip(device: str) -> str:
    """The device that stands for all with the same chip."""
    return SAME_CHIP.get(device, device)


def _median_error(errors: Floats) -> float:
    return float(np.median(np.abs(np.expm1(errors))))


def _shape_spread(errors: Iterable[tuple[Floats, Wholes]]) -> float:
    """Standard deviation over shapes of a shape's mean error, given errors and shapes of each table."""
    means: list[float] = []
    for part, shape in errors:
        counts, sums = np.bincount(shape), np.bincount(shape, part)
        means += (sums[counts > 0] / counts[counts > 0]).tolist()
    return float(np.std(means))


def _describe(
    kind: Kind, fixed: tuple[float, float], shares: Floats, overheads: Mapping[str, float], timings: Sequence[Timings]
) -> Reached:
    errors = [_errors(fixed, shares, overheads[part.source], part) for part in timings]
    return _reached(
        kind,
        fixed,
        shares,
        spread=_shape_spread(zip(errors, (part.shape for part in timings), strict=True)),
        error=_median_error(np.concatenate(errors)),
        kernels=sum(map(len, timings)),
    )


def _reached(
    kind: Kind, fixed: tuple[float, float], shares: Floats, *, spread: float, error: float, kernels: int
) -> Reached:
    launch, each_device = (float(f"{value:.4g}") for value in fixed)
    compute, memory, padding, second = (float(f"{value:.4g}") for value in np.exp(shares))
    used = _used(kind)
    return Reached(
        launch=launch,
        each_device=each_device,
        compute=compute if used[0] else None,
        memory=memory,
        padding=padding if used[2] else 0.0,
        two_shots=second if used[3] else 0.0,
        spread=float(f"{spread:.3g}"),
        error=float(f"{error:.3g}"),
        kernels=kernels,
    )
