"""α and β from a hardware and a model file (AFD appendix B), for one transformer layer, in seconds.

Slopes are the paper's: eq. 26 for attention, eq. 33 for the FFN, eq. 38 for communication. (Its eq. 36 drops the factor
N_expert/card between its two right-hand sides; eq. 38 has it again, and is what is computed here.) Intercepts the paper
leaves to measurement; here they are floors: the time to read the weights that are needed whatever the batch, plus a
fixed overhead that the deployment states. For a mixture of experts the layer described is a MoE layer, and every
layer is counted as one.

A line α·x + β charges compute and weight reading one after the other, where hardware overlaps them: near the knee it is
up to twice too slow. Measure when you can.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from latency_models.calibration import Calibration, Line, Provenance
from latency_models.hardware import WEIGHT_BYTES, Hardware, Precision, Share
from latency_models.models import ExpertFFN, Model
from latency_models.strict import Strict, explain_validation


class Overhead(Strict):
    """Fixed seconds of a layer's attention, FFN and round trip. 10 µs a round trip is a common point-to-point
    latency."""

    attention: NonNegativeFloat = 0.0
    ffn: NonNegativeFloat = 0.0
    communication: NonNegativeFloat = 1e-5


class Deployment(Strict):
    """How the model lies on the hardware.

    Attributes:
        ffn_cards: N_cards, devices of one FFN instance.
        experts_per_card: N_expert/card; default: the experts divided evenly, rounded up.
        precision: of weights and FFN compute.
        kv_bytes: bytes of one KV cache element.
        activation_bytes: bytes of one activation element to the FFN and back (eq. 34: 1 + 2).
        mtp_depth: tokens drafted beside each one; default: the model's.
        link: which network the activations cross.
        shared_experts: whether α_F counts the shared experts' FLOPs too; eq. 33 does not.
        memory_efficiency, compute_efficiency, network_efficiency: in place of the hardware file's.
    """

    ffn_cards: PositiveInt = 1
    experts_per_card: PositiveInt | None = None
    precision: Precision = "bf16"
    kv_bytes: PositiveFloat = 2.0
    activation_bytes: PositiveFloat = 3.0
    mtp_depth: int | None = Field(default=None, ge=0)
    link: Literal["intra_node", "inter_node"] = "inter_node"
    shared_experts: bool = False
    overhead: Overhead = Overhead()
    memory_efficiency: Share | None = None
    compute_efficiency: Share | None = None
    network_efficiency: Share | None = None


def read_deployment(section: dict[str, Any], field: str) -> Deployment:
    """A deployment from a section of a file, `field`.

    Raises:
        BadInput: a field that is unknown or out of range.
    """
    try:
        return Deployment.model_validate(section)
    except ValidationError as error:
        fault = explain_validation(error, None, Deployment)
        fault.args = (f"{field}.{fault.args[0]}",)
        raise fault from None


def derive(hardware: Hardware, model: Model, deployment: Deployment) -> Calibration:
    """The calibration that the specifications imply.

    Raises:
        BadInput: a precision that the hardware does not have.
    """
    bandwidth = hardware.memory_bandwidth * (deployment.memory_efficiency or hardware.efficiency.memory)
    overhead = deployment.overhead
    projections = model.attention.projection_weights(model.hidden_size) * WEIGHT_BYTES[deployment.precision]
    attention = (model.kv_bytes(deployment.kv_bytes) / bandwidth, projections / bandwidth + overhead.attention)
    resident = _resident_ffn_weights(model, deployment) * WEIGHT_BYTES[deployment.precision]
    ffn = (_ffn_slope(hardware, model, deployment), resident / bandwidth + overhead.ffn)
    communication = (_communication_slope(hardware, model, deployment), overhead.communication)
    return Calibration(
        schema="twin.calibration/1",
        name=f"{model.name}-{hardware.name}-roofline",
        time_unit="seconds",
        scope="layer",
        layers=model.layers,
        attention=_line(attention, "token"),
        ffn=_line(ffn, "request"),
        communication=_line(communication, "request"),
        provenance=Provenance(
            method="roofline",
            source="AFD appendix B, eq. 24-38, with weight-reading floors as intercepts",
            device=hardware.device,
            model=model.name,
            note=f"Derived, not measured. {deployment.model_dump_json(exclude_defaults=True)}",
        ),
    )


def _line(coefficients: tuple[float, float], size: str) -> Line:
    alpha, beta = coefficients
    return Line(alpha=alpha, beta=beta, alpha_unit=f"seconds/{size}", beta_unit="seconds")


def _rows_per_request(model: Model, deployment: Deployment) -> float:
    """Tokens that one request sends through the FFN in one step: itself and its drafts, 1 + MTP depth."""
    return 1 + (model.mtp_depth if deployment.mtp_depth is None else deployment.mtp_depth)


def _expert_share(ffn: ExpertFFN, model: Model, deployment: Deployment) -> float:
    """N_expert/card · k (1 + MTP depth) / N_expert: rows on one card's experts for each request (eq. 31, 33)."""
    per_card = deployment.experts_per_card or -(-ffn.experts // deployment.ffn_cards)
    return per_card * ffn.experts_per_token * _rows_per_request(model, deployment) / ffn.experts


def _ffn_slope(hardware: Hardware, model: Model, deployment: Deployment) -> float:
    """Eq. 33; for a dense FFN its 6·H·I FLOPs a row, split over the cards."""
    rate = hardware.flops(deployment.precision) * (deployment.compute_efficiency or hardware.efficiency.compute)
    ffn, hidden = model.ffn, model.hidden_size
    if not isinstance(ffn, ExpertFFN):
        rows = _rows_per_request(model, deployment)
        return 2 * ffn.weights(hidden) * rows / (rate * deployment.ffn_cards)
    rows = _expert_share(ffn, model, deployment)
    if deployment.shared_experts:
        rows += ffn.shared_experts * _rows_per_request(model, deployment) / deployment.ffn_cards
    return 2 * ffn.expert_weights(hidden) * rows / rate


def _resident_ffn_weights(model: Model, deployment: Deployment) -> float:
    """FFN weights of one layer on one card, all of which a large enough batch reads each step."""
    ffn, hidden = model.ffn, model.hidden_size
    if not isinstance(ffn, ExpertFFN):
        return ffn.weights(hidden) / deployment.ffn_cards
    per_card = deployment.experts_per_card or -(-ffn.experts // deployment.ffn_cards)
    return (per_card + ffn.shared_experts) * ffn.expert_weights(hidden)


def _communication_slope(hardware: Hardware, model: Model, deployment: Deployment) -> float:
    """Eq. 38; for a dense FFN each row crosses once."""
    bandwidth: float = getattr(hardware.network, deployment.link)
    bandwidth *= deployment.network_efficiency or hardware.efficiency.network
    row = deployment.activation_bytes * model.hidden_size
    ffn = model.ffn
    rows = _expert_share(ffn, model, deployment) if isinstance(ffn, ExpertFFN) else _rows_per_request(model, deployment)
    return row * rows / bandwidth
