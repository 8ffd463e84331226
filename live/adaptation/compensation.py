"""Quantisation, diagnosis and compensation of one model directory: the parts of `twin adapt`, and their measures.

A directory that `quantise` or `compensate` writes is a model that the live engine loads, with `compensation.json`: what
was done, and the quality lost and recovered on text that no training reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
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
from live.adaptation.placement import (
    DEFAULT_RULE,
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
from live.adaptation.quantisers import (
    Method,
    Precision,
    QuantisedModel,
    quantise_model,
    write_compensators,
    write_quantised,
)
from live.adaptation.training import TrainingSettings
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
    rows = []
    for directory in models:
        weights = _same_shape(directory, config)
        rows.append({**evaluation.measure(weights).summary(), "bytes": weight_bytes(weights)})
    return rows


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
class Job:
    """A model to quantise, and its texts: `sources` of `read_corpus`, and self-sampled sequences of `window` tokens."""

    model: Path
    method: Method
    precision: Precision
    sources: Path | None = None
    sequences: int = 192
    window: int = 128
    windows: int = 128
    seed: int = 0

    @cached_property
    def loaded(self) -> Loaded:
        """The model quantised, with its texts; computed once."""
        config, weights = read_model(self.model)
        if config.quantisation is not None:
            raise BadInput("expected dense weights", field="quantization_config", file=self.model)
        forward = ForwardPass(config)
        evaluation = Evaluation.on_held_out(self.model, forward, weights, self.sources, self.window, self.windows)
        first = read_tokenizer(self.model).encode("\n", add_special_tokens=False).ids[-1]
        sampled = self_sampled(forward, weights, first, self.sequences, evaluation.tokens.shape[1], self.seed)
        return Loaded(
            forward, quantise_model(forward, weights, self.method, self.precision, sampled), sampled, evaluation
        )

    def describe(self) -> Document:
        fields = asdict(self) | {"model": str(self.model), "sources": str(self.sources) if self.sources else None}
        return {"schema": SCHEMA, **fields}


@dataclass(frozen=True)
class Loaded:
    """A quantised model with calibration and evaluation text."""

    forward: ForwardPass
    model: QuantisedModel
    sampled: torch.Tensor
    evaluation: Evaluation

    @cached_property
    def sizes(self) -> dict[str, Size]:
        return module_sizes(self.forward.config, self.model.reference)

    def measures(self) -> Document:
        reference = self.evaluation.measure(self.model.reference)
        return {
            "full": reference.summary(),
            "quantised": {**self.evaluation.measure(self.model.weights()).summary(), "bytes": self.model.nbytes},
        }


@dataclass(frozen=True)
class Budget:
    """The budget, half the bytes of compensators of `full_rank` on all modules, and the rule of their placement."""

    full_rank: int = 8
    rule: Rule = DEFAULT_RULE
    tables: Path | None = None


def quantise(job: Job, directory: Path) -> Document:
    loaded = job.loaded
    write_quantised(directory, loaded.forward.config, loaded.model)
    return _written(job, directory, loaded.measures())


def diagnose(job: Job, budget: Budget) -> Document:
    """The damage of every module, and the placement that follows: `damage`, `modules`, `rank`, `entropy`."""
    damages, placement = _placed(job.loaded, budget)
    return {**job.describe(), **job.loaded.measures(), "damage": damages, **_placement(job.loaded, placement)}


def compensate(
    job: Job,
    directory: Path,
    budget: Budget,
    where: Where,
    settings: CalibrationSettings,
    advance: Callable[[str], None] = lambda text: None,
) -> Document:
    """Quantise a model, train compensators (on Algorithm 1's modules or all), and write a directory to be loaded."""
    loaded = job.loaded
    write_quantised(directory, loaded.forward.config, loaded.model)
    damages, placement = _placed(loaded, budget)
    if where == "all":
        placement = replace(placement, modules=tuple(loaded.sizes), rank=budget.full_rank)
    text = calibration_text(loaded.forward, loaded.model.reference, loaded.sampled)
    calibrated = calibrate(
        loaded.forward, loaded.model, placement.modules, placement.rank, text, settings, seed=job.seed, advance=advance
    )
    write_compensators(directory, calibrated.stored(), placement.rank)
    measure = loaded.evaluation.measure
    compensated, quantised = measure(calibrated.stored_weights()), measure(loaded.model.weights())
    measures = loaded.measures()
    full = measures["full"]["perplexity"]
    document = measures | {
        "compensated": compensated.summary(),
        "recovered": recovered(full, quantised.perplexity, compensated.perplexity),
        "quartiles": by_quartile(quantised, compensated),
        "damage": damages,
        **_placement(loaded, placement),
        "settings": asdict(settings),
        "losses": calibrated.losses,
    }
    return _written(job, directory, document)


def settings_of(factors: int, gate: int, batch_size: int = 4) -> CalibrationSettings:
    """The two phases with given numbers of steps."""
    return CalibrationSettings(
        TrainingSettings(steps=factors, batch_size=batch_size, learning_rate=2e-3),
        TrainingSettings(steps=gate, batch_size=batch_size, learning_rate=1e-2),
    )


def _placed(loaded: Loaded, budget: Budget) -> tuple[dict[str, float], Placement]:
    damages = damage(loaded.forward, loaded.model, loaded.sampled)
    limit = total_bytes(loaded.sizes.values(), budget.full_rank) // 2
    placement = select(damages, deployment_costs(damages, budget.tables), loaded.sizes, limit, budget.rule)
    if affordable_rank([loaded.sizes[name] for name in placement.modules], limit) == 0:
        raise BadInput("expected more: no compensator fits the budget", field="full_rank", value=budget.full_rank)
    return damages, placement


def _placement(loaded: Loaded, placement: Placement) -> Document:
    config, model = loaded.forward.config, loaded.model
    size = total_bytes([loaded.sizes[name] for name in placement.modules], placement.rank)
    layers = config.shape.layers
    return {
        "modules": list(placement.modules),
        "rank": placement.rank,
        "entropy": placement.entropy,
        "bytes": size,
        "share": size / model.nbytes,
        "share_llama_2_7b": share_of(LLAMA_2_7B, placement.modules, layers, placement.rank, model.precision.bits),
    }


def _written(job: Job, directory: Path, document: Document) -> Document:
    copy_text_files(job.model, directory)
    document = job.describe() | document
    write_text(directory / RECORD, json.dumps(document, indent=1) + "\n")
    return document
