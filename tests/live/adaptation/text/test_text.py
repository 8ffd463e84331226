"""The corpus and its tokenizers, windows of text, perplexity, and self-sampled text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.shapes import Shape
from live.adaptation.forward import ForwardPass
from live.adaptation.language_model import (
    TextData,
    encode,
    is_held_out,
    perplexity,
    read_corpus,
    read_tokenizer,
    self_sampled,
    text_data,
    token_losses,
    train_tokenizer,
    write_tokenizer,
)
from live.adaptation.weights import from_named, initial_weights, to_named
from live.models.config import ModelConfig
from live.tokenizer import Tokenizer
from workloads.errors import BadInput

TEXT = "def f(x):\n    return {'é': x, '→': 1}\n" * 20


def test_files_are_held_out_by_their_paths(tmp_path: Path) -> None:
    for i in range(60):
        folder = tmp_path / ("test" if i % 3 == 0 else "lib")
        folder.mkdir(exist_ok=True)
        (folder / f"m{i}.py").write_text(f"{i}\n")
    corpus = read_corpus(tmp_path)
    expected = [i for i in range(60) if i % 3 and is_held_out(f"lib/m{i}.py")]
    assert sorted(int(text) for text in corpus.evaluation) == expected
    assert len(corpus.training) == 40 - len(expected)
    assert 0 < len(expected) < 8
    (tmp_path / "lib" / "m1.py").write_text("2\n")
    assert read_corpus(tmp_path).digest != corpus.digest


def test_a_text_of_ones_own_is_a_folder_or_lines(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    rows = [json.dumps({"prompt": f"{n}?", "answer": "yes"} if n % 2 else {"text": f"note {n}"}) for n in range(60)]
    lines.write_text("\n".join(rows))
    corpus = read_corpus(lines)
    assert set(corpus.training + corpus.evaluation) == {f"{n}?yes" if n % 2 else f"note {n}" for n in range(60)}
    assert all(is_held_out(text.removesuffix("yes")) for text in corpus.evaluation)
    for n in range(60):
        (tmp_path / f"{n}.{('txt', 'md', 'py', 'csv')[n % 4]}").write_text(str(n))
    corpus = read_corpus(tmp_path)
    assert sorted(map(int, corpus.training + corpus.evaluation)) == [n for n in range(60) if n % 4 < 3]


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected text to train on and to hold out: files of "):
        read_corpus(tmp_path)


def test_with_256_tokens_every_byte_is_one(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], 256)
    ids = encode(tokenizer, [TEXT])
    assert len(ids) == len(TEXT.encode())
    assert tokenizer.decode(ids.tolist()) == TEXT
    write_tokenizer(tmp_path, tokenizer)
    served = Tokenizer(tmp_path)  # the live engine's
    assert served.encode(TEXT) == ids.tolist()
    assert served.size == 256
    assert read_tokenizer(tmp_path).encode(TEXT).ids == ids.tolist()


def test_byte_pairs_are_fewer_tokens_of_the_same_text() -> None:
    tokenizer = train_tokenizer([TEXT], 300)
    ids = encode(tokenizer, [TEXT])
    assert len(ids) < len(TEXT.encode()) / 2
    assert tokenizer.decode(ids.tolist()) == TEXT
    with pytest.raises(BadInput, match="vocabulary: got 255, expected at least 256"):
        train_tokenizer([TEXT], 255)


def test_windows_of_training_and_evaluation() -> None:
    data = TextData(np.arange(100), np.arange(1000, 1050), 10)
    batch = data.batch(8, 0, 3)
    assert batch.shape == (8, 10)
    assert torch.equal(batch, batch[:, :1] + torch.arange(10))
    assert torch.equal(batch, data.batch(8, 0, 3))
    assert not torch.equal(batch, data.batch(8, 0, 4))
    assert not torch.equal(batch, data.batch(8, 1, 3))
    assert data.held_out(3)[:, 0].tolist() == [1000, 1020, 1040]
    assert data.held_out(99)[:, 0].tolist() == [1000, 1010, 1020, 1030, 1040]


def test_too_little_text_is_refused() -> None:
    tokenizer = train_tokenizer([TEXT], 256)
    with pytest.raises(BadInput, match="text: got 3, expected at least 10 tokens of evaluation text"):
        text_data(tokenizer, [TEXT], ["abc"], 10)


@pytest.fixture
def forward() -> ForwardPass:
    return ForwardPass(ModelConfig("llama", Shape(1, 16, 24, 4, 2, 4, 12), max_position_embeddings=64, tied=True))


def test_a_model_that_knows_nothing_has_the_vocabulary_s_perplexity(forward: ForwardPass) -> None:
    weights = initial_weights(forward.config, 0)
    blank = from_named({name: torch.zeros_like(tensor) for name, tensor in to_named(weights).items()})
    losses = token_losses(forward, blank, torch.randint(12, (40, 9)))
    assert losses.shape == (40, 8)
    assert perplexity(losses) == pytest.approx(12)
    assert perplexity(torch.tensor([[0.0, math.log(4)]])) == pytest.approx(2)


def test_sampled_text_follows_the_model_s_distribution(forward: ForwardPass) -> None:
    weights = initial_weights(forward.config, 3)
    tensors = {name: 8 * tensor if name == "embedding" else tensor for name, tensor in to_named(weights).items()}
    weights = from_named(tensors)
    sampled = self_sampled(forward, weights, 5, 4000, 3, seed=0)
    assert sampled.shape == (4000, 3)
    assert (sampled[:, 0] == 5).all()
    expected = forward(weights, torch.tensor([[5]]))[0][0, -1].softmax(-1)
    shares2 = torch.bincount(sampled[:, 1], minlength=12) / 4000
    assert float((expected - shares2).abs().max()) < 4 * math.sqrt(0.25 / 4000)
    assert float(expected.max()) > 0.12  # it is not uniform
    likeliest = int(shares2.argmax())
    rows = sampled[sampled[:, 1] == likeliest]
    expected = forward(weights, torch.tensor([[5, likeliest]]))[0][0, -1].softmax(-1)
    shares2 = torch.bincount(rows[:, 2], minlength=12) / len(rows)
    assert float((expected - shares2).abs().max()) < 4 * math.sqrt(0.25 / len(rows))
    assert torch.equal(sampled, self_sampled(forward, weights, 5, 4000, 3, seed=0))
    assert not torch.equal(sampled, self_sampled(forward, weights, 5, 4000, 3, seed=1))
