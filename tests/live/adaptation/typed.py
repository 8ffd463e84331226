"""`twin adapt` as tests type it, the smallest size, and the live engine's logits."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from live.adaptation import tasks
from live.adaptation.training import TrainingSettings
from live.models.config import ModelConfig
from live.models.decoder import Decoder, Inputs, PagedCache
from live.models.weights import Weights
from twin.cli import run


def adapt(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The document that a command prints."""
    capsys.readouterr()
    assert run(["adapt", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line with which a command ends."""
    capsys.readouterr()
    assert run(["adapt", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def smallest(settings: TrainingSettings, **fields: Any) -> tasks.Size:
    """Models of width 32, whose trainings are all alike but for some `fields`."""
    trainings = dict.fromkeys(("base", "adaptation", "hard", "retuning", "hard_retuning"), settings)
    return dataclasses.replace(tasks.SIZES["reduced"], hidden=32, **(trainings | fields))


@torch.inference_mode()
def engine_logits(config: ModelConfig, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The live engine's logits of whole prompts, (batch, n, vocabulary), each a chunk in a block of its own."""
    decoder, (batch, n) = Decoder(config, weights), tokens.shape
    cache = PagedCache.allocate(config, batch, 64, torch.float32, "cpu")
    positions = torch.arange(n)
    inputs = Inputs(
        tokens=tokens.flatten(),
        positions=positions.repeat(batch),
        slots=torch.cat([64 * row + positions for row in range(batch)]),
        decode_tables=torch.zeros(0, 1, dtype=torch.int32),
        decode_lengths=torch.zeros(0, dtype=torch.int32),
        chunk_tables=torch.arange(batch, dtype=torch.int32).unsqueeze(1),
        chunk_starts=torch.arange(0, batch * n + 1, n, dtype=torch.int32),
        chunk_contexts=torch.zeros(batch, dtype=torch.int32),
    )
    return decoder.logits(decoder.normed(decoder.forward(inputs, cache))).view(batch, n, -1)
