"""The training loop: AdamW with a linear schedule, deterministic, and resumable from a file.

A batch is a function of its step, so a training that goes on from a saved state computes what an uninterrupted one
computes, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from reports.run_directory import replacing
from workloads.errors import BadInput

SAVE_EVERY = 100
"""Steps between two saved states."""

CURVE_POINTS = 50
"""Points of a stored loss curve, each the mean of its share of the steps."""


@dataclass(frozen=True)
class TrainingSettings:
    """Steps and optimizer (appendix A.1: AdamW, a linear schedule, a warmup ratio of 0.1); `clip`: a step's norm."""

    steps: int
    batch_size: int
    learning_rate: float
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0: up to `learning_rate`, then down to 0 after the last step."""
        ramp = max(round(self.warmup * self.steps), 1)
        if step < ramp:
            return self.learning_rate * (step + 1) / ramp
        return self.learning_rate * (self.steps - step) / (self.steps - ramp)


@dataclass(frozen=True)
class SavedState:
    """A training's state in a file, and all that the training depends on: what it may be resumed by."""

    file: Path
    identity: Mapping[str, object] = field(default_factory=dict)

    def load(self, trained: dict[str, torch.Tensor], optimizer: torch.optim.AdamW) -> list[float]:
        """Fill in the tensors and the optimizer's state; returns the losses so far, none without a file."""
        if not self.file.exists():
            return []
        try:
            with safe_open(self.file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.offset_keys()}
        except (OSError, SafetensorError) as error:
            raise BadInput(f"expected a training's state ({error})", file=self.file) from None
        if metadata.get("identity") != self._identity():
            raise BadInput("expected the state of the same training: remove it to start anew", file=self.file)
        losses: list[float] = json.loads(metadata["losses"])
        with torch.no_grad():
            for name, tensor in trained.items():
                tensor.copy_(tensors[name])
                optimizer.state[tensor] = {
                    "step": torch.tensor(float(len(losses))),
                    "exp_avg": tensors[f"{name}:mean"],
                    "exp_avg_sq": tensors[f"{name}:square"],
                }
        return losses

    def save(self, trained: dict[str, torch.Tensor], optimizer: torch.optim.AdamW, losses: list[float]) -> None:
        """Write the state atomically."""
        tensors = {name: tensor.detach() for name, tensor in trained.items()}
        for name, tensor in trained.items():
            state = optimizer.state[tensor]
            tensors |= {f"{name}:mean": state["exp_avg"], f"{name}:square": state["exp_avg_sq"]}
        with replacing(self.file) as draft:
            save_file(tensors, draft, {"identity": self._identity(), "losses": json.dumps(losses)})

    def _identity(self) -> str:
        return json.dumps(self.identity, sort_keys=True)


def train(
    trained: dict[str, torch.Tensor],
    loss: Callable[[int], torch.Tensor],
    settings: TrainingSettings,
    state: SavedState | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> list[float]:
    """Minimise `loss`, a function of the step, over leaves of autograd's graph, in place; returns every step's loss."""
    parameters = list(trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    losses = state.load(trained, optimizer) if state else []
    for step in range(len(losses), settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(step)
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        losses.append(value.item())
        advance(f"loss {losses[-1]:.3f}")
        if state and (len(losses) % SAVE_EVERY == 0 or len(losses) == settings.steps):
            state.save(trained, optimizer, losses)
    return losses


def curve(losses: list[float]) -> list[float]:
    """A loss curve of at most `CURVE_POINTS` points."""
    chunks = torch.tensor(losses).tensor_split(max(min(CURVE_POINTS, len(losses)), 1))
    return [round(float(chunk.mean()), 5) for chunk in chunks]
