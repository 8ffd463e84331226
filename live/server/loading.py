"""A model, its text layer and an engine, as a command line asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from live.engine import Engine
from live.models.config import ModelConfig
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer
from live.validation.plant import DTYPES, LivePlant
from schedulers.engine_config import EngineConfig, OneShotBudget
from workloads.errors import BadInput

BLOCK = 16
"""Tokens a block of the cache."""

DEFAULT_GIB = 1.0


@dataclass(frozen=True)
class Model:
    """Which model, and where it runs: as `LivePlant` takes them."""

    path: Path
    random: bool
    dtype: str
    device: str
    threads: int


@dataclass(frozen=True)
class Cache:
    """How large: so many blocks, or so much memory."""

    blocks: int | None
    gib: float | None


def build_text(wanted: Path | None, model: Path, random: bool) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer asked for, or the model's own, with its chat template; neither where there is none.

    Raises:
        BadInput: files that cannot be used.
    """
    folder = wanted
    if folder is None and not random and (model / "tokenizer.json").exists():
        folder = model
    return (None, None) if folder is None else (Tokenizer(folder), ChatTemplate.read(folder))


def build_engine(wanted: Model, cache: Cache, sequences: int, tokens: int, one_shot: bool) -> Engine:
    """An engine with the model loaded.

    Raises:
        BadInput: a model that cannot be read, or settings that contradict each other.
    """
    plant = LivePlant(
        wanted.path,
        random=wanted.random,
        dtype=wanted.dtype,
        device=wanted.device,
        threads=wanted.threads,
        seed=0,
        ahead=wanted.device == "cuda",
    )
    blocks = _blocks(cache, plant.decoder.config, DTYPES[wanted.dtype].itemsize, sequences)
    try:
        config = EngineConfig(
            kv_blocks=blocks,
            block_tokens=BLOCK,
            prefix_id_tokens=BLOCK,
            max_num_seqs=sequences,
            max_num_batched_tokens=tokens,
            one_shot=OneShotBudget() if one_shot else None,
        )
    except ValueError as error:
        raise BadInput(str(error), field="engine") from None
    return plant.engine(config)


def _blocks(cache: Cache, config: ModelConfig, itemsize: int, sequences: int) -> int:
    """How many blocks there will be."""
    if cache.blocks is not None:
        if cache.gib is not None:
            raise BadInput("expected --kv-blocks or --kv-gib, found both", field="--kv-gib", value=cache.gib)
        if cache.blocks < 1:
            raise BadInput("expected a whole number from 1 up", field="--kv-blocks", value=cache.blocks)
        return cache.blocks
    gib = DEFAULT_GIB if cache.gib is None else cache.gib
    shape = config.shape
    size = 2 * shape.layers * BLOCK * shape.kv_heads * shape.head_dim * itemsize
    if not size / 2**30 <= gib < float("inf"):
        raise BadInput(f"expected memory for a block at least ({size} bytes)", field="--kv-gib", value=gib)
    most = sequences * -(-config.positions // BLOCK)
    return int(gib * 2**30 // size) if cache.gib is not None else min(int(gib * 2**30 // size), most)
