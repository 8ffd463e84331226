"""The instances of a bundle: their cards, the memory of these, and the source of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.deployment.models import Model, load_model
from latency_models.deployment.roofline import Deployment, cards_of_ffn_instance, footprint, read_deployment
from scenarios.afd import InstancesSpec, RooflineSpec, Topology
from workloads.errors import BadInput

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
