"""Tokenizers: bytes, or byte pairs merged by their frequency in the corpus, in the file that the live engine reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from live.adaptation.sizes import BYTES
from reports.records.run_directory import write_text
from workloads.errors import BadInput

FILE = "tokenizer.json"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train byte pairs until there are `vocabulary` tokens; with 256 of them every byte is a token."""
    if vocabulary < BYTES:
        raise BadInput(f"expected at least {BYTES}, one for each byte", field="vocabulary", value=vocabulary)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    write_text(directory / FILE, tokenizer.to_str(pretty=True) + "\n")


def read_tokenizer(directory: Path) -> Tokenizer:
    file = directory / FILE
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise BadInput(f"expected a tokenizer ({error})", file=file) from None
