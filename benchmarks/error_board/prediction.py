"""Predictions of measured rows from data sheets, with nothing of them fitted, and the parts that these add up from.

An aggregated row is its client's loop, simulated (`loop.simulated`). In a disaggregated one, prefill workers compute
prompts alone, their caches cross the network between nodes, and decode workers take them into steps without prompts:

    TTFT = OVERHEAD_APART + prompt + cache + D + waiting        TPOT = D of the requests in flight at one decode worker

A prompt is computed in steps of at most MAX_BATCHED_TOKENS. Where the client keeps more in flight than prefill workers
can feed, requests wait for them: with K in flight, L = TTFT + (osl − 1)·TPOT, the workers limit the rate to
workers / prompt, so that L is at least K·prompt/workers, and what D does not account for is waiting.

Not stated by any row, and assumed: equal workers, each with an equal share of the requests, steps of 8,192 tokens, no
multi-token prediction, no prefix cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from benchmarks.closed_loop import prompt_alone, step_and_prompt
from benchmarks.error_board.loop import ROUNDS, simulated
from benchmarks.error_board.rows import Row, Workers
from benchmarks.error_board.scripts import MAX_BATCHED_TOKENS, script
from benchmarks.roofline_efficiency import DEVICES
from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import ExpertFFN, Formats, Model, Weights, load_model
from latency_models.io.files import builtin_names
from latency_models.sources.roofline.efficiency import Backend, built_in_efficiency
from latency_models.sources.roofline.placement import Cache, Placement, check_placement, device_memory
from latency_models.sources.roofline.spec import RooflineStepTime
from latency_models.sources.roofline.work import ABOUT
from workloads.errors import BadInput

SYSTEMS = {**DEVICES, "b300_sxm": "b300-sxm", "gb300": "gb300"}

PUBLISHED: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16",), "fp8": ("fp8",), "fp4": ("fp4", "mxfp4"), "int4": ("int4", "mxfp4")
}  # fmt: skip
"""Formats of experts by a row's precision."""

MEMORY = 0.95
"""Share of the memory that engines use: DeepSeek-V3 in FP8 was served on four B200, which nine tenths do not allow."""

OVERHEAD = 0.03
"""Seconds of a request outside the engine: HTTP, tokenizer, the way to the first byte. Assumed."""

OVERHEAD_APART = 0.13
"""The same with prefill and decode engines: the router asks two engines, which agree on blocks to send. Assumed."""

HOST = {"host": "layer", "sequence": "per_sequence", "prompt host": "prompt_layer"}
"""Times of the engine by the names of their parts: of each layer, of each sequence, of each layer with prompts."""

STRETCH = 1.5
"""The factor on a part by which its seconds are told: a step is linear in it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """TTFT and TPOT in seconds, and the shares of their parts.

    Attributes:
        tpot_shares: of parts in the decode step (`decode experts`) and in what prompts add to it (`prompt experts`).
        ttft_shares: of decode steps, prompts computed before and with one's own, cache transfer, waiting and overhead.
        batch: decodes of a step.
    """

    tpot: float
    ttft: float
    tpot_shares: Mapping[str, float]
    ttft_shares: Mapping[str, float]
    batch: float


@dataclass(frozen=True)
class _Engine:
    """Step times of an engine, whole and with each part stretched; KV tokens of a replica, bytes of one on a device."""

    step_time: RooflineStepTime
    stretched: dict[str, RooflineStepTime]
    kv_tokens: float
    cached_bytes: float


def predict(row: Row) -> Prediction:
    """Raises BadInput where the row, its model or its device is not known, naming what is missing."""
    if row.refusal:
        raise BadInput(row.refusal)
    return _aggregated(row) if row.prefill is None else _disaggregated(row, row.prefill)


def chip(system: str) -> str:
    """Hopper or Blackwell: GPUs that run the same kernels."""
    return "hopper" if system.startswith("h") else "blackwell"


def formats(model: Model, precision: str) -> Formats:
    """Formats of the published weights in a row's precision; else experts alone in four bits, or all in one format."""
    for checkpoint in model.checkpoints:
        if checkpoint.formats.experts in PUBLISHED[precision]:
            return checkpoint.formats
    weights: Weights = PUBLISHED[precision][0]  # type: ignore[assignment]  # names of formats
    four_bits = precision in ("fp4", "int4") and isinstance(model.ffn, ExpertFFN)
    return Formats("bf16" if four_bits else weights, weights)


@cache
def _engine(
    name: Backend, model_name: str, system: str, precision: str, tp: int, dp: int, spread: bool, cache: Cache
) -> _Engine:
    """The engine of a placement; `name` decides on its kernels."""
    model, hardware = load_model(model_name), load_hardware(SYSTEMS[system])
    weights = formats(model, precision)
    placement = Placement(tp, 1, dp, spread, weights.linear, weights.experts, cache)
    check_placement(model, hardware, placement)
    efficiency = built_in_efficiency(name)
    stretched = {
        name.removesuffix("_kernels"): RooflineStepTime(model, hardware, placement, efficiency, scales={name: STRETCH})
        for name in ABOUT
    }
    for part, term in HOST.items():
        longer = efficiency.engine.model_copy(update={term: STRETCH * getattr(efficiency.engine, term)})
        engine = efficiency.model_copy(update={"engine": longer})
        stretched[part] = RooflineStepTime(model, hardware, placement, engine)
    memory = device_memory(model, hardware, placement, MEMORY)
    step_time = RooflineStepTime(model, hardware, placement, efficiency)
    return _Engine(step_time, stretched, memory.kv_tokens, memory.kv_bytes_per_token)


