"""Quantisation, diagnosis and compensation of one model directory: the parts of `twin adapt`, and their measures.

A directory that `quantise` or `compensate` writes is a model that the live engine loads, with `compensation.json`: what
was done, and the quality lost and recovered on text that no training reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from live.adaptation.compensators import CalibrationSettings, calibrate, calibration_text
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.language_model import (
    EVALUATION_BATCH,
    TextData,
    encode,
    perplexity,
    read_corpus,
    read_tokenizer,
    self_sampled,
)
from live.adaptation.options import Budget, Quantisation
from live.adaptation.placement import (
    LLAMA_2_7B,
    Placement,
    Rule,
    Size,
    affordable_rank,
    damage,
    deployment_costs,
    select,
    share_of,
    total_bytes,
)
from live.adaptation.quantisers import Precision, QuantisedModel, quantise_model, write_compensators, write_quantised
from live.adaptation.training import Advance, TrainingSettings, quiet
from live.adaptation.weights import copy_text_files, module_sizes, read_model
from live.models.config import ModelConfig
from live.models.weights import Weights
from reports.run_directory import write_text
from workloads.errors import BadInput

QUARTILES = 4

WINDOW, WINDOWS = 128, 128
"""Tokens of a window of held-out text, and the number of windows."""


@dataclass(frozen=True)
class TokenMeasures:
    """Measures of each predicted token, (tokens,) float32: loss and KL from the 16-bit model, nats; the deviation

    1 − cosine of the final states (appendix A.1); and 1 where the likeliest token is the text's.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    deviation: torch.Tensor
    right: torch.Tensor

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def summary(self) -> dict[str, float]:
        """Perplexity, mean divergence, and accuracy: the share of next tokens that are the likeliest."""
        return {
            "perplexity": self.perplexity,
            "kl": float(self.divergence.double().mean()),
            "accuracy": float(self.right.double().mean()),
        }


@dataclass(frozen=True)
class Evaluation:
    """Evaluation text (windows, n) with the 16-bit model's final states, (windows, n − 1, hidden)."""

    forward: ForwardPass
    tokens: torch.Tensor
    states: torch.Tensor
    head: torch.Tensor

    @classmethod
    def on_held_out(
        cls, model: Path, forward: ForwardPass, weights: Weights, sources: Path | None, window: int, windows: int
    ) -> Evaluation:
        """Evaluation on the held-out text of `sources`, as of `read_corpus`."""
        tokens = encode(read_tokenizer(model), read_corpus(sources).evaluation)
        window = min(window, forward.config.max_position_embeddings)
        if len(tokens) < window:
            raise BadInput(f"expected at least {window} tokens of held-out text", field="text", value=len(tokens))
        held_out = TextData(tokens, tokens, window).held_out(windows)
        assert weights.head is not None
        return cls(forward, held_out, final_states(forward, weights, held_out[:, :-1]), weights.head)

    def reference(self) -> TokenMeasures:
        """Measure the 16-bit model itself."""
        return self._measured(self.states)

    def measure(self, weights: Weights) -> TokenMeasures:
        return self._measured(final_states(self.forward, weights, self.tokens[:, :-1]))

    @torch.no_grad()
    def _measured(self, final: torch.Tensor) -> TokenMeasures:
        parts = []
        batches = (tensor.split(EVALUATION_BATCH) for tensor in (self.tokens, self.states, final))
        for tokens, reference, states in zip(*batches, strict=True):
            logs, targets = ((x @ self.head.T).log_softmax(-1) for x in (states, reference))
            loss = -logs.gather(-1, tokens[:, 1:, None])[..., 0]
            divergence = (targets.exp() * (targets - logs)).sum(-1)
            deviation = 1 - torch.cosine_similarity(states, reference, dim=-1)
            right = (logs.argmax(-1) == tokens[:, 1:]).float()
            parts.append([measure.flatten() for measure in (loss, divergence, deviation, right)])
        return TokenMeasures(*map(torch.cat, zip(*parts, strict=True)))


def recovered(full: float, quantised: float, compensated: float) -> float:
    """The share of a gap in perplexity that compensation closes: 1 at the 16-bit model's, 0 at the quantised one's."""
    return (quantised - compensated) / (quantised - full)


