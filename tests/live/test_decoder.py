"""Logits agree with transformers: whole prompts, chunks, decodes alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from live.models.config import read_config
from live.models.decoder import Decoder, Inputs, PagedCache
from live.models.weights import load_weights
from tests.live.conftest import MODELS

BLOCK = 4
TABLES = torch.randperm(64, generator=torch.Generator().manual_seed(3)).reshape(4, 16).int()
"""Blocks of four sequences, in no order."""


def slots(sequence: int, begin: int, end: int) -> torch.Tensor:
    positions = torch.arange(begin, end)
    return TABLES[sequence, positions // BLOCK].long() * BLOCK + positions % BLOCK


def inputs(decodes: list[tuple[int, int, int]], chunks: list[tuple[int, int, list[int]]]) -> Inputs:
    """Decodes are (sequence, position, token), chunks (sequence, context, tokens)."""
    tokens = [token for _, _, token in decodes] + [token for _, _, part in chunks for token in part]
    places = [(s, p, p + 1) for s, p, _ in decodes] + [(s, c, c + len(part)) for s, c, part in chunks]
    sizes = [len(part) for _, _, part in chunks]
    return Inputs(
        tokens=torch.tensor(tokens),
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in places]),
        slots=torch.cat([slots(*place) for place in places]),
        decode_tables=TABLES[[s for s, _, _ in decodes]],
        decode_lengths=torch.tensor([p + 1 for _, p, _ in decodes], dtype=torch.int32),
        chunk_tables=TABLES[[s for s, _, _ in chunks]],
        chunk_starts=torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()] if sizes else [0], dtype=torch.int32),
        chunk_contexts=torch.tensor([c for _, c, _ in chunks], dtype=torch.int32),
    )


@pytest.fixture(params=MODELS)
def models(request: pytest.FixtureRequest, checkpoint: Callable[[str], tuple[Path, Any]]) -> tuple[Decoder, Any]:
    directory, peer = checkpoint(request.param)
    config = read_config(directory)
    return Decoder(config, load_weights(directory, config, torch.float32, "cpu")), peer


def test_logits_agree_with_transformers(models: tuple[Decoder, Any]) -> None:
    assert_logits_agree(*models)


@torch.inference_mode()
def assert_logits_agree(decoder: Decoder, peer: Any) -> None:
    """Prompts whole and in chunks, decodes beside them and alone."""
    cache = PagedCache.allocate(decoder.config, 64, BLOCK, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(11)
    texts = [torch.randint(0, 199, (size,), generator=generator).tolist() for size in (23, 9, 41, 2)]
    exact = [peer(torch.tensor([text])).logits[0] for text in texts]

    def close(rows: torch.Tensor, expected: list[torch.Tensor]) -> None:
        logits = decoder.logits(decoder.normed(rows))
        torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-4)

    # A whole prompt and the first chunks of two others, in one step.
    first = inputs([], [(0, 0, texts[0][:-1]), (1, 0, texts[1][:5]), (2, 0, texts[2][:17])])
    close(decoder.forward(first, cache), [*exact[0][:-1], *exact[1][:5], *exact[2][:17]])
    # A decode beside later chunks and a new prompt.
    second = inputs([(0, 22, texts[0][22])], [(1, 5, texts[1][5:8]), (2, 17, texts[2][17:40]), (3, 0, texts[3][:1])])
    close(decoder.forward(second, cache), [exact[0][22], *exact[1][5:8], *exact[2][17:40], exact[3][0]])
    # Decodes only, of unequal lengths.
    third = inputs([(1, 8, texts[1][8]), (2, 40, texts[2][40]), (3, 1, texts[3][1])], [])
    close(decoder.forward(third, cache), [exact[1][8], exact[2][40], exact[3][1]])
