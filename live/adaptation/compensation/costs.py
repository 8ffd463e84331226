"""The time that a compensator adds to a decode step, from tables of kernel latencies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from latency_models.sources.ec_tables import LAYER_TYPES, LayerTables, read_layer_tables
from live.adaptation.weights import module_type

MEASURED = Path(__file__).parent / "cpu-kernels.ec-tables.yaml"
"""Tables that `twin calibrate run` measured of this project's kernels on a CPU (examples/tiny-llama-cpu)."""


def deployment_costs(modules: Iterable[str], tables: Path | None = None) -> dict[str, float]:
    """Seconds that a compensator on each module adds to a step of one token (t_dep of eq. 10).

    Args:
        tables: a file `twin.ec-tables/1`; None: `MEASURED`.
    """
    added = _added(read_layer_tables(MEASURED if tables is None else tables))
    return {name: added[module_type(name)] for name in modules}


def _added(tables: LayerTables) -> dict[str, float]:
    return {kind: tables.ec[kind][0] - tables.w4[kind][0] for kind in LAYER_TYPES}
