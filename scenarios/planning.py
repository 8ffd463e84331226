"""The `plan` section of a serving scenario: what may vary, the goals, limits and prices."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from latency_models.io.config_io import Strict
from latency_models.io.files import NameOrFile
from scenarios.afd import ratio_text
from scenarios.engine import DeviceSpec, LinkSpec, Role, RouterName
from scenarios.fields import Engines, Goal, Microbatches, Name, read_goals
from workloads.errors import BadInput

Layout = Literal["colocated", "disaggregated", "afd"]
Sharing = Literal["isolated", "shared"]
TOGETHER: Layout = "colocated"
ISOLATED: Sharing = "isolated"
ROLES: tuple[Role, ...] = ("both", "prefill", "decode")
Objective = Literal["gpus", "cost_per_hour", "cost_per_million_tokens", "throughput"]


class EngineKindSpec(Strict):
    """One kind of engine that a plan may use; fields that are left out are the scenario's. `both`: a colocated pool."""

    name: Name
    device: DeviceSpec
    engine: dict[str, Any] = Field(default_factory=dict)
    step_time: dict[str, Any] | None = None
    roles: list[Role] = Field(default_factory=lambda: list(ROLES), min_length=1)

    @property
    def is_bundle(self) -> bool:
        """True for an AFD bundle, which decodes."""
        return (self.step_time or {}).get("source") == "afd_bundle"


class BundleSpec(Strict):
    """AFD bundles that a plan may use as decode engines, one kind for each ratio and size of FFN instances."""

    model: NameOrFile
    hardware: NameOrFile
    ratios: Annotated[str, BeforeValidator(ratio_text)] = "1,2,4,8"
    ffn_gpus: Annotated[list[PositiveInt], Field(min_length=1)] | None = None
    microbatches: Microbatches = 2
    weights: Literal["bf16", "fp8"] | None = None
    cache: Literal["bf16", "fp8"] = "bf16"
    link: Literal["intra_node", "inter_node"] | None = None
    device: str | None = None
    price_per_hour: NonNegativeFloat | None = None


class PlanLimits(Strict):
    """The most devices, the highest price per hour and power of a deployment; the most engines of one pool.

    Attributes:
        kw: of all devices at their power limits, kilowatts.
    """

    gpus: PositiveInt | None = None
    kw: PositiveFloat | None = None
    cost_per_hour: PositiveFloat | None = None
    engines: Engines | None = None


class ApiPrice(Strict):
    """The price of an API for a million tokens of prompts, and of answers."""

    input: NonNegativeFloat
    output: NonNegativeFloat


class PlanSpec(Strict):
    """The choices that `twin plan` has, and the goals that it must reach; docs/reference/serving-scenario.md has every
    field.
    """

    goals: Annotated[dict[str, float | str], Field(min_length=1)]
    objective: Objective | None = None
    engines: Annotated[list[EngineKindSpec], Field(max_length=1000)] = Field(default_factory=list)
    bundles: Annotated[list[BundleSpec], Field(max_length=100)] = Field(default_factory=list)
    layouts: list[Layout] = Field(default_factory=lambda: [TOGETHER], min_length=1)
    decode: list[Sharing] = Field(default_factory=lambda: [ISOLATED], min_length=1)
    link: LinkSpec | None = None
    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    routing: list[RouterName] = Field(default_factory=lambda: ["least_loaded"], min_length=1)
    limits: PlanLimits = Field(default_factory=PlanLimits)
    prices: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    commitments: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(default_factory=dict)
    api: ApiPrice | None = None
    node_size: PositiveInt | None = None
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    reliability: float = Field(default=0.95, gt=0.5, lt=1)
    span: PositiveFloat = 3600.0
    window: PositiveInt | None = None
    replications: int = Field(default=20, ge=4, le=1000)

    @field_validator("goals")
    @classmethod
    def _known_goals(cls, goals: dict[str, float | str]) -> dict[str, float | str]:
        read_goals(goals)
        return goals

    @model_validator(mode="after")
    def _agrees(self) -> PlanSpec:
        apart = next((layout for layout in self.layouts if layout != TOGETHER), None)
        if apart is not None and self.link is None:
            expected = f"expected a link from prefill to decode engines, since layouts has {apart}"
            raise BadInput(expected, field="link")
        bundles = bool(self.bundles) or any(kind.is_bundle for kind in self.engines)
        if ("afd" in self.layouts) != bundles:
            expected = "expected some, since layouts has afd" if not bundles else "expected none, or afd in layouts"
            raise BadInput(expected, field="bundles")
        names = [kind.name for kind in self.engines]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise BadInput("expected a name that no other kind has", field=f"engines[{i}].name", value=name)
        if self.objective == "throughput" and self.limits.gpus is None and self.limits.cost_per_hour is None:
            raise BadInput("expected limits.gpus or limits.cost_per_hour, for objective throughput", field="limits")
        if self.limits.kw is not None and (kind := next((k for k in self.engines if not k.device.power_limit), None)):
            expected = f"expected the power limit of a {kind.device.type}, since limits has kw"
            raise BadInput(expected, field=f"engines.{kind.name}.device.power_limit")
        wants_prices = (self.objective or "").startswith("cost") or self.limits.cost_per_hour is not None
        missing = [kind.device.type for kind in self.engines if self.price(kind.device) is None]
        if wants_prices and missing:
            raise BadInput(f"expected a price per hour of {missing[0]}", field="prices")
        return self

    def price(self, device: DeviceSpec) -> float | None:
        """The price of one device per hour; None where it is not known."""
        return self.prices.get(device.type) if device.price_per_hour is None else device.price_per_hour

    @property
    def aim(self) -> Objective:
        if self.objective is not None:
            return self.objective
        return "cost_per_hour" if all(self.price(kind.device) is not None for kind in self.engines) else "gpus"

    @property
    def wanted(self) -> list[Goal]:
        return read_goals(self.goals)
