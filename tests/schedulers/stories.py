"""Steps told in one line each, so that a story worked by hand can be compared as a whole."""

from __future__ import annotations

from schedulers.batches import Batch, DecodeBatch, MixedBatch, OneShotBatch
from schedulers.engine_core import EngineCore
from workloads.request import Request

KINDS = {OneShotBatch: "one-shot", DecodeBatch: "decode", MixedBatch: "mixed"}


def chat(id: int, prompt: int, limit: int, ids: tuple[int, ...] = (), priority: int = 0) -> Request:
    return Request(id, 0.0, prompt, limit, prefix_blocks=ids, priority=priority)


def judge(id: int, prompt: int, ids: tuple[int, ...] = (), model: str = "default", task: str = "classify") -> Request:
    return Request(id, 0.0, prompt, 0, model=model, prefix_blocks=ids, task=task)


def batch_text(batch: Batch | None) -> str:
    """The kind, then every chunk as id:cached+computed, ! where it completes a prompt, then who decodes after a |."""
    if batch is None:
        return "nothing"
    chunks = [f"{chunk.sequence.request.id}:{chunk.context}+{chunk.tokens}{'!' * chunk.last}" for chunk in batch.chunks]
    decodes = ["|", *(str(sequence.request.id) for sequence in batch.decodes)] if batch.decodes else []
    return " ".join([KINDS[type(batch)], *chunks, *decodes])


def step(core: EngineCore, *stop: int) -> str:
    """Begin a step and end it at once; the answers of `stop` end with it."""
    batch = core.begin_step(0.0)
    core.check_integrity()
    text = batch_text(batch)
    if batch is not None:
        core.end_step(batch, [core.sequences[id] for id in stop], 0.0)
        core.check_integrity()
    return text


def steps(core: EngineCore, maximum: int = 100) -> list[str]:
    """Steps until there is nothing to run; nobody stops before its limit."""
    results: list[str] = []
    while (text := step(core)) != "nothing":
        results.append(text)
        assert len(results) <= maximum, "it never ends"
    return results
