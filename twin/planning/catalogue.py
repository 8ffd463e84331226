"""A question without a file: a model on GPUs of the catalogue, with roofline step times, becomes a scenario.

A plan needs from a source of step times no more than a section for a model on a GPU with a parallelism and formats of
weights and cache. Impossible engines (memory, heads that do not divide) are refused with a reason when the section is
built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ExpertFFN, LatentAttention, Model
from latency_models.io.files import is_path, name_on_command_line
from scenarios.reading import Settings
from workloads.errors import BadInput

Document = dict[str, Any]

CACHE_BYTES = {"bf16": 2.0, "fp8": 1.0}
MAX_NUM_SEQS = 256
"""`max_num_seqs` of the engines, as vLLM has it on GPUs of this size."""


@dataclass(frozen=True)
class CatalogueQuestion:
    """A question in place of a file.

    Attributes:
        model: a name, a model file or a config.json. gpus: names of the hardware catalogue, or hardware files.
        goals: as in `plan.goals`. rate: requests per second; None: the trace's own times. trace: file of lengths; or
        prompt_tokens, answer_tokens: their means, log-normal with a coefficient of variation of 1.
        degrees: tensor parallelism. stages: pipeline parallelism. replicas: of attention, which share whole experts;
        None: 1, and for latent attention REPLICAS of one GPU, too.
        weights: formats; None: as the model is published. cache: its format.
        chunks: values of `max_num_batched_tokens`.
        prices: of a GPU per hour, by its name as given.
        node_size: GPUs of a node, the largest engine; None: as the hardware files say.
        hit_rate: share of prompt tokens that prefix caches supply; None: as the trace's ids have it, else 0.
    """

    model: str
    gpus: Sequence[str]
    goals: Mapping[str, float | str]
    rate: float | None
    trace: Path | None = None
    prompt_tokens: float | None = None
    answer_tokens: float | None = None
    degrees: Sequence[int] = (1, 2, 4, 8)
    stages: Sequence[int] = (1,)
    replicas: Sequence[int] | None = None
    layouts: Sequence[str] = ("colocated", "disaggregated")
    weights: Sequence[str | None] = (None,)
    cache: str = "bf16"
    chunks: Sequence[int] = (512, 1024, 2048, 4096, 8192)
    prices: Mapping[str, float] = field(default_factory=dict)
    max_gpus: int | None = None
    node_size: int | None = None
    objective: str | None = None
    hit_rate: float | None = None


REPLICAS = 8
"""Attention replicas of one GPU that share experts. Where attention is split, each GPU has a whole latent cache."""


def scenario_of(question: CatalogueQuestion) -> Document:
    """The scenario, with a section `plan`."""
    question = replace(question, model=name_on_command_line("models", "--model", question.model))
    model = any_model(question.model)
    keys = [name_on_command_line("hardware", "--gpu", name) for name in question.gpus]
    devices = [(name, key, load_hardware(key)) for name, key in zip(question.gpus, keys, strict=True)]
    prices = {key: question.prices.get(name, question.prices.get(key)) for name, key, _ in devices}
    for name in question.prices:
        if name not in {gpu for gpu, _, _ in devices} | prices.keys():
            raise BadInput("expected the name of a --gpu", field="--price", value=name)
    kinds = [
        _kind(question, key, hardware, parallelism, weights, several=len(devices) > 1)
        for _, key, hardware in devices
        for weights in question.weights
        for parallelism in _parallelisms(question, model, question.node_size or hardware.devices_per_node)
    ]
    plan: Document = {
        "goals": dict(question.goals),
        "engines": kinds,
        "layouts": list(question.layouts),
        "vary": {"max_num_batched_tokens": list(question.chunks)},
        "prices": {key: price for key, price in prices.items() if price is not None},
        "limits": {} if question.max_gpus is None else {"gpus": question.max_gpus},
    }
    stated = {"node_size": question.node_size, "objective": question.objective}
    plan |= {name: value for name, value in stated.items() if value is not None}
    if "afd" in question.layouts:
        plan["bundles"] = [
            {"model": question.model, "hardware": key, "cache": question.cache}
            | ({} if weights is None else {"weights": weights})
            for _, key, _ in devices
            for weights in question.weights
        ]
    if set(question.layouts) & {"disaggregated", "afd"}:
        slowest = min(hardware.network.inter_node for _, _, hardware in devices)
        cached = model.kv_bytes_per_token(CACHE_BYTES.get(question.cache, 2.0))
        plan["link"] = {"bandwidth": slowest * min(question.degrees), "bytes_per_token": cached}
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": f"plan-{model.name.rsplit('/', 1)[-1].lower()}",
        "workload": _workload(question),
        "engine": {
            "max_num_seqs": MAX_NUM_SEQS,
            "enable_prefix_caching": question.trace is not None or bool(question.hit_rate),
            "async_scheduling": True,
        },
        "plan": plan,
    }


def _parallelisms(question: CatalogueQuestion, model: Model, node_size: int) -> Iterator[tuple[int, int, int]]:
    """Tensor parallelism, stages and attention replicas of the engines to try."""
    for degree, stages, replicas in itertools.product(question.degrees, question.stages, question.replicas or (1,)):
        if degree * stages <= node_size:
            yield degree, stages, replicas
    latent = isinstance(model.attention, LatentAttention) and isinstance(model.ffn, ExpertFFN)
    if question.replicas is None and latent and 1 in question.degrees and node_size >= REPLICAS:
        yield 1, 1, REPLICAS


def of_every_engine(settings: Settings, document: Document) -> Settings:
    """Settings of which those of `step_time` are set for every kind of engine, since each has step times of its own."""
    names = [kind["name"] for kind in document["plan"]["engines"]]
    changed: Settings = {}
    for key, value in settings.items():
        section, _, field = key.partition(".")
        fields = [f"plan.engines.{name}.{key}" for name in names] if section == "step_time" and field else [key]
        changed |= dict.fromkeys(fields, value)
    return changed


def _kind(
    question: CatalogueQuestion,
    key: str,
    hardware: Hardware,
    parallelism: tuple[int, int, int],
    weights: str | None,
    *,
    several: bool,
) -> Document:
    """A kind of engine: `tp4`, with stages, replicas, the GPU and the weights in its name where there are several."""
    degree, stages, replicas = parallelism
    parts = [*([hardware.name] if several else []), f"tp{degree}", *([f"pp{stages}"] if stages > 1 else [])]
    parts += [f"dp{replicas}"] if replicas > 1 else []
    parts += [weights] if weights is not None and len(question.weights) > 1 else []
    engine: Document = {"pipeline_parallel_size": stages, "async_scheduling": False} if stages > 1 else {}
    engine |= {"data_parallel_size": replicas} if replicas > 1 else {}
    power = {} if hardware.power_limit is None else {"power_limit": hardware.power_limit}
    return {
        "name": "-".join(parts),
        "device": {"type": key if not is_path(key) else hardware.name, "count": degree * stages * replicas, **power},
        **({"engine": engine} if engine else {}),
        "step_time": {
            "source": "roofline",
            "model": question.model,
            "hardware": key,
            "tensor_parallel": degree,
            **({"pipeline_parallel": stages} if stages > 1 else {}),
            **({"data_parallel": replicas, "expert_parallel": True} if replicas > 1 else {}),
            **({} if weights is None else {"weights": weights}),
            "cache": question.cache,
        },
    }


def _workload(question: CatalogueQuestion) -> Document:
    process = {"process": "replay"} if question.rate is None else {"process": "poisson", "rate": question.rate}
    arrivals: Document = {"arrivals": process} | ({} if question.hit_rate is None else {"hit_rate": question.hit_rate})
    if question.trace is not None:
        return {"trace": {"path": str(question.trace.absolute())}, **arrivals}
    if question.prompt_tokens is None or question.answer_tokens is None:
        raise BadInput("expected --trace FILE, or --prompt-tokens and --answer-tokens", field="--trace")
    return {
        "prefill": {"distribution": "lognormal", "mean": question.prompt_tokens},
        "decode": {"distribution": "lognormal", "mean": question.answer_tokens},
        **arrivals,
    }
