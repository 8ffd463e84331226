"""Hardware files: a device's peak rates, and the assumed share of them that is reached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt

from latency_models.io.builtin_files import find_data
from latency_models.io.config_io import Strict, checked, read_yaml
from workloads.errors import BadInput

Precision: TypeAlias = Literal["bf16", "fp8", "int8", "fp4"]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]

WEIGHT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
"""Bytes of one weight, by precision. Scales of quantised weights are not counted."""


class Network(Strict):
    """Bandwidth of one device in one direction, bytes/s."""

    intra_node: PositiveFloat
    inter_node: PositiveFloat


class Efficiency(Strict):
    """Reached shares of the peak rates (η of eq. 25 and 28, and the network's), assumed in built-in files."""

    memory: Share
    compute: Share
    network: Share


class Hardware(Strict):
    """One device. FLOP/s are dense (no structured sparsity), bandwidths bytes/s, capacity bytes, power limit watts."""

    schema_: Literal["twin.hardware/1"] = Field(alias="schema")
    name: Annotated[str, Field(min_length=1)]
    device: str
    peak_flops: Annotated[dict[Precision, PositiveFloat], Field(min_length=1)]
    memory_bandwidth: PositiveFloat
    memory_capacity: PositiveFloat
    power_limit: PositiveFloat | None = None
    devices_per_node: PositiveInt = 8
    network: Network
    efficiency: Efficiency
    source: str

    def flops(self, precision: Precision) -> float:
        """Peak FLOP/s."""
        if precision not in self.peak_flops:
            raise BadInput(
                f"expected one that {self.name} has: {', '.join(self.peak_flops)}", field="precision", value=precision
            )
        return self.peak_flops[precision]


def load_hardware(name: str | Path, base: Path = Path()) -> Hardware:
    """Load a built-in hardware file by name, or a file by path; relative paths start from `base`."""
    path = find_data("hardware", name, base)
    return checked(Hardware, read_yaml(path), path)
