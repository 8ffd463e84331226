"""A commented serving scenario to start from, for `twin init`."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import Weights
from latency_models.io.config_io import checked
from latency_models.io.files import is_path, name_on_command_line
from latency_models.sources.roofline.efficiency import EngineOption, NoEngine, engine_option, placements
from latency_models.sources.roofline.spec import RooflineSpec
from workloads.errors import BadInput

MOST_DEVICES = 64
PROMPT, ANSWER = 1000, 250
"""Mean lengths in the scenario, tokens."""

BATCH = 64

TEMPLATE = """\
# {name} on {devices} {gpu}: the fewest that hold its weights and the longest request below.
# Every field and its default: docs/reference/serving-scenario.md.
schema: twin.scenario/1
kind: serving
name: {name}-{gpu}

workload:
  requests: 1000
  # Lengths in tokens: fixed, geometric, lognormal or uniform. A recorded workload takes the place of both:
  #   trace: {{path: requests.csv}}
  prefill: {{distribution: lognormal, mean: {prompt}, cv: 1.0}}
  decode: {{distribution: lognormal, mean: {answer}, cv: 1.0}}
  # Requests a second{share}; also gamma (bursts), deterministic, closed_loop (clients that wait), replay (of a trace).
  arrivals: {{process: poisson, rate: {rate:g}}}

engine:  # as vLLM has them
  max_num_seqs: 256
  max_num_batched_tokens: 8192
  enable_prefix_caching: true
  async_scheduling: true
{engine}\
  # KV blocks are counted in the memory that the weights leave, here {kv_tokens:,} tokens{each}. To state them:
  #   num_gpu_blocks: {num_gpu_blocks}

step_time:
  # Computed from data sheets and fitted efficiencies; --draws 10 shows how sure that is. Measured kernels are better:
  # twin calibrate import --aiconfigurator, or twin calibrate run on your own machine. Weights are in {weights}.
{step_time}

system:
  replicas: 1  # engines behind one router; --set system.replicas=1,2,4 compares

measure:
  slo: {{ttft: 1.0, tpot: 0.05}}  # seconds: goodput counts requests that meet all of these
"""


def starting_scenario(model: str, gpu: str, weights: str | None = None, rate: float | None = None) -> str:
    """The scenario's text; without a rate, about half of what one engine bears.

    Raises `BadInput` for an unknown name, and a model that not even MOST_DEVICES of these devices hold.
    """
    formats = get_args(Weights)
    if weights not in (None, *formats):
        raise BadInput(f"expected one of {', '.join(formats)}", field="--weights", value=weights)
    model, gpu = name_on_command_line("models", "--model", model), name_on_command_line("hardware", "--gpu", gpu)
    shapes = any_model(model)
    option = _smallest(model, gpu, cast("Weights | None", weights))
    ranks = f"  data_parallel_size: {option.data_parallel}\n" if option.data_parallel > 1 else ""
    return TEMPLATE.format(
        name=shapes.name,
        gpu=Path(gpu).stem if is_path(gpu) else gpu,
        devices=option.devices,
        prompt=PROMPT,
        answer=ANSWER,
        rate=rate or _half_load(option),
        share="" if rate else ", about half of what one engine bears",
        engine=ranks,
        kv_tokens=option.kv_tokens // option.data_parallel,
        each=" of each rank" if option.data_parallel > 1 else "",
        num_gpu_blocks=option.num_gpu_blocks,
        weights=shapes.formats(cast("Weights | None", weights)),
        step_time="\n".join(f"  {key}: {_plain(value)}" for key, value in option.step_time.items()),
    )


def _half_load(option: EngineOption) -> float:
    """Requests a second that keep half of an engine's time busy, to two digits: prompts, and shares of steps."""
    step_time = checked(RooflineSpec, option.step_time, None).build(Path())
    tokens = PROMPT + ANSWER // 2
    batch = max(min(BATCH, option.num_gpu_blocks * 16 // tokens), 1)
    step = step_time.decode_seconds(batch, batch * tokens, tokens, 1)[0]
    decode = step_time.decode_seconds(1, tokens, tokens, 1)[0]
    prompt = step_time.mixed_seconds(1, tokens, tokens, 0, PROMPT, last=True) - decode
    return float(f"{0.5 * option.data_parallel / (prompt + ANSWER * step / batch):.2g}")


def _smallest(model: str, gpu: str, weights: Weights | None) -> EngineOption:
    """The engine with the fewest devices whose cache holds a request of 32,768 tokens."""
    refused: list[NoEngine] = []
    for placement in placements(model, weights=weights, most_devices=MOST_DEVICES):
        option = engine_option(model, gpu, placement, max_model_len=32768)
        if isinstance(option, EngineOption):
            return option
        refused.append(option)
    # The most devices that were too small say most; a format that is not there is refused with all of them alike.
    reason = next((fit.reason for fit in reversed(refused) if not fit.fits), refused[0].reason)
    raise BadInput(f"expected a model that fits: {reason}", field="--model", value=model)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