def by_quartile(
    quantised: TokenMeasures, compensated: TokenMeasures, ungated: TokenMeasures | None = None
) -> list[dict[str, float]]:
    """Recovery by quartiles of the deviation of the quantised model's final state, the easiest tokens first (figure
    10).

    By its loss, the hardest would be those with bad luck. With `ungated` (γ at 1) also what the gate adds.
    """
    rows = []
    for tokens in quantised.deviation.argsort().chunk(QUARTILES):
        row = {
            "deviation": float(quantised.deviation[tokens].double().mean()),
            "loss": _less(quantised.loss, compensated.loss, tokens),
            "kl": _less(quantised.divergence, compensated.divergence, tokens),
            "kl_quantised": float(quantised.divergence[tokens].double().mean()),
        }
        if ungated is not None:
            row["gate_loss"] = _less(ungated.loss, compensated.loss, tokens)
            row["gate_kl"] = _less(ungated.divergence, compensated.divergence, tokens)
        rows.append(row)
    return rows


def _less(before: torch.Tensor, after: torch.Tensor, tokens: torch.Tensor) -> float:
    return float((before[tokens].double() - after[tokens].double()).mean())


def text_quality(models: Sequence[Path], sources: Path | None = None) -> list[dict[str, Any]]:
    """Perplexity and accuracy on held-out text, mean divergence from the first model (nats), and bytes of weights."""
    config, reference = read_model(models[0])
    evaluation = Evaluation.on_held_out(models[0], ForwardPass(config), reference, sources, WINDOW, WINDOWS)
    every = [_same_shape(directory, config) for directory in models]
    return [{**evaluation.measure(weights).summary(), "bytes": weight_bytes(weights)} for weights in every]


def weight_bytes(weights: Weights) -> int:
    """Bytes of all tensors, packed words, scales and compensators; tensors that share memory count once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(weights)}
    return sum(sizes.values())


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _same_shape(directory: Path, config: ModelConfig) -> Weights:
    other_config, weights = read_model(directory)
    if replace(other_config, quantisation=None) != replace(config, quantisation=None):
        raise BadInput("expected the shape of the first model", file=directory)
    return weights


SCHEMA = "twin.compensation/1"
RECORD = "compensation.json"

Document = dict[str, Any]

Where: TypeAlias = Literal["cka", "all"]


@dataclass(frozen=True)
class CompensatedModel:
    """A quantised model whose compensators take at most half the bytes of those of `full_rank` on all modules.

    `tables`: kernel latencies for the cost of a compensator; None: those of this project's kernels on a CPU.
    """

    forward: ForwardPass
    model: QuantisedModel
    full_rank: int
    rule: Rule
    tables: Path | None = None

    @cached_property
    def sizes(self) -> dict[str, Size]:
        return module_sizes(self.model.reference)

    @property
    def budget(self) -> int:
        return total_bytes(self.sizes.values(), self.full_rank) // 2

    def bytes_of(self, modules: Iterable[str], rank: int, *, gate: bool = True) -> int:
        """Bytes of compensators of one rank on some modules."""
        return total_bytes([self.sizes[name] for name in modules], rank, gate=gate)

    def rank_of(self, modules: Iterable[str], *, gate: bool = True) -> int:
        """The largest rank on some modules that the budget allows; 0 if none does."""
        return affordable_rank([self.sizes[name] for name in modules], self.budget, gate=gate)

    def place(self, tokens: torch.Tensor) -> tuple[dict[str, float], Placement]:
        """The damage of every module on tokens (sequences, n), and the placement that follows."""
        damages = damage(self.forward, self.model, tokens)
        return damages, select(damages, deployment_costs(damages, self.tables), self.sizes, self.budget, self.rule)

    def describe(self, placement: Placement) -> Document:
        """The places and their share of memory, also at Llama-2-7B's shapes."""
        size, modules, model = self.bytes_of(placement.modules, placement.rank), placement.modules, self.model
        layers, bits = self.forward.config.shape.layers, model.precision.bits
        return {
            "modules": list(modules),
            "rank": placement.rank,
            "entropy": placement.entropy,
            "bytes": size,
            "share": size / model.nbytes,
            "share_llama_2_7b": share_of(LLAMA_2_7B, modules, layers, placement.rank, bits),
        }


