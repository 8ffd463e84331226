"""Builds tokenizer, engine or topology from command line options; what cannot be used raises `BadInput`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from latency_models.io.config_io import checked
from live.backend import EngineBackend
from live.device import available_bytes, check_memory
from live.loaded_model import DTYPES, LoadedModel, ModelSource
from live.models.config import ModelConfig
from live.models.linear import Rounding
from live.models.lora import load_adapters
from live.server.input_processor import ChatTemplate
from live.server.options import EngineOptions, ServiceClass, TopologyOptions, at_least_one, flag
from live.tokenizer import Tokenizer
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.deployment import Deployment
from live.topologies.pools.layout import PoolsLayout, kv_bytes, pools_layout
from live.topologies.processes import BundleDeployment, PoolsDeployment
from live.topologies.tensor_parallel import TensorParallelModel
from scenarios.afd import AfdScenario, parse_ratios
from scenarios.afd import check_scenario as check_bundle
from scenarios.engine import EngineSpec, SchedulerPlan
from scenarios.reading import Settings, read_scenario, single_settings
from scenarios.serving import ServingScenario, check_scenario
from scenarios.validation import engine_pools, single_engine, tensor_parallel_size
from schedulers.engine_config import EngineConfig
from schedulers.model_slots import SlotsConfig
from workloads.errors import BadInput

BLOCKS_FLAG, MEMORY_FLAG = "--num-gpu-blocks", "--kv-cache-memory-bytes"

BLOCK = 16
"""Block size of the KV cache, tokens."""

DEFAULT_CACHE_BYTES, MAX_CACHE_BYTES = 1 << 30, 1 << 60
"""Memory of the KV cache by default on a CPU, and the most that may be requested."""

FREE_SHARE = 0.9
"""Share of a GPU's free memory that cache and steps take by default; CUDA graphs and fragmentation need the rest."""

UNITS = {"": 1}
UNITS |= {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}
"""Suffixes of sizes, as in vLLM: lower case is decimal, upper case binary."""

ID_BYTES = 40
"""Bytes of a block id in Python: an integer, and an entry of a list."""


@dataclass(frozen=True)
class ServedScenario:
    """The scenario of an engine, of several pools of engines, or of a bundle.

    Attributes:
        settings: changes of the document's fields. serving: the checked scenario; None for a bundle.
    """

    path: Path
    document: dict[str, Any]
    settings: Settings
    serving: ServingScenario | None

    @classmethod
    def read(cls, options: EngineOptions) -> Self | None:
        """The scenario that the options name; None if they name none."""
        path, changes = options.scenario, options.set_ or []
        if path is None:
            if changes:
                expected = "expected it beside --scenario, whose fields it changes"
                raise BadInput(expected, field="--set", value=changes[0])
            return None
        document, settings = read_scenario(path, "serving", "afd-bundle"), single_settings(changes)
        serving = check_scenario(document, settings, path) if document["kind"] == "serving" else None
        return cls(path, document, settings, serving)

    @property
    def is_topology(self) -> bool:
        """True for several kinds of workers: a bundle, or more than one pool of engines."""
        return self.serving is None or len(self.serving.pools) > 1

    @property
    def service_classes(self) -> Mapping[str, ServiceClass]:
        """The classes of a serving scenario."""
        specs = {} if self.serving is None else self.serving.workload.service_classes
        return {
            name: ServiceClass(spec.priority, math.inf if spec.ttft is None else spec.ttft)
            for name, spec in specs.items()
        }


def build_text(folder: Path | None, model: Path, random: bool) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The given tokenizer, or the model's own, with its chat template; None for what does not exist."""
    if folder is None and not random and (model / "tokenizer.json").exists():
        folder = model
    return (None, None) if folder is None else (Tokenizer(folder), ChatTemplate.read(folder))


