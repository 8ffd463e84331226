"""Tasks of text: examples, what counts of an answer, and the measures of given modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.shapes import Shape
from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.language_model import Corpus, train_tokenizer
from live.adaptation.text_lessons import Examples, cut_at_brackets, text_lesson
from live.adaptation.training import TrainingSettings, tune
from live.adaptation.weights import initial_weights, to_named
from live.models.config import ModelConfig
from workloads.errors import BadInput

SOURCE = '''
def first(self, name):
    """Return the first."""
    return max(self[name], other(name))

def second():
    r"""A quoted word: 'é', and no end
    of the line."""
    return f(g(1), {2: [3]})
'''


@pytest.fixture
def corpus() -> Corpus:
    return Corpus((SOURCE,), (SOURCE.replace("first", "last"),), "two functions", "0")


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig("llama", Shape(1, 32, 48, 2, 1, 16, 256, qk_norm=False), 128, tied=True)


def text_of(examples: Examples, row: int) -> tuple[str, str]:
    """A prompt and the part of its answer that counts."""
    tokenizer = train_tokenizer([SOURCE], 256)
    answer = examples.answers[row][examples.counted[row]]
    return tokenizer.decode(examples.prompts[row].tolist()), tokenizer.decode(answer.tolist())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return f(g(1), {2: [3]})", ("return f(g(1), {2: [3", "]})")),
        ("x = a[b(c)[d]", ("x = a[b(c", ")]")),  # never closed
        ("x = (y)", None),  # one is not enough
        ("x = ((((((y))))))", None),
        ("x = ((y]", None),
        ("x = f(g('('))", None),
        ("x = f(g(1))  # (", None),
    ],
)
def test_lines_are_cut_where_most_brackets_are_open(line: str, expected: tuple[str, str] | None) -> None:
    assert cut_at_brackets(line) == expected


def test_examples_are_filled_up_and_their_ends_count(corpus: Corpus) -> None:
    tokenizer = train_tokenizer([SOURCE], 256)
    brackets = text_lesson("brackets", corpus, tokenizer, 0)
    assert brackets.training.prompts.shape == (2, 40)
    assert text_of(brackets.training, 0) == ("return max(self[name".rjust(40, "\n"), "])\n")
    assert text_of(brackets.training, 1)[1] == "]})\n"
    docstrings = text_lesson("docstring", corpus, tokenizer, 0)
    assert docstrings.training.answers.shape == (2, 40)
    assert text_of(docstrings.training, 0) == ('def first(self, name):\n    """'.rjust(56, "\n"), "Return the first.\n")
    assert text_of(docstrings.evaluation, 0)[0] == 'def last(self, name):\n    """'.rjust(56, "\n")
    assert text_of(docstrings.training, 1)[1] == "A quoted word: 'é', and no end\n"
    assert docstrings.sequences(9).shape == (2, 96)


def test_what_fills_an_answer_up_does_not_count(corpus: Corpus, config: ModelConfig) -> None:
    lesson = text_lesson("brackets", corpus, train_tokenizer([SOURCE], 256), 0)
    weights = initial_weights(config, 0)
    modules = Modules(ForwardPass(config), weights, weights)
    measured, loss = lesson.measure(modules, 8), lesson.loss(modules, 4, 0)
    refilled = lesson.evaluation.answers.masked_fill(~lesson.evaluation.counted, 7)
    changed = replace(lesson, evaluation=replace(lesson.evaluation, answers=refilled))
    assert changed.measure(modules, 8) == pytest.approx(measured)
    refilled = lesson.training.answers.masked_fill(~lesson.training.counted, 7)
    assert float(replace(lesson, training=replace(lesson.training, answers=refilled)).loss(modules, 4, 0)) == float(
        loss
    )


def test_a_right_answer_is_counted_as_one(corpus: Corpus, config: ModelConfig) -> None:
    """Modules that are trained on the very examples that they are measured on get all of them right."""
    lesson = text_lesson("brackets", corpus, train_tokenizer([SOURCE], 256), 0)
    lesson = replace(lesson, evaluation=lesson.training)
    forward, settings = ForwardPass(config), TrainingSettings(steps=40, batch_size=2, learning_rate=1e-2)
    base = initial_weights(config, 0)
    assert lesson.measure(Modules(forward, base, base), 8)["exact_match"] == 0
    tuned = tune(forward, base, None, lesson, settings)
    measured = lesson.measure(Modules(forward, tuned.weights, tuned.weights), 8)
    assert measured["exact_match"] == measured["token_accuracy"] == 1
    assert 1 <= measured["perplexity"] < 1.5


def test_a_prefill_module_is_tuned_for_a_frozen_decode_module(corpus: Corpus, config: ModelConfig) -> None:
    lesson = text_lesson("docstring", corpus, train_tokenizer([SOURCE], 256), 0)
    forward, base = ForwardPass(config), initial_weights(config, 0)
    before = {name: tensor.clone() for name, tensor in to_named(base).items()}
    settings = TrainingSettings(steps=10, batch_size=2, learning_rate=1e-2)
    trained = tune(forward, base, base, lesson, settings)
    assert trained.losses[-1] < trained.losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in to_named(base).items())


def test_unknown_tasks_and_text_without_examples_are_refused(corpus: Corpus) -> None:
    tokenizer = train_tokenizer([SOURCE], 256)
    with pytest.raises(BadInput, match="task: got 'dance', expected one of brackets, docstring"):
        text_lesson("dance", corpus, tokenizer, 0)
    with pytest.raises(BadInput, match="text: got 'two functions', expected text with examples of docstring"):
        text_lesson("docstring", replace(corpus, evaluation=("x = 1\n",)), tokenizer, 0)