def engine_of(row: Row, workers: Workers) -> _Engine:
    if row.model not in builtin_names("models"):
        raise BadInput(f"no model file of {row.model}")
    if SYSTEMS.get(row.system) not in builtin_names("hardware"):
        raise BadInput(f"no hardware file of {row.system}")
    return _engine(
        row.engine, row.model, row.system, row.precision,
        workers.tensor_parallel, workers.data_parallel, workers.expert_parallel, script(row, chip(row.system)).cache,
    )  # fmt: skip


def _aggregated(row: Row) -> Prediction:
    engine = engine_of(row, row.decode)
    means = simulated(row, engine.step_time, engine.kv_tokens, chip(row.system))
    answer = (row.osl - 1) * means.tpot
    streams = row.decode.count * row.decode.data_parallel
    decoding = max(row.in_flight / streams * answer / (means.ttft + answer), 1.0)  # Little's law
    step, prompt = step_and_prompt(engine.step_time, round(decoding), row.isl, row.osl, MAX_BATCHED_TOKENS)
    parts = _parts(engine, decoding, row)
    prompts = max(means.tpot - step, 0.0) / prompt
    tpot = {f"decode {part}": seconds for part, (seconds, _) in parts.items()}
    tpot |= {f"prompt {part}": prompts * seconds for part, (_, seconds) in parts.items()}
    ttft = {"overhead": OVERHEAD, "decodes": step, "own prompt": prompt}
    ttft["waiting"] = max(means.ttft - step - prompt, 0.0)
    return Prediction(means.tpot, OVERHEAD + means.ttft, _shares(tpot), _shares(ttft), decoding)


def _disaggregated(row: Row, workers: Workers) -> Prediction:
    prefill, decode = engine_of(row, workers), engine_of(row, row.decode)
    streams = row.decode.count * row.decode.data_parallel
    each = max(row.in_flight / streams, 1.0)
    batch = max(round(min(each, decode.kv_tokens / (row.isl + row.osl / 2))), 1)
    prompt = prompt_alone(prefill.step_time, round(row.isl), MAX_BATCHED_TOKENS)
    network = load_hardware(SYSTEMS[row.system]).network.inter_node
    cache = row.isl * decode.cached_bytes / network
    lines = workers.count * workers.data_parallel
    ttft, batch = _disaggregated_wait(row, decode, prompt, cache, lines, batch)
    parts = _parts(decode, batch, row)
    tpot = {f"decode {part}": step for part, (step, _) in parts.items()}
    step = _decode_step(decode.step_time, batch, row)
    return Prediction(step, sum(ttft.values()), _shares(tpot), _shares(ttft), batch)


def _disaggregated_wait(
    row: Row, decode: _Engine, prompt: float, cache: float, lines: int, batch: int
) -> tuple[dict[str, float], int]:
    """The parts of TTFT, and the decodes of a step where prefill limits them.

    Args:
        lines: prompts that prefill workers compute at once. batch: decodes of a step, if they do not.
    """
    streams = row.decode.count * row.decode.data_parallel
    first = (row.in_flight / lines + 1) / 2 * prompt / ROUNDS
    ttft = {"overhead": OVERHEAD_APART, "own prompt": prompt, "transfer": cache, "first wave": first, "waiting": 0.0}
    for _ in range(LIMITS):
        step = _decode_step(decode.step_time, batch, row)
        ttft["decodes"] = 1.5 * step
        life = sum(ttft.values()) - ttft["waiting"] + (row.osl - 1) * step
        slowest = max(row.in_flight * prompt / lines, row.in_flight / (batch * streams) * (row.osl - 1) * step)
        ttft["waiting"] = max(slowest - life, 0.0)
        decoding = row.in_flight * (row.osl - 1) * step / (life + ttft["waiting"]) / streams
        batch = max(min(batch, round(decoding)), 1)
    return ttft, batch


LIMITS = 4
"""Iterations after which the number of decodes has settled."""


def _decode_step(step_time: RooflineStepTime, batch: int, row: Row) -> float:
    kv = round(batch * (row.isl + row.osl / 2))
    return step_time.decode_seconds(batch, kv, round(row.isl + row.osl), 1)[0]


def _parts(engine: _Engine, batch: float, row: Row) -> dict[str, tuple[float, float]]:
    """Seconds of each part in a decode step, and in what one prompt adds to it."""
    batch = max(round(batch), 1)
    size = row.isl, row.osl, MAX_BATCHED_TOKENS
    step, prompt = step_and_prompt(engine.step_time, batch, *size)
    parts = {}
    for part, stretched in engine.stretched.items():
        longer_step, longer_prompt = step_and_prompt(stretched, batch, *size)
        parts[part] = (longer_step - step) / (STRETCH - 1), (longer_prompt - prompt) / (STRETCH - 1)
    return parts


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {part: value / whole for part, value in seconds.items() if value}
