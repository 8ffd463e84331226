"""Costs of error compensators: bytes as they are stored, and time in a decode step.

Factors are stored in INT8 with a scale a row, the gate in float16.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernels.shapes import Shape
from latency_models.sources.ec_tables import LAYER_TYPES, read_layer_tables
from live.adaptation.weights import module_type

SCALE_BYTES = 4
GATE_BYTES = 2

MEASURED = Path(__file__).parent / "cpu-kernels.ec-tables.yaml"
"""Tables that `twin calibrate run` measured of this project's kernels on a CPU (examples/tiny-llama-cpu)."""

Size = tuple[int, int]
"""(outputs, inputs) of a module."""


def factor_bytes(size: Size, rank: int) -> int:
    """Bytes of A, (rank, inputs), and B, (outputs, rank), in INT8 with a float32 scale for each row."""
    outputs, inputs = size
    return rank * (inputs + outputs) + SCALE_BYTES * (rank + outputs)


def gate_bytes(rank: int) -> int:
    """Bytes of the gate's two layers with 4 · rank hidden units: 8 r² + 5 r values in float16."""
    return GATE_BYTES * (8 * rank * rank + 5 * rank)


def compensator_bytes(size: Size, rank: int, *, gate: bool = True) -> int:
    """Bytes of one compensator; without a gate, of a static term of low rank."""
    return factor_bytes(size, rank) + (gate_bytes(rank) if gate else 0)


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
