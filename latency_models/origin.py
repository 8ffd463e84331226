"""The device, engine and model of imported kernel timings, which flags complete and scenarios are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.deployment.models import Model

FLAGS = {"gpu": "--gpu", "engine": "--engine", "engine_version": "--engine-version", "model": "--model"}
"""Flags of `twin calibrate import` for fields that the source does not state."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The device, engine and model that were measured, and ranks that share a layer. "" or None: not known."""

    gpu: str = ""
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    tensor_parallel: int | None = None

    def completed(self, stated: Origin) -> Origin:
        """This origin, with unknown fields from `stated`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in asdict(stated).items():
            if values[name] and value and plain_name(str(values[name])) != plain_name(str(value)):
                flag = "--" + name.replace("_", "-")
                raise BadInput(f"expected {values[name]}, as the tables say", field=flag, value=value)
            values[name] = values[name] or value
        return replace(self, **values)

    @property
    def unknown(self) -> list[str]:
        """Notes on unknown fields, each with the flag that sets it."""
        return [
            f"the tables do not say their {name.replace('_', ' ')}; {flag} records it"
            for name, flag in FLAGS.items()
            if not getattr(self, name)
        ]

    def document(self) -> dict[str, Any]:
        """The fields that are known, as plain values."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Origin:
        """The origin that `document` wrote."""
        return cls(**document)


@dataclass(frozen=True, slots=True)
class MeasuredDeployment:
    """The deployment that step times are for; None where a field is not known.

    `model`: None where times are sums over its layers already. `notes`: on how the timings were completed. `measured`:
    False for computed times, of which `origin` says nothing. `memory`, `weights`: bytes of one device.
    """

    origin: Origin
    model: Model | None = None
    ranks: int | None = None
    notes: tuple[str, ...] = ()
    measured: bool = True
    device: str = ""
    devices: int | None = None
    memory: float | None = None
    weights: float | None = None


def plain_name(text: str) -> str:
    """A name without its owner, case and punctuation: meta-llama/Llama-3.1-8B is llama318b."""
    return "".join(character for character in text.rsplit("/", 1)[-1].lower() if character.isalnum())


def same_model(first: str, second: str) -> bool:
    """True if two names may be of one model: one is the other with a word more (Llama-2-70b-hf), or empty."""
    first, second = plain_name(first), plain_name(second)
    return first.startswith(second) or second.startswith(first)
