"""Small language models of a corpus: its text, windows to train on, perplexity, and text that a model writes.

The corpus is the standard library's sources as it is installed, or a text of one's own; a part is held out."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.training import (
    SCHEMA,
    Advance,
    TrainingSettings,
    quiet,
    read_sizes,
    train_into,
    write_record,
)
from live.adaptation.weights import initial_weights, small_config
from live.models.config import Family, ModelConfig
from live.models.weights import Weights
from reports.run_directory import write_text
from workloads.errors import BadInput
from workloads.json_files import is_text
from workloads.trace_files import json_lines

MAX_TEXT_POSITIONS = 1024

BYTES = 256
"""The smallest vocabulary of text: every byte is a token, and nothing is merged."""


@dataclass(frozen=True)
class TextSize:
    """A language model of so many tokens (256: bytes), its training by windows, and windows of an evaluation."""

    layers: int
    hidden: int
    vocabulary: int
    window: int
    training: TrainingSettings
    windows: int = 128

    def config(self, family: Family = "llama") -> ModelConfig:
        return small_config(self.layers, self.hidden, self.vocabulary, MAX_TEXT_POSITIONS, family)


TEXT_SIZES = read_sizes(TextSize, "text")


SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "_bundled"}
)
"""Folders that are left out: packages of the installation, tests, and tables of character codes."""

SUFFIXES = (".py", ".txt", ".md")
"""Endings of the files in a folder of one's own."""

HELD_OUT = 16
"""One file or line in this many is held out, by a hash of its path, text or prompt."""


@dataclass(frozen=True)
class Corpus:
    """Text by file (sorted by path) or line, each in one of two parts; `digest` is of all of it."""

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    description: str
    digest: str


def read_corpus(root: Path | None = None) -> Corpus:
    """The corpus of a folder of `SUFFIXES`, a JSONL file with `text` or `prompt` and `answer`, or Python's library."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[str]] = {False: [], True: []}
    digest = hashlib.sha256()
    for name, content in _lines(folder) if folder.is_file() else _files(folder, SUFFIXES if root else (".py",)):
        digest.update(f"{name}\n{content}".encode())
        parts[is_held_out(name)].append(content)
    if not (parts[False] and parts[True]):
        raise BadInput(
            f"expected text to train on and to hold out: files of {', '.join(SUFFIXES)}, or lines", file=folder
        )
    description = f"standard library of Python {platform.python_version()}" if root is None else folder.name
    return Corpus(tuple(parts[False]), tuple(parts[True]), description, digest.hexdigest()[:16])


def _files(folder: Path, suffixes: Collection[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in suffixes and SKIPPED.isdisjoint(name.parts) and path.is_file():
            yield name.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Each line's key, its text or its prompt, which decides whether it is held out; and its whole text."""
    for line, row in json_lines(file):
        fields = ("text",) if "text" in row else ("prompt", "answer")
        texts = [text for text in map(row.get, fields) if isinstance(text, str) and is_text(text)]
        if len(texts) < len(fields):
            raise BadInput("expected a text, or a prompt and an answer", field="row", value=row, file=file, line=line)
        yield texts[0], "".join(texts)


