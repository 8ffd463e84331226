"""Devices and their data sheets, and the roofline of an AFD bundle on them.

α and β from a hardware and a model file (AFD appendix B), for one transformer layer, in seconds.

Slopes are the paper's: eq. 26 for attention, eq. 33 for the FFN, eq. 38 for communication. (Its eq. 36 drops the factor
N_expert/card between its two right-hand sides; eq. 38 has it again, and is what is computed here.) The paper
leaves intercepts to measurement. Here they are floors: the time to read the weights that every batch needs, plus a
fixed overhead that the deployment states. For a mixture of experts the layer described is a MoE layer, and every
layer is counted as one.

A line α·x + β charges compute and weight reading one after the other, where hardware overlaps them: near the knee it is
up to twice too slow. Measure when you can.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from latency_models.calibration import SIZES, Calibration, Component, Line, Provenance
from latency_models.deployment.layers import ExpertLoad
from latency_models.deployment.models import ExpertFFN, Model
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import find_data
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


class Overhead(Strict):
    """Fixed seconds of a layer: of kernel launches none by default; 10 µs a round trip is in the usual range."""

    attention: NonNegativeFloat = 0.0
    ffn: NonNegativeFloat = 0.0
    communication: NonNegativeFloat = 1e-5


class Deployment(Strict):
    """The placement of the model on the hardware; docs/reference/scenario-file.md describes every field."""

    ffn_cards: PositiveInt = 1
    experts_per_card: PositiveInt | None = None
    precision: Precision = "bf16"
    kv_bytes: PositiveFloat = 2.0
    activation_bytes: PositiveFloat = 3.0
    mtp_depth: NonNegativeInt | None = None
    link: Literal["intra_node", "inter_node"] = "inter_node"
    shared_experts: bool = False
    overhead: Overhead = Field(default_factory=Overhead)
    expert_load: ExpertLoad | None = None
    memory_efficiency: Share | None = None
    compute_efficiency: Share | None = None
    network_efficiency: Share | None = None


def read_deployment(section: dict[str, Any], field: str) -> Deployment:
    """A deployment from a section of a file, `field`."""
    return checked(Deployment, section, None, field)


def derive(hardware: Hardware, model: Model, deployment: Deployment, section: str = "") -> Calibration:
    """The calibration that the specifications imply; `section`: its dotted field in a file, for errors."""
    model.check_layers_alike()
    try:
        hardware.flops(deployment.precision)
        _check_experts(model, deployment)
    except BadInput as error:
        field = f"{section}.{error.field}" if section else error.field
        raise BadInput(error.expected, value=error.value, field=field) from None
    bandwidth = hardware.memory_bandwidth * (deployment.memory_efficiency or hardware.efficiency.memory)  # eq. 25
    weight_seconds = WEIGHT_BYTES[deployment.precision] / bandwidth
    projections, resident = model.attention.projection_weights(model.hidden_size), _resident_weights(model, deployment)
    slope_attention = model.kv_bytes(deployment.kv_bytes) / bandwidth  # eq. 26
    overhead = deployment.overhead
    return Calibration(
        schema="twin.calibration/1",
        name=f"{model.name}-{hardware.name}-roofline",
        time_unit="seconds",
        scope="layer",
        layers=model.layers,
        attention=_line("attention", slope_attention, projections * weight_seconds + overhead.attention),
        ffn=_line("ffn", _ffn_slope(hardware, model, deployment), resident * weight_seconds + overhead.ffn),
        communication=_line("communication", _communication_slope(hardware, model, deployment), overhead.communication),
        provenance=Provenance(
            method="roofline",
            source=f"AFD appendix B, eq. 24-38, from the hardware file {hardware.name} and the model file {model.name}",
            device=hardware.device,
            model=model.name,
            note="Derived, not measured; intercepts are weight-reading floors. "
            f"Deployment: {deployment.model_dump_json(exclude_none=True)}",
        ),
    )


def cards_of_ffn_instance(model: Model, deployment: Deployment) -> int:
    """Cards of one FFN instance; where only `experts_per_card` is given, as many as hold every expert once."""
    per_card = deployment.experts_per_card
    if isinstance(model.ffn, ExpertFFN) and per_card is not None and "ffn_cards" not in deployment.model_fields_set:
        return -(-model.ffn.experts // per_card)
    return deployment.ffn_cards


def _check_experts(model: Model, deployment: Deployment) -> None:
    """Refuse impossible numbers of experts on a card, and fields that would be ignored silently."""
    ffn, per_card = model.ffn, deployment.experts_per_card
    if not isinstance(ffn, ExpertFFN):
        reason = f"since {model.name} has no experts"
        if per_card is not None:
            raise BadInput(f"expected none, {reason}", field="experts_per_card", value=per_card)
        if deployment.shared_experts:
            raise BadInput(f"expected false, {reason}", field="shared_experts", value=True)
        if deployment.expert_load is not None:
            value = deployment.expert_load.popularity
            raise BadInput(f"expected none, {reason}", field="expert_load", value=value)
        return
    if per_card is None:
        return
    if per_card > ffn.experts:
        expected = f"expected at most the experts there are ({ffn.experts})"
        raise BadInput(expected, field="experts_per_card", value=per_card)
    cards = deployment.ffn_cards
    if "ffn_cards" in deployment.model_fields_set and per_card * cards < ffn.experts:
        expected = f"expected at least {-(-ffn.experts // cards)}, since {cards} cards hold {ffn.experts} experts"
        raise BadInput(expected, field="experts_per_card", value=per_card)


def _line(component: Component, alpha: float, beta: float) -> Line:
    return Line(alpha=alpha, beta=beta, alpha_unit=f"seconds/{SIZES[component][0]}", beta_unit="seconds")


def _rows_per_request(model: Model, deployment: Deployment) -> int:
    """Tokens that one request sends through the FFN in one step: itself and its drafts, 1 + MTP depth."""
    return 1 + (model.mtp_depth if deployment.mtp_depth is None else deployment.mtp_depth)


def experts_on_card(ffn: ExpertFFN, deployment: Deployment) -> int:
    """Routed experts on one FFN card, N_expert/card."""
    return deployment.experts_per_card or -(-ffn.experts // deployment.ffn_cards)


def _card_rows(ffn: ExpertFFN, model: Model, deployment: Deployment) -> float:
    """N_expert/card · k (1 + MTP depth) / N_expert: rows on one card (the fullest) for each request (eq. 31, 33)."""
    rows = ffn.experts_per_token * _rows_per_request(model, deployment)
    load, cards = deployment.expert_load, cards_of_ffn_instance(model, deployment)
    fullest = load.fullest(ffn.experts, cards) * load.slowdown if load else 1.0
    return experts_on_card(ffn, deployment) * rows / ffn.experts * fullest


def _ffn_slope(hardware: Hardware, model: Model, deployment: Deployment) -> float:
    """Eq. 33; for a dense FFN its 6·H·I FLOPs a row, split over the cards."""
    rate = hardware.flops(deployment.precision) * (deployment.compute_efficiency or hardware.efficiency.compute)
    ffn, split = model.ffn, _rows_per_request(model, deployment) / deployment.ffn_cards
    if isinstance(ffn, ExpertFFN):
        rows = _card_rows(ffn, model, deployment) + (ffn.shared_experts * split if deployment.shared_experts else 0)
    else:
        rows = split
    return ffn.row_flops(model.hidden_size) * rows / rate


def _resident_weights(model: Model, deployment: Deployment) -> float:
    """FFN weights of one layer on one card, all of which a large enough batch reads each step."""
    ffn, hidden = model.ffn, model.hidden_size
    if not isinstance(ffn, ExpertFFN):
        return ffn.weights(hidden) / deployment.ffn_cards
    shared = ffn.shared_weights(hidden) if deployment.shared_experts else 0
    return experts_on_card(ffn, deployment) * ffn.expert_weights(hidden) + shared


def _communication_slope(hardware: Hardware, model: Model, deployment: Deployment) -> float:
    """Eq. 38; for a dense FFN each row crosses to every card, as tensor parallelism has it."""
    bandwidth: float = getattr(hardware.network, deployment.link)
    bandwidth *= deployment.network_efficiency or hardware.efficiency.network
    ffn = model.ffn
    rows = _card_rows(ffn, model, deployment) if isinstance(ffn, ExpertFFN) else _rows_per_request(model, deployment)
    return deployment.activation_bytes * model.hidden_size * rows / bandwidth


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one attention card and on one FFN card; KV bytes of one token over all layers."""

    attention_weights: float
    ffn_weights: float
    kv_bytes_per_token: float


def footprint(model: Model, deployment: Deployment) -> Footprint:
    """The bytes that `deployment` puts on each card, with one card an attention instance."""
    hidden, ffn, cards = model.hidden_size, model.ffn, cards_of_ffn_instance(model, deployment)
    if isinstance(ffn, ExpertFFN):
        shared = ffn.shared_weights(hidden) if deployment.shared_experts else 0
        dense = ffn.dense_layers * ffn.dense_weights(hidden)
        resident = experts_on_card(ffn, deployment) * ffn.expert_weights(hidden) + shared
        on_attention = model.parameters - model.routed_weights - model.expert_layers * shared - dense
        on_ffn = model.expert_layers * resident + dense / cards
    else:
        dense = model.layers_with_ffn * ffn.weights(hidden)
        on_attention, on_ffn = model.parameters - dense, dense / cards
    weight = WEIGHT_BYTES[deployment.precision]
    return Footprint(on_attention * weight, on_ffn * weight, model.kv_bytes_per_token(deployment.kv_bytes))