def engine_of_flags(source: ModelSource, options: EngineOptions, name: str) -> EngineBackend:
    """An engine with the model loaded, and with its adapters if there are any, from the flags of a command line.

    Args:
        name: the model's name for clients.
    """
    sequences = at_least_one("max_num_seqs", 128 if options.max_num_seqs is None else options.max_num_seqs)
    tokens = 2048 if options.max_num_batched_tokens is None else options.max_num_batched_tokens
    if options.lora_modules:
        return _engine_with_adapters(source, options, name, sequences, tokens)
    if options.max_loras is not None:
        raise BadInput("expected it beside --lora-modules", field="--max-loras", value=options.max_loras)
    speculation = None if options.speculative_config is None else _parse_speculation(options.speculative_config)
    ahead = source.device == "cuda" and speculation is None
    model = _load(source, ahead=ahead, ranks=_ranks(options, 1))
    settings: dict[str, Any] = {
        "num_gpu_blocks": _blocks(options, model, source, sequences, tokens),
        "block_size": BLOCK,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
        "one_shot": None if options.one_shot is False else {},
        "async_scheduling": ahead,
        "speculative_config": speculation,
    }
    engine = model.planned_engine(checked(EngineSpec, settings, None, "engine").build(Path()))
    return EngineBackend(engine, ranks=model.ranks)


def _engine_with_adapters(
    source: ModelSource, options: EngineOptions, name: str, sequences: int, tokens: int
) -> EngineBackend:
    for field in ("one_shot", "speculative_config", "tensor_parallel_size"):
        if value := getattr(options, field):
            raise BadInput("expected none beside --lora-modules", field=flag(field), value=value)
    slots = at_least_one("max_loras", 1 if options.max_loras is None else options.max_loras)
    model = _load(source, ahead=False)
    adapters = load_adapters(options.lora_modules or (), model.decoder.config, DTYPES[source.dtype])
    if name in (adapter.name for adapter in adapters):
        raise BadInput("expected a name that the base model has not", field="--lora-modules", value=name)
    blocks = _blocks(options, model, source, sequences, tokens)
    config = EngineConfig(blocks, BLOCK, tokens, sequences, model_slots=SlotsConfig(slots, base=name))
    return EngineBackend(model.lora_engine(config, adapters), (name, *(adapter.name for adapter in adapters)))


def engine_of_scenario(source: ModelSource, options: EngineOptions, scenario: ServedScenario) -> EngineBackend:
    """An engine with the model loaded, whose scheduler a scenario describes."""
    expected = "expected none beside --scenario, which has the engine's settings: change them by --set engine.…"
    options.refuse_settings(expected)
    assert scenario.serving is not None, "one engine"
    ranks = _ranks(options, tensor_parallel_size(scenario.serving.pools[0]))
    return engine_of_plan(source, single_engine(scenario.document, scenario.settings, scenario.path), ranks)


def _ranks(options: EngineOptions, default: int) -> int:
    """The processes that share each layer."""
    size = options.tensor_parallel_size
    return default if size is None else at_least_one("tensor_parallel_size", size)


def engine_of_plan(source: ModelSource, scheduler: SchedulerPlan, ranks: int = 1) -> EngineBackend:
    model = _load(source, ahead=scheduler.depth > 1, ranks=ranks)
    settings = scheduler.config
    _expect_blocks(
        model.decoder.config, source, settings.block_size, settings.num_gpu_blocks, settings.max_num_seqs,
        "engine.num_gpu_blocks or engine.kv_memory", settings.num_gpu_blocks, "engine.max_num_seqs",
    )  # fmt: skip
    return EngineBackend(model.planned_engine(scheduler), ranks=model.ranks)


