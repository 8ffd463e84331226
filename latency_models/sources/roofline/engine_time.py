"""The time of a step that no kernel has, fitted to served TPOT.

Kernels, as timed one by one, leave out the host's work on a step and on each of its tokens, and the launches of steps
with prompts, which run without a full CUDA graph. Three numbers for all engines are fitted to closed-loop measurements,
beside the prediction of `closed_loop` from kernels. The error that remains is `spread`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from latency_models.deployment.hardware import Hardware
from latency_models.deployment.models import load_model
from latency_models.fitting.estimator import Floats
from latency_models.sources.aiconfigurator.closed_loop import ClosedLoop, closed_loop
from latency_models.sources.aiconfigurator.silicon import SiliconRow
from latency_models.sources.roofline.efficiency import Efficiency, EngineTime
from latency_models.sources.roofline.memory import device_memory
from latency_models.sources.roofline.placement import Placement
from latency_models.sources.roofline.step_time import RooflineStepTime

MAX_BATCHED_TOKENS = 8192

AHEAD = (1.0, 0.07)
"""Prompts computed before one of a closed loop: a constant, and a slope over the requests in flight."""

NO_TIME = EngineTime(step=0.0, per_sequence=0.0, prompt_layer=0.0, spread=0.0, error=0.0, rows=1)


def placement_of(row: SiliconRow) -> Placement:
    """The deployment of a measured row. Fewer attention ranks than expert ranks are data-parallel replicas."""
    model = load_model(row.model)
    sparse = model.ffn.kind == "moe"
    weights = "fp8" if row.precision == "fp8" else "bf16"
    ranks = row.expert_tensor_parallel * row.expert_parallel if sparse else row.tensor_parallel
    return Placement(
        tensor_parallel=row.tensor_parallel,
        data_parallel=max(ranks // row.tensor_parallel, 1),
        expert_parallel=sparse and row.expert_parallel > 1,
        weights="fp8" if weights == "fp8" else "bf16",
        experts="fp8" if weights == "fp8" else "bf16",
        cache="fp8" if weights == "fp8" and not sparse else "bf16",
    )


def predict(row: SiliconRow, hardware: Hardware, efficiency: Efficiency) -> ClosedLoop:
    """The steady state in which a row was measured, by the roofline alone."""
    model, placement = load_model(row.model), placement_of(row)
    capacity = device_memory(model, hardware, placement).kv_tokens
    base, slope = AHEAD
    return closed_loop(
        RooflineStepTime(model, hardware, placement, efficiency),
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
    others = np.array([max(loop.residents - 1, 0.0) for loop in loops])
    base, slope = AHEAD
    ahead = np.minimum(base + slope * np.array([row.concurrency for row in rows]), others)
    prompts = (others - ahead) / (np.array([row.osl for row in rows]) - 1)
    bare = np.array([loop.tpot for loop in loops])
    measured = np.log([row.tpot for row in rows])

    def errors(logs: Floats) -> Floats:
        step, per_sequence, prompt_layer = np.exp(logs)
        found: Floats = (
            np.log(bare + step + per_sequence * decoding + prompts * chunks * layers * prompt_layer) - measured
        )
        return found

    bounds = (np.log([1e-6, 1e-7, 1e-7]), np.log([1e-2, 2e-4, 1e-3]))
    found = least_squares(errors, np.log([5e-4, 1e-5, 2e-5]), bounds=bounds, loss="soft_l1", f_scale=0.1)
    step, per_sequence, prompt_layer = (float(f"{value:.4g}") for value in np.exp(found.x))
    left = errors(found.x)
    return EngineTime(
        step=step,
        per_sequence=per_sequence,
        prompt_layer=prompt_layer,
        spread=float(f"{np.sqrt(np.mean(left**2)):.3g}"),
        error=float(f"{np.median(np.abs(np.expm1(left))):.3g}"),
        rows=len(rows),
    )
