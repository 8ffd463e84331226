"""Builds a tokenizer and an engine from command line options."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.io.config_io import checked
from live.engine import Engine
from live.loaded_model import DTYPES, LoadedModel, ModelSource
from live.memory import check_memory
from live.models.config import ModelConfig
from live.models.lora import load_adapters
from live.server.options import EngineOptions, flag
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer
from scenarios.engine import EngineSpec, SchedulerPlan
from schedulers.engine_config import EngineConfig
from schedulers.model_slots import SlotsConfig
from workloads.errors import BadInput

BLOCKS_FLAG, MEMORY_FLAG = "--num-gpu-blocks", "--kv-cache-memory-bytes"

BLOCK = 16
"""Block size of the KV cache, tokens."""

DEFAULT_CACHE_BYTES, MAX_CACHE_BYTES = 1 << 30, 1 << 60
"""Memory of the KV cache by default, and the most that may be requested."""

UNITS = {"": 1}
UNITS |= {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}
"""Suffixes of sizes, as in vLLM: lower case is decimal, upper case binary."""

ID_BYTES = 40
"""Bytes of a block id in Python: an integer, and an entry of a list."""


@dataclass(frozen=True)
class Cache:
    """The options of the KV cache: a number of blocks, or an amount of memory (`parse_size`)."""

    blocks: int | None
    memory: str | None


def build_text(wanted: Path | None, model: Path, random: bool) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The given tokenizer, or the model's own, with its chat template; None for what does not exist.

    Raises:
        BadInput: files that cannot be used.
    """
    folder = wanted
    if folder is None and not random and (model / "tokenizer.json").exists():
        folder = model
    return (None, None) if folder is None else (Tokenizer(folder), ChatTemplate.read(folder))


def build_engine(
    wanted: ModelSource, cache: Cache, sequences: int, tokens: int, one_shot: bool, speculative: str | None = None
) -> Engine:
    """An engine with the model loaded, from the flags of a command line. `speculative`: JSON of speculative_config.

    Raises:
        BadInput: a model that cannot be read, or settings that contradict each other.
    """
    speculates = None if speculative is None else _parse_speculation(speculative)
    ahead = wanted.device == "cuda" and speculates is None
    model = _load(wanted, ahead=ahead)
    settings: dict[str, Any] = {
        "num_gpu_blocks": _blocks(cache, model.decoder.config, wanted, sequences),
        "block_size": BLOCK,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": tokens,
        "one_shot": {} if one_shot else None,
        "async_scheduling": ahead,
        "speculative_config": speculates,
    }
    return model.planned_engine(checked(EngineSpec, settings, None, "engine").build(Path()))


def build_lora_engine(
    wanted: ModelSource, cache: Cache, sequences: int, tokens: int, name: str, options: EngineOptions
) -> tuple[Engine, tuple[str, ...]]:
    """An engine with the model and adapters loaded, from the flags of a command line, and the names of all.

    Raises:
        BadInput: a model or an adapter that cannot be read, or settings that contradict each other.
    """
    for given in ("one_shot", "speculative_config"):
        if value := getattr(options, given):
            raise BadInput("expected none beside --lora-modules", field=flag(given), value=value)
    slots = 1 if options.max_loras is None else options.max_loras
    if slots < 1:
        raise BadInput("expected a whole number from 1 up", field="--max-loras", value=slots)
    model = _load(wanted, ahead=False)
    adapters = load_adapters(options.lora_modules or (), model.decoder.config, DTYPES[wanted.dtype])
    if name in (adapter.name for adapter in adapters):
        raise BadInput("expected a name that the base model has not", field="--lora-modules", value=name)
    config = EngineConfig(
        _blocks(cache, model.decoder.config, wanted, sequences), BLOCK, tokens, sequences,
        model_slots=SlotsConfig(slots, base=name),
    )  # fmt: skip
    return model.lora_engine(config, adapters), (name, *(adapter.name for adapter in adapters))


