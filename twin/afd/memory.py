"""The cards of a bundle's instances and their memory, and whether its KV cache and weights fit in it.

An attention instance holds the KV cache of m microbatches of B requests. Its number of tokens varies from step to step;
the 99.9 % quantile of the stationary load with every slot full has to fit. Fragments of half-filled
blocks and activations are not counted: they share what `gpu_memory_utilization` leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from latency_models.deployment.hardware import (
    Deployment,
    Hardware,
    cards_of_ffn_instance,
    footprint,
    load_hardware,
    read_deployment,
)
from latency_models.deployment.models import Model, load_model
from scenarios.afd import InstancesSpec, RooflineSpec, Topology
from twin.theory.cycle import load_quantile
from workloads.errors import BadInput
from workloads.pairs import LengthPairs

DEPLOYMENT = "calibration.deployment"


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model on hardware, of a scenario with a derived calibration."""

    hardware: Hardware
    model: Model
    deployment: Deployment


@dataclass(frozen=True, slots=True)
class Cards:
    """Devices of one attention and one FFN instance, from the `deployment`, the `scenario`, or `assumed` to be one."""

    attention: int
    ffn: int
    source: Literal["deployment", "scenario", "assumed"]

    def of(self, topology: Topology) -> int:
        """Cards of a whole bundle."""
        return topology.attention_instances * self.attention + topology.ffn_instances * self.ffn


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Memory of a card, the share of it in use, and the bytes that a deployment puts on one."""

    capacity: float
    utilization: float
    kv_bytes_per_token: float
    attention_weights: float
    ffn_weights: float

    @property
    def limit(self) -> float:
        """Bytes that weights and KV cache may take."""
        return self.capacity * self.utilization


def load_deployed(spec: RooflineSpec, base: Path) -> Deployed:
    """Load the files that a derived calibration names; relative paths start from `base`."""
    deployment = read_deployment(spec.deployment, DEPLOYMENT)
    return Deployed(load_hardware(spec.hardware, base), load_model(spec.model, base), deployment)


def instance_cards(spec: InstancesSpec, deployed: Deployed | None) -> Cards:
    """Cards of the instances, from the deployment or else from the scenario."""
    if deployed is None:
        is_stated = spec.attention_cards is not None or spec.ffn_cards is not None
        return Cards(spec.attention_cards or 1, spec.ffn_cards or 1, "scenario" if is_stated else "assumed")
    expected = f"expected none: a derived calibration has one card an attention instance and {DEPLOYMENT}.ffn_cards"
    _refuse_fields(spec, ("attention_cards", "ffn_cards"), f"{expected} an FFN instance")
    return Cards(1, cards_of_ffn_instance(deployed.model, deployed.deployment), "deployment")


def card_memory(spec: InstancesSpec, deployed: Deployed | None) -> CardMemory | None:
    """Memory of the cards, from the deployment or else from the scenario; None where neither says."""
    byte_fields = ("kv_bytes_per_token", "attention_weights", "ffn_weights")
    if deployed is not None:
        _refuse_fields(spec, byte_fields, "expected none: a derived calibration has it from its model and deployment")
        sizes = footprint(deployed.model, deployed.deployment)
        capacity = spec.memory or deployed.hardware.memory_capacity
        weights = sizes.attention_weights, sizes.ffn_weights
        return CardMemory(capacity, spec.gpu_memory_utilization, sizes.kv_bytes_per_token, *weights)
    if spec.memory is None:
        _refuse_fields(
            spec, (*byte_fields, "gpu_memory_utilization"), "expected instances.memory beside it, the bytes of a card"
        )
        return None
    if spec.kv_bytes_per_token is None:
        expected = "expected instances.kv_bytes_per_token beside it, the KV bytes of a token over all layers"
        raise BadInput(expected, field="instances.memory", value=spec.memory)
    weights = spec.attention_weights or 0.0, spec.ffn_weights or 0.0
    return CardMemory(spec.memory, spec.gpu_memory_utilization, spec.kv_bytes_per_token, *weights)


def _refuse_fields(spec: InstancesSpec, names: Sequence[str], expected: str) -> None:
    for name, value in spec.model_dump(include=set(names) & spec.model_fields_set, exclude_none=True).items():
        raise BadInput(expected, field=f"instances.{name}", value=value)


LEVEL = 0.999


@dataclass(frozen=True)
class MemoryCheck:
    """One configuration's memory, with every slot full. Bytes are of one card.

    `in_step`: all slots start together, which matters when every answer is equally long. Without `closed_loop` these
    are bounds, and a point is judged by its simulation.
    """

    memory: CardMemory
    cards: Cards
    lengths: LengthPairs
    batch_size: int
    microbatches: int
    in_step: bool
    closed_loop: bool

    def attention_bytes(self, tokens: float) -> float:
        """Weights and the KV cache of `tokens` tokens of one instance, on one of its cards."""
        return self.memory.attention_weights + self.kv_bytes(tokens)

    def kv_bytes(self, tokens: float) -> float:
        """KV cache of `tokens` tokens of one instance, on one of its cards."""
        return tokens * self.memory.kv_bytes_per_token / self.cards.attention

    def high_tokens(self, batch_size: int) -> float:
        """Tokens of one instance at `LEVEL` of its load, at a given B."""
        return load_quantile(self.lengths, self.microbatches * batch_size, LEVEL, in_step=self.in_step)

    @cached_property
    def mean_tokens(self) -> float:
        """Mean tokens of one instance in the steady state."""
        return self.lengths.renewal_load() * self.microbatches * self.batch_size

    @cached_property
    def tokens(self) -> float:
        """Tokens that have to fit: those of `LEVEL` at this configuration's B."""
        return self.high_tokens(self.batch_size)

    @property
    def ffn_fits(self) -> bool:
        """True if the FFN weights fit on the cards of an FFN instance."""
        return self.memory.ffn_weights <= self.memory.limit

    @property
    def attention_fits(self) -> bool:
        """True if weights and KV cache fit on the cards of an attention instance."""
        return self.attention_bytes(self.tokens) <= self.memory.limit

    @property
    def fits(self) -> bool:
        """True if both kinds of instances fit."""
        return self.attention_fits and self.ffn_fits

    @cached_property
    def largest_batch_size(self) -> int:
        """The largest B whose KV cache fits beside the attention weights; 0 if none does."""
        free = (self.memory.limit - self.memory.attention_weights) * self.cards.attention
        tokens = free / self.memory.kv_bytes_per_token
        too_many = int(tokens / (self.microbatches * self.lengths.renewal_load())) + 2
        return bisect_left(range(1, max(too_many, 1)), True, key=lambda size: self.high_tokens(size) > tokens)

    def shortage(self) -> str | None:
        """A sentence on what does not fit; None if everything does."""
        memory = self.memory
        limit = f"{_gb(memory.limit)} ({memory.utilization:g} of {_gb(memory.capacity)})"
        if not self.ffn_fits:
            cards = f"each of {self.cards.ffn} FFN cards" if self.cards.ffn > 1 else "the FFN card"
            return f"FFN weights take {_gb(memory.ffn_weights)} on {cards}, the limit is {limit}"
        if self.attention_fits:
            return None
        requests = f"{self.microbatches} x {self.batch_size} requests"
        parts = f"KV cache at the {100 * LEVEL:g} % quantile {_gb(self.kv_bytes(self.tokens))}, "
        parts += f"weights {_gb(memory.attention_weights)}"
        size = _gb(self.attention_bytes(self.tokens))
        return f"{requests} take {size} on an attention card ({parts}), the limit is {limit}"

    def refusal(self) -> BadInput | None:
        """The error if the bundle cannot run at any ratio; with open arrivals if not even one request a slot can."""
        shortage = self.shortage()
        if shortage is None:
            return None
        if not self.ffn_fits:
            deployed = self.cards.source == "deployment"
            field = "calibration.deployment.ffn_cards" if deployed else "instances.ffn_cards"
            return BadInput(f"expected more cards: {shortage}", field=field, value=self.cards.ffn)
        largest = self.largest_batch_size
        if not self.closed_loop and largest:
            return None
        expected = f"expected at most {largest}" if largest else "expected cards with more memory"
        return BadInput(f"{expected}: {shortage}", field="batch_size", value=self.batch_size)

    def describe(self) -> dict[str, Any]:
        """The configuration's `memory` in the document `twin.sweep/1`."""
        memory = self.memory
        attention = self.attention_bytes(self.tokens)
        return {
            "capacity": memory.capacity,
            "gpu_memory_utilization": memory.utilization,
            "limit": memory.limit,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "kv_tokens_mean": self.mean_tokens,
            "kv_tokens_p999": self.tokens,
            "attention_weights": memory.attention_weights,
            "attention_mean": self.attention_bytes(self.mean_tokens),
            "attention_p999": attention,
            "attention_share": attention / memory.capacity,
            "ffn_weights": memory.ffn_weights,
            "ffn_share": memory.ffn_weights / memory.capacity,
            "largest_batch_size": self.largest_batch_size,
            "fits": self.fits,
            "shortage": self.shortage(),
        }


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.4g} GB"