def is_held_out(name: str) -> bool:
    """True for the path, text or prompt of what no training reads."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0


EVALUATION_BATCH = 32


@dataclass(frozen=True)
class TextData:
    """Token ids of a corpus, file after file, cut in windows of so many tokens."""

    training: NDArray[np.int64]
    evaluation: NDArray[np.int64]
    window: int

    def batch(self, size: int, seed: int, step: int) -> torch.Tensor:
        """The windows of a training step, (size, window); equal arguments draw the same."""
        generator = np.random.default_rng([seed, step])
        begins = generator.integers(len(self.training) - self.window + 1, size=size)
        return torch.from_numpy(self.training[begins[:, None] + np.arange(self.window)])

    def held_out(self, windows: int) -> torch.Tensor:
        """Windows of the text that is held out, spread evenly over it, (windows, window) or as many as it has."""
        count = len(self.evaluation) // self.window
        all_windows = self.evaluation[: count * self.window].reshape(count, self.window)
        rows = np.linspace(0, count - 1, min(windows, count)).astype(np.int64)
        return torch.from_numpy(all_windows[rows])


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> NDArray[np.int64]:
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return np.concatenate([np.asarray(text.ids, dtype=np.int64) for text in encoded])


def text_data(tokenizer: Tokenizer, training: Iterable[str], evaluation: Iterable[str], window: int) -> TextData:
    data = TextData(encode(tokenizer, training), encode(tokenizer, evaluation), window)
    for name, tokens in (("training", data.training), ("evaluation", data.evaluation)):
        if len(tokens) < window:
            raise BadInput(f"expected at least {window} tokens of {name} text", field="text", value=len(tokens))
    return data


@dataclass(frozen=True)
class WindowLesson:
    """The data of a language model's training. `seed`: of everything that is drawn."""

    data: TextData
    seed: int

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        return next_token_loss(modules.forward, modules.prefill, self.data.batch(size, self.seed, step)).mean()


def next_token_loss(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of each token but the first, (batch, n − 1), in nats."""
    logits, _ = forward(weights, tokens[:, :-1])
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def token_losses(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """`next_token_loss` without gradients, a few sequences at a time."""
    return torch.cat([next_token_loss(forward, weights, part) for part in tokens.split(EVALUATION_BATCH)])


def perplexity(losses: torch.Tensor) -> float:
    return float(losses.double().mean().exp())


@torch.no_grad()
def self_sampled(
    forward: ForwardPass, weights: Weights, first: int, sequences: int, tokens: int, seed: int
) -> torch.Tensor:
    """Sequences (sequences, tokens) int64 from `first` on, drawn by the model's own distribution at temperature 1
    (SPEAR, 3.1).
    """
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.full((sequences, 1), first)]
    logits, cache = forward(weights, columns[0])
    while True:
        columns.append(torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator))
        if len(columns) == tokens:
            return torch.cat(columns, dim=1)
        logits, cache = forward(weights, columns[-1], cache)


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


class TextModel(NamedTuple):
    """A trained language model with its data, and its `training.json`."""

    forward: ForwardPass
    weights: Weights
    tokenizer: Tokenizer
    data: TextData
    document: dict[str, Any]


def train_text_model(
    directory: Path, size: TextSize, family: Family, seed: int, *, text: Path | None = None, advance: Advance = quiet
) -> TextModel:
    """Train a language model into a directory, also from where it was stopped."""
    corpus = read_corpus(text)
    tokenizer = train_tokenizer(corpus.training, size.vocabulary)
    data = text_data(tokenizer, corpus.training, corpus.evaluation, size.window)
    config = size.config(family)
    forward, start = ForwardPass(config), initial_weights(config, seed)
    identity = {"kind": "text", "size": asdict(size), "family": family, "seed": seed, "corpus": corpus.digest}
    lesson = WindowLesson(data, seed)
    trained = train_into(directory, identity, forward, start, None, lesson, size.training, advance=advance)
    write_tokenizer(directory, tokenizer)
    document = {
        "schema": SCHEMA,
        "name": f"language model, {corpus.description}",
        "corpus": {
            "description": corpus.description,
            "digest": corpus.digest,
            "files": [len(corpus.training), len(corpus.evaluation)],
            "tokens": [len(data.training), len(data.evaluation)],
        },
        "text_size": asdict(size),
        "seed": seed,
        "losses": trained.losses,
        "trained_parameters": trained.trained_parameters,
        "perplexity": perplexity(token_losses(forward, trained.weights, data.held_out(size.windows))),
    }
    write_record(directory, document)
    return TextModel(forward, trained.weights, tokenizer, data, document)