def build_planned_engine(wanted: ModelSource, scheduler: SchedulerPlan) -> Engine:
    """An engine with the model loaded, whose scheduler a scenario describes.

    Raises:
        BadInput: a model that cannot be read, or a cache that the device has no memory for.
    """
    model = _load(wanted, ahead=scheduler.depth > 1)
    settings = scheduler.config
    _expect_blocks(
        model.decoder.config, wanted, settings.block_size, settings.num_gpu_blocks, settings.max_num_seqs,
        "engine.num_gpu_blocks or engine.kv_memory", settings.num_gpu_blocks, "engine.max_num_seqs",
    )  # fmt: skip
    return model.planned_engine(scheduler)


def _parse_speculation(text: str) -> dict[str, Any]:
    """The object of `--speculative-config`.

    Raises:
        BadInput: text that is no JSON object.
    """
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        expected = 'expected a JSON object, such as {"method": "ngram", "num_speculative_tokens": 4}'
        raise BadInput(expected, field="--speculative-config", value=text)
    return parsed


def _load(wanted: ModelSource, *, ahead: bool) -> LoadedModel:
    return LoadedModel(
        wanted.path,
        random=wanted.random,
        dtype=wanted.dtype,
        device=wanted.device,
        threads=wanted.threads,
        async_scheduling=ahead,
    )


def _block_bytes(config: ModelConfig, model: ModelSource, block_size: int) -> int:
    shape = config.shape
    return 2 * shape.layers * block_size * shape.kv_heads * shape.head_dim * DTYPES[model.dtype].itemsize


def _blocks(cache: Cache, config: ModelConfig, model: ModelSource, sequences: int) -> int:
    """The number of blocks.

    Raises:
        BadInput: no blocks, more than fit into memory, or more sequences than their block tables have memory for.
    """
    size = _block_bytes(config, model, BLOCK)
    longest = -(-config.max_position_embeddings // BLOCK)
    if cache.blocks is None:
        blocks, field, value = _blocks_in(cache.memory, size, sequences * longest)
    elif cache.memory is not None:
        expected = f"expected {BLOCKS_FLAG} or {MEMORY_FLAG}, found both"
        raise BadInput(expected, field=MEMORY_FLAG, value=cache.memory)
    elif cache.blocks < 1:
        raise BadInput("expected a whole number from 1 up", field=BLOCKS_FLAG, value=cache.blocks)
    else:
        blocks, field, value = cache.blocks, BLOCKS_FLAG, cache.blocks
    _expect_blocks(config, model, BLOCK, blocks, sequences, field, value, "--max-num-seqs")
    return blocks


def _expect_blocks(
    config: ModelConfig, model: ModelSource, block_size: int, blocks: int, sequences: int,
    field: str, value: float, sequences_field: str,
) -> None:  # fmt: skip
    """Refuse more blocks or block tables than there is memory for. `field`, `value`: the setting to blame.

    Raises:
        BadInput: there is not so much memory.
    """
    size = _block_bytes(config, model, block_size)
    check_memory(blocks * size, f"blocks of {size} bytes", model.device, field=field, value=value)
    check_memory(blocks * ID_BYTES, "ids of so many blocks", "cpu", field=field, value=value)
    tables = 4 * sequences * min(-(-config.max_position_embeddings // block_size), blocks)
    check_memory(tables, "block tables of so many sequences", "cpu", field=sequences_field, value=sequences)


def _blocks_in(memory: str | None, size: int, max_blocks: int) -> tuple[int, str, float]:
    """Blocks of `size` bytes in an amount of memory, with the option and its value for errors.

    By default DEFAULT_CACHE_BYTES, and at most `max_blocks`.
    """
    wanted = DEFAULT_CACHE_BYTES if memory is None else parse_size(memory, MEMORY_FLAG)
    if not size <= wanted <= MAX_CACHE_BYTES:
        expected = f"expected memory for a block at least ({size} bytes), and at most {MAX_CACHE_BYTES} bytes"
        raise BadInput(expected, field=MEMORY_FLAG, value=wanted)
    blocks = int(wanted // size)
    return min(blocks, max_blocks) if memory is None else blocks, MEMORY_FLAG, wanted


def parse_size(text: str, field: str) -> float:
    """The bytes of a size such as 2e9, 4G or 1.5g (`UNITS`).

    Raises:
        BadInput: something else; `field` is named.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([kmgtKMGT]?)", text)
    if found is None:
        raise BadInput("expected a number of bytes, such as 2e9, 512M or 4G", field=field, value=text)
    return float(found[1]) * UNITS[found[2]]