def _parse_speculation(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        expected = 'expected a JSON object, such as {"method": "ngram", "num_speculative_tokens": 4}'
        raise BadInput(expected, field="--speculative-config", value=text)
    return parsed


def _load(source: ModelSource, *, ahead: bool, ranks: int = 1) -> LoadedModel:
    start = partial(TensorParallelModel, size=ranks) if ranks > 1 else None
    return LoadedModel(source, async_scheduling=ahead, start_ranks=start)


def _blocks(options: EngineOptions, loaded: LoadedModel, model: ModelSource, sequences: int, tokens: int) -> int:
    """The number of blocks, for which there is memory as well as for the block tables of a step's sequences."""
    config, blocks, memory = loaded.decoder.config, options.num_gpu_blocks, options.kv_cache_memory_bytes
    field, value = MEMORY_FLAG, 0.0
    if blocks is None:
        size, longest = BLOCK * kv_bytes(config, model.dtype), -(-config.max_position_embeddings // BLOCK)
        value = default_cache_bytes(loaded, sequences, tokens) if memory is None else _parse_size(memory, MEMORY_FLAG)
        if not size <= value <= MAX_CACHE_BYTES:
            expected = f"expected memory for a block at least ({size} bytes), and at most {MAX_CACHE_BYTES} bytes"
            raise BadInput(expected, field=MEMORY_FLAG, value=value)
        blocks = int(value // size)
        blocks = min(blocks, sequences * longest) if memory is None else blocks
    elif memory is not None:
        expected = f"expected {BLOCKS_FLAG} or {MEMORY_FLAG}, found both"
        raise BadInput(expected, field=MEMORY_FLAG, value=memory)
    else:
        field, value = BLOCKS_FLAG, at_least_one("num_gpu_blocks", blocks)
    _expect_blocks(config, model, BLOCK, blocks, sequences, field, value, "--max-num-seqs")
    return blocks


def _expect_blocks(
    config: ModelConfig, model: ModelSource, block_size: int, blocks: int, sequences: int,
    field: str, value: float, sequences_field: str,
) -> None:  # fmt: skip
    """Refuse more blocks or block tables than there is memory for. `field`, `value`: the setting to blame."""
    size = block_size * kv_bytes(config, model.dtype)
    check_memory(blocks * size, f"blocks of {size} bytes", model.device, field=field, value=value)
    check_memory(blocks * ID_BYTES, "ids of so many blocks", "cpu", field=field, value=value)
    tables = 4 * sequences * min(-(-config.max_position_embeddings // block_size), blocks)
    check_memory(tables, "block tables of so many sequences", "cpu", field=sequences_field, value=sequences)


def default_cache_bytes(loaded: LoadedModel, sequences: int, tokens: int) -> int:
    """Memory of the KV cache unless options give it: on a GPU what is free, less what the largest step needs."""
    if loaded.device == "cpu":
        return DEFAULT_CACHE_BYTES
    peak = loaded.peak_step_bytes(sequences, tokens)
    free = available_bytes(loaded.device)
    return DEFAULT_CACHE_BYTES if free is None else int(FREE_SHARE * free) - peak


def _parse_size(text: str, field: str) -> float:
    """The bytes of a size such as 2e9, 4G or 1.5g (`UNITS`)."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([kmgtKMGT]?)", text)
    if match is None:
        raise BadInput("expected a number of bytes, such as 2e9, 512M or 4G", field=field, value=text)
    return float(match[1]) * UNITS[match[2]]


PROMPT_TOKENS = 512
"""Prompt and decode tokens of one attention instance in one step of a microbatch, unless the user says otherwise."""


def refuse(
    options: TopologyOptions, names: str = "role rendezvous module decoder_bits in_process", expected: str = ""
) -> None:
    """Refuse options of a topology where there is none, or where it has no such thing."""
    for name in names.split():
        value = getattr(options, name)
        value = next(iter(value or ()), None) if name == "module" else value
        if value is not None and value is not False:
            raise BadInput(expected or "expected it beside --scenario of a topology", field=flag(name), value=value)


def plan_topology(
    scenario: ServedScenario, model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> Deployment:
    """The pools of engines or the bundle that a scenario describes."""
    if (ranks := engine.tensor_parallel_size) not in (None, 1):
        raise BadInput(
            "expected 1: a topology's workers have one rank each", field="--tensor-parallel-size", value=ranks
        )
    plan = _plan_bundle if scenario.serving is None else _plan_pools
    deployment = plan(scenario, model, engine, options)
    if deployment.config.labels:
        raise BadInput("expected a model that generates tokens, which one that classifies does not", file=model.path)
    return deployment


def _plan_bundle(
    scenario: ServedScenario, model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> Deployment:
    spec = check_bundle(scenario.document, scenario.settings, scenario.path)
    refuse(options, "module decoder_bits", "expected none: a bundle serves one model")
    return BundleDeployment(model, _bundle_layout(spec, model, engine, scenario.path), spec.refill)


def _plan_pools(
    scenario: ServedScenario, model: ModelSource, engine: EngineOptions, options: TopologyOptions
) -> Deployment:
    engine.refuse_settings(
        "expected none beside --scenario, which has the engines' settings: change them by --set engine.…"
    )
    spec, pools = engine_pools(scenario.document, scenario.settings, scenario.path)
    layout, chunks = pools_layout(spec, pools)
    modules = _modules(spec.workload.models.names, options.module or [], model)
    deployment = PoolsDeployment(_shared_decoder(model, layout, options.decoder_bits), layout, modules, chunks)
    row = kv_bytes(deployment.config, model.dtype)
    for place in layout.engines:
        blocks, field = place.config.num_gpu_blocks, "engine.num_gpu_blocks or engine.kv_memory"
        size = blocks * place.config.block_size * row
        check_memory(size, f"KV caches of a {place.role} engine", model.device, field=field, value=blocks)
    return deployment


def _shared_decoder(model: ModelSource, layout: PoolsLayout, bits: int | None) -> ModelSource:
    """The decoder that several models share, rounded to this many bits."""
    if bits is None:
        return model
    if bits not in (3, 4):
        raise BadInput("expected 3 or 4", field="--decoder-bits", value=bits)
    if len(layout.prefill) == 1 or all(place.module is not None for place in layout.engines):
        expected = "expected it beside several models with a shared decode pool"
        raise BadInput(expected, field="--decoder-bits", value=bits)
    return replace(model, rounding=Rounding(bits))


def _bundle_layout(spec: AfdScenario, model: ModelSource, engine: EngineOptions, file: Path) -> BundleLayout:
    """The sizes of the bundle that a scenario describes."""
    ratios = parse_ratios(spec.ratio)
    if len(ratios) != 1:
        expected = "expected one ratio to serve with, such as --set ratio=2"
        raise BadInput(expected, field="ratio", value=spec.ratio, file=file)
    engine.refuse_settings(
        "expected none beside a scenario of a bundle, which says it or has no such thing",
        accepted=("max_num_batched_tokens", "num_gpu_blocks"),
    )
    config, batch_size, topology = model.config(), spec.batch_size, ratios[0]
    blocks, tokens = engine.num_gpu_blocks, engine.max_num_batched_tokens
    field = "batch_size" if blocks is None else "--num-gpu-blocks"
    blocks = batch_size * -(-config.max_position_embeddings // BLOCK) if blocks is None else blocks
    tokens = max(PROMPT_TOKENS, batch_size) if tokens is None else tokens
    cache_bytes = blocks * BLOCK * kv_bytes(config, model.dtype) * spec.microbatches * topology.attention_instances
    check_memory(cache_bytes, "KV caches of all attention instances", model.device, field=field, value=blocks)
    try:
        settings = EngineConfig(
            num_gpu_blocks=blocks, block_size=BLOCK, prefix_id_tokens=BLOCK, max_num_seqs=batch_size,
            max_num_batched_tokens=tokens,
        )  # fmt: skip
    except ValueError as error:
        raise BadInput(str(error), field="engine") from None
    return BundleLayout(topology.attention_instances, topology.ffn_instances, spec.microbatches, settings)


def _modules(names: list[str], modules: list[str], model: ModelSource) -> dict[str, ModelSource]:
    """The weights of each of several models: given by NAME=PATH, or random ones of a seed of their own."""
    paths = {}
    for entry in modules:
        name, separator, path = entry.partition("=")
        if not separator or name not in names or len(names) == 1:
            choices = ", ".join(names[:10]) if len(names) > 1 else "a scenario with several models"
            raise BadInput(f"expected NAME=PATH, with a name of {choices}", field="--module", value=entry)
        paths[name] = replace(model, path=Path(path))
    if len(names) == 1:
        return {}
    sources = {}
    for i, name in enumerate(names):
        source = paths.get(name)
        if source is None and not model.random:
            raise BadInput(f"expected {name}=PATH, the weights of each model of the scenario", field="--module")
        sources[name] = source or replace(model, seed=model.seed + 1 + i)
        if sources[name].config().shape != model.config().shape:
            expected = "expected the shape of --model, whose decoder reads its cache"
            raise BadInput(expected, field="--module", value=name, file=sources[name].path)
    return sources