@dataclass(frozen=True)
class Job:
    """A model to quantise, and how; held-out text is measured in `windows` windows of `window` tokens."""

    model: Path
    quantisation: Quantisation
    window: int = 128
    windows: int = 128
    seed: int = 0

    @cached_property
    def loaded(self) -> Loaded:
        """The model quantised, with its texts; computed once."""
        options = self.quantisation
        precision = Precision(options.bits, options.group)
        config, weights = read_model(self.model)
        if config.quantisation is not None:
            raise BadInput("expected dense weights", field="quantization_config", file=self.model)
        forward = ForwardPass(config)
        evaluation = Evaluation.on_held_out(self.model, forward, weights, options.sources, self.window, self.windows)
        first = read_tokenizer(self.model).encode("\n", add_special_tokens=False).ids[-1]
        sampled = self_sampled(forward, weights, first, options.sequences, evaluation.tokens.shape[1], self.seed)
        model = quantise_model(forward, weights, options.method, precision, sampled)
        return Loaded(forward, model, sampled, evaluation)

    def describe(self) -> Document:
        options = self.quantisation
        return {
            "schema": SCHEMA,
            "model": str(self.model),
            "method": options.method,
            "precision": {"bits": options.bits, "group": options.group},
            "sources": str(options.sources) if options.sources else None,
            "sequences": options.sequences,
            "window": self.window,
            "windows": self.windows,
            "seed": self.seed,
        }

    def write(self, directory: Path, document: Document) -> Document:
        """Write what was done beside the model; returns it with what was asked for."""
        copy_text_files(self.model, directory)
        document = self.describe() | document
        write_text(directory / RECORD, json.dumps(document, indent=1) + "\n")
        return document


@dataclass(frozen=True)
class Loaded:
    """A quantised model with calibration and evaluation text."""

    forward: ForwardPass
    model: QuantisedModel
    sampled: torch.Tensor
    evaluation: Evaluation

    def measures(self) -> Document:
        measure = self.evaluation.measure
        return {
            "full": measure(self.model.reference).summary(),
            "quantised": {**measure(self.model.weights()).summary(), "bytes": self.model.nbytes},
        }

    def place(self, budget: Budget) -> tuple[CompensatedModel, dict[str, float], Placement]:
        rule = Rule(cost_weight=budget.cost_weight)
        subject = CompensatedModel(self.forward, self.model, budget.full_rank, rule, budget.tables)
        damages, placement = subject.place(self.sampled)
        if placement.rank == 0:
            raise BadInput("expected more: no compensator fits the budget", field="full_rank", value=budget.full_rank)
        return subject, damages, placement


def quantise(job: Job, directory: Path) -> Document:
    loaded = job.loaded
    write_quantised(directory, loaded.forward.config, loaded.model)
    return job.write(directory, loaded.measures())


def diagnose(job: Job, budget: Budget) -> Document:
    """The damage of every module, and the placement that follows: `damage`, `modules`, `rank`, `entropy`."""
    subject, damages, placement = job.loaded.place(budget)
    return {**job.describe(), **job.loaded.measures(), "damage": damages, **subject.describe(placement)}


def compensate(
    job: Job, directory: Path, budget: Budget, where: Where, steps: tuple[int, int], advance: Advance = quiet
) -> Document:
    """Quantise a model, train compensators (on Algorithm 1's modules or all), and write a directory to be loaded.

    `steps`: those that train the factors, and the gate after that.
    """
    loaded = job.loaded
    forward, model, measure = loaded.forward, loaded.model, loaded.evaluation.measure
    write_quantised(directory, forward.config, model)
    subject, damages, placement = loaded.place(budget)
    if where == "all":
        placement = replace(placement, modules=tuple(subject.sizes), rank=budget.full_rank)
    factors, gate = steps
    settings = CalibrationSettings(TrainingSettings(factors, 4, 2e-3), TrainingSettings(gate, 4, 1e-2))
    text = calibration_text(forward, model.reference, loaded.sampled)
    calibrated = calibrate(
        forward, model, placement.modules, placement.rank, text, settings, seed=job.seed, advance=advance
    )
    write_compensators(directory, calibrated.stored(), placement.rank)
    compensated, quantised = measure(calibrated.stored_weights()), measure(model.weights())
    measures = loaded.measures()
    full = measures["full"]["perplexity"]
    document = measures | {
        "compensated": compensated.summary(),
        "recovered": recovered(full, quantised.perplexity, compensated.perplexity),
        "quartiles": by_quartile(quantised, compensated),
        "damage": damages,
        **subject.describe(placement),
        "settings": asdict(settings),
        "losses": calibrated.losses,
    }
    return job.write(directory, document)
