"""Diagnosis of a quantised model, and placement of compensators: SPEAR's Algorithm 1.

The paper leaves three things open, which are chosen here. Its Table 16 shows what the adapted threshold does: with
diffuse damage (Llama-3.2-3B at 4 bits), thresholds of 0.6, 0.7, 0.8 and 0.9 select 30.1, 34.7, 39.8 and 44.9 % of the
modules, so τ / 2 is the share of the modules that are selected, whatever they cover. The noise floor is the round-off
of CKA in float32 states, `NOISE`. Half of the selected modules are protected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.shapes import Shape
from latency_models.sources.ec_tables import LAYER_TYPES, read_layer_tables
from live.adaptation.forward import ForwardPass, final_states
from live.adaptation.quantisers import QuantisedModel
from live.adaptation.weights import module_type

SCALE_BYTES = 4
GATE_BYTES = 2

MEASURED = Path(__file__).parent / "cpu-kernels.ec-tables.yaml"
"""Tables that `twin calibrate run` measured of this project's kernels on a CPU (examples/tiny-llama-cpu)."""

Size = tuple[int, int]
"""(outputs, inputs) of a module."""


def compensator_bytes(size: Size, rank: int, *, gate: bool = True) -> int:
    """Bytes of one compensator; without a gate, of a static term of low rank.

    A, (rank, inputs), and B, (outputs, rank), are INT8 with a float32 scale for each row. The gate's two layers with
    4 · rank hidden units have 8 r² + 5 r values in float16.
    """
    outputs, inputs = size
    factors = rank * (inputs + outputs) + SCALE_BYTES * (rank + outputs)
    return factors + GATE_BYTES * (8 * rank * rank + 5 * rank) * gate


def total_bytes(sizes: Iterable[Size], rank: int, *, gate: bool = True) -> int:
    """Bytes of compensators of one rank on several modules."""
    return sum(compensator_bytes(size, rank, gate=gate) for size in sizes)


def affordable_rank(sizes: Iterable[Size], budget: int, *, gate: bool = True) -> int:
    """The largest rank whose compensators on all the modules fit the budget (Algorithm 1, stage 4); 0 if none does."""
    modules = list(sizes)
    limit = min((min(size) for size in modules), default=0)
    rank = 0
    while rank < limit and total_bytes(modules, rank + 1, gate=gate) <= budget:
        rank += 1
    return rank


LLAMA_2_7B = Shape(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, vocabulary=32000)


def share_of(shape: Shape, modules: Iterable[str], layers: int, rank: int, bits: int) -> float:
    """Bytes of compensators over those of the quantised layers, for the same share of modules on another shape."""
    sizes = shape.linear()
    per_layer = sum(compensator_bytes(sizes[module_type(name)], rank) for name in modules) / layers
    weights = sum(outputs * inputs for outputs, inputs in sizes.values()) * bits / 8
    return per_layer / weights


def deployment_costs(modules: Iterable[str], tables: Path | None = None) -> dict[str, float]:
    """Seconds that a compensator on each module adds to a step of one token (eq. 10); None: by `MEASURED`."""
    latencies = read_layer_tables(MEASURED if tables is None else tables)
    added: dict[str, float] = {kind: latencies.ec[kind][0] - latencies.w4[kind][0] for kind in LAYER_TYPES}
    return {name: added[module_type(name)] for name in modules}


NOISE = 1e-7
"""Damage up to this is taken to be round-off."""

ENTROPY_TRIGGER = 0.9
"""The normalised entropy above which damage is diffuse and the threshold is adapted (Table 7)."""

MIN_SHARE, MAX_SHARE = 0.15, 0.60
"""Shares of the modules, at least and at most (Table 7)."""


@dataclass(frozen=True)
class Rule:
    """τ, the share of the damage that selected modules cover; λ of eq. 10; the share that is chosen by damage alone."""

    threshold: float = 0.8
    cost_weight: float = 0.1
    protected: float = 0.5


DEFAULT_RULE = Rule()


@dataclass(frozen=True)
class Placement:
    """Modules with compensators in order, their rank, H_norm of the damage, and how many were chosen by it alone."""

    modules: tuple[str, ...]
    rank: int
    entropy: float
    protected: int


def normalised_entropy(damage: Mapping[str, float]) -> float:
    """The entropy of the damage's distribution over modules, 1 if it is uniform (eq. 8)."""
    total = sum(damage.values())
    if total <= 0 or len(damage) < 2:
        return 1.0
    shares = [value / total for value in damage.values() if value > 0]
    return -sum(share * math.log(share) for share in shares) / math.log(len(damage))


def support(damage: Mapping[str, float], rule: Rule) -> int:
    """The number of modules to select (eq. 9): the fewest that cover τ of the damage; if diffuse, τ / 2 of them."""
    if normalised_entropy(damage) > ENTROPY_TRIGGER:
        count = round(rule.threshold / 2 * len(damage))
    else:
        total, covered, count = sum(damage.values()), 0.0, 0
        for value in sorted(damage.values(), reverse=True):
            if covered >= rule.threshold * total:
                break
            covered, count = covered + value, count + 1
    fewest = max(math.floor(MIN_SHARE * len(damage)), 1)
    return max(fewest, min(count, math.floor(MAX_SHARE * len(damage))))


def normalised(values: Mapping[str, float]) -> dict[str, float]:
    """Values from 0, the smallest, to 1, the largest; 0 where all are equal."""
    low, high = min(values.values()), max(values.values())
    return {name: (value - low) / (high - low) if high > low else 0.0 for name, value in values.items()}


def select(
    damage: Mapping[str, float], cost: Mapping[str, float], sizes: Mapping[str, Size], budget: int, rule: Rule
) -> Placement:
    """Select modules and their rank by damage δ, seconds of a decode step, (outputs, inputs), and bytes in all."""
    clean = {name: max(value - NOISE, 0.0) for name, value in damage.items()}
    count = support(clean, rule)
    by_damage = sorted(clean, key=lambda name: -clean[name])
    protected = math.ceil(rule.protected * count)
    shares, costs = normalised(clean), normalised(cost)
    by_score = sorted(by_damage[protected:], key=lambda name: -(shares[name] - rule.cost_weight * costs[name]))
    modules = (*by_damage[:protected], *by_score[: count - protected])
    rank = affordable_rank([sizes[name] for name in modules], budget)
    return Placement(modules, rank, normalised_entropy(clean), protected)


def linear_cka(states: torch.Tensor, reference: torch.Tensor) -> float:
    """Linear CKA of two sets of states of the same tokens, (tokens, hidden), in float64: 1e-9 matters (eq. 6)."""
    first, second = (x.double() - x.double().mean(0) for x in (states, reference))
    similarity = torch.linalg.matrix_norm(first.T @ second) ** 2
    return float(similarity / (torch.linalg.matrix_norm(first.T @ first) * torch.linalg.matrix_norm(second.T @ second)))


def damage(forward: ForwardPass, model: QuantisedModel, tokens: torch.Tensor) -> dict[str, float]:
    """The damage δ of each module, 1 − CKA of final states with it alone quantised (eq. 7), on (sequences, n)."""
    reference = final_states(forward, model.reference, tokens).flatten(0, 1)
    return {
        name: 1 - linear_cka(reference, final_states(forward, model.weights([name]), tokens).flatten(0, 1))
        for name in model.modules
    }
