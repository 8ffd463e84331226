"""Hardware files: what a device can do at its peak, and which share of it is assumed to be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, ValidationError

from latency_models.calibration import find_data
from latency_models.strict import Strict, explain_validation, read_yaml
from workloads.errors import BadInput

Precision = Literal["bf16", "fp8", "int8", "fp4"]
WEIGHT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5}
Share = Annotated[float, Field(gt=0, le=1)]


class Network(Strict):
    """Bandwidth of one device in one direction, bytes/s."""

    intra_node: PositiveFloat
    inter_node: PositiveFloat


class Efficiency(Strict):
    """The shares of peak that are reached: η_mem of eq. 25, η_compute of eq. 28, and the same for the network."""

    memory: Share
    compute: Share
    network: Share


class Hardware(Strict):
    """One device. FLOP/s are dense, bandwidths bytes/s, capacity bytes."""

    schema_: Literal["twin.hardware/1"] = Field(alias="schema")
    name: str
    device: str
    peak_flops: dict[Precision, PositiveFloat]
    memory_bandwidth: PositiveFloat
    memory_capacity: PositiveFloat
    network: Network
    efficiency: Efficiency
    source: str

    def flops(self, precision: Precision) -> float:
        """Peak FLOP/s.

        Raises:
            BadInput: the device does not compute in that precision.
        """
        if precision not in self.peak_flops:
            raise BadInput(
                f"expected one that {self.name} has: {', '.join(self.peak_flops)}", field="precision", value=precision
            )
        return self.peak_flops[precision]


def load_hardware(name: str, base: Path = Path()) -> Hardware:
    """A built-in hardware file by its name, or a file; relative paths start from `base`.

    Raises:
        BadInput: neither, or a file that breaks the schema.
    """
    path = find_data("hardware", name, base)
    try:
        return Hardware.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain_validation(error, path, Hardware) from None
