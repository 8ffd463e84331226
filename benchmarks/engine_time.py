"""The time of a step that no kernel has, fitted to served TPOT.

Kernels, as timed one by one, leave out the gaps between them, small ones that no table has, the host's work on each
token, and the launches of steps with prompts, which run without a full CUDA graph. Three numbers for all engines are
fitted to closed-loop measurements, beside the prediction of `closed_loop` from kernels. The loss is Cauchy's, so that a
configuration that lies elsewhere as a whole does not move the others. The error that remains is `spread`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.closed_loop import ClosedLoop, closed_loop
from benchmarks.silicon import SiliconRow
from latency_models.deployment.hardware import Hardware
from latency_models.deployment.models import Formats, Model, load_model
from latency_models.fitting.estimator import Floats
from latency_models.sources.roofline.efficiency import Efficiency, EngineTime
from latency_models.sources.roofline.placement import Placement, device_memory
from latency_models.sources.roofline.spec import RooflineStepTime

MAX_BATCHED_TOKENS = 8192

AHEAD = (1.0, 0.07)
"""Prompts computed before one of a closed loop: a constant, and a slope over the requests in flight."""

NO_TIME = EngineTime(layer=0.0, per_sequence=0.0, prompt_layer=0.0, spread=0.0, error=0.0, rows=1)


def placement_of(row: SiliconRow) -> Placement:
    """The deployment of a measured row. Fewer attention ranks than expert ranks are data-parallel replicas."""
    model = load_model(row.model)
    sparse, formats = model.ffn.kind == "moe", formats_of(row, model)
    ranks = row.expert_tensor_parallel * row.expert_parallel if sparse else row.tensor_parallel
    return Placement(
        tensor_parallel=row.tensor_parallel,
        data_parallel=max(ranks // row.tensor_parallel, 1),
        expert_parallel=sparse and row.expert_parallel > 1,
        weights=formats.linear,
        experts=formats.experts,
        cache="bf16" if sparse or row.precision == "bf16" else "fp8",
    )


def formats_of(row: SiliconRow, model: Model) -> Formats:
    """The formats of a measured row: those of the first published weights in its precision, else all in one format."""
    precisions = {"bf16": ("bf16",), "fp8": ("fp8",), "fp4": ("mxfp4", "fp4")}[row.precision]
    for checkpoint in model.checkpoints:
        if checkpoint.formats.experts in precisions:
            return checkpoint.formats
    return Formats(precisions[-1], precisions[-1])  # type: ignore[arg-type]


def predict(
    row: SiliconRow, hardware: Hardware, efficiency: Efficiency, scores: Mapping[str, float] | None = None
) -> ClosedLoop:
    """The steady state in which a row was measured, by the roofline alone, at scores of its unknowns."""
    model, placement = load_model(row.model), placement_of(row)
    capacity = device_memory(model, hardware, placement).kv_tokens
    base, slope = AHEAD
    step_time = RooflineStepTime(model, hardware, placement, efficiency)
    return closed_loop(
        step_time.vary(scores) if scores else step_time,
        row.concurrency,
        row.isl,
        row.osl,
        ahead=base + slope * row.concurrency,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        kv_capacity=capacity,
    )


def fit_engine_time(rows: Sequence[SiliconRow], hardware: Sequence[Hardware], efficiency: Efficiency) -> EngineTime:
    """Fit to measured TPOT; `hardware` is that of each row, and the engine's time in `efficiency` is not used."""
    from scipy.optimize import least_squares  # slow to import, and only a fit needs it

    kernels = efficiency.model_copy(update={"engine": NO_TIME})
    loops = [predict(row, device, kernels) for row, device in zip(rows, hardware, strict=True)]
    decoding = np.array([loop.decoding for loop in loops])
    layers = np.array([load_model(row.model).layers for row in rows])
    chunks = np.array(
        [math.ceil(row.isl / (MAX_BATCHED_TOKENS - loop.decoding)) for row, loop in zip(rows, loops, strict=True)]
    )
    neighbours = np.array([max(loop.residents - 1, 0.0) for loop in loops])
    base, slope = AHEAD
    ahead = np.minimum(base + slope * np.array([row.concurrency for row in rows]), neighbours)
    prompts = (neighbours - ahead) / (np.array([row.osl for row in rows]) - 1)
    bare = np.array([loop.tpot for loop in loops])
    measured = np.log([row.tpot for row in rows])

    def errors(logs: Floats) -> Floats:
        layer, per_sequence, prompt_layer = np.exp(logs)
        seconds = bare + layer * layers + per_sequence * decoding + prompts * chunks * layers * prompt_layer
        deviations: Floats = np.log(seconds) - measured
        return deviations

    bounds = (np.log([1e-7, 1e-7, 1e-7]), np.log([1e-3, 2e-4, 1e-3]))
    fit = least_squares(errors, np.log([5e-6, 1e-5, 2e-5]), bounds=bounds, loss="cauchy", f_scale=0.1)
    layer, per_sequence, prompt_layer = (float(f"{value:.4g}") for value in np.exp(fit.x))
    residuals = errors(fit.x)
    return EngineTime(
        layer=layer,
        per_sequence=per_sequence,
        prompt_layer=prompt_layer,
        spread=float(f"{np.sqrt(np.mean(residuals**2)):.3g}"),
        error=float(f"{np.median(np.abs(np.expm1(residuals))):.3g}"),
        rows=len(rows),
    )
