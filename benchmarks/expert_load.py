"""The load of the fullest rank against measured experts: tables of wide expert parallelism, with and without EPLB.

    python -m benchmarks.expert_load --tables DATA

DATA is the `systems/data` of aiconfigurator-core. Printed are, by device, the measured time with EPLB over that without
it, that of a power law of 1.2 over that of 1.01, and the tokens of the fullest rank, as measured and as
`latency_models.deployment.layers` has them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from latency_models.deployment.layers import ExpertBalancer, fullest_rank, power_law
from latency_models.io.files import Columns, read_columns

KEYS = (
    "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "num_slots", "moe_tp_size", "moe_ep_size",
)  # fmt: skip
DRAWN = 0.8
"""The tables draw the tokens of an expert between 1 and this share of all tokens."""

MANY = 256
"""Tokens from which the tokens of the fullest rank are compared: fewer are mostly chance."""


def rows_of(table: Columns) -> dict[tuple[object, ...], dict[str, tuple[float, int]]]:
    """Milliseconds, and tokens that reach the fullest rank, by shape and distribution."""
    shapes = (table.wholes(key, low=1) for key in KEYS)
    names = zip(table.text("moe_dtype"), table.text("moe_kernel"), *shapes, strict=True)
    figures = zip(table.numbers("latency", above=0.0), table.wholes("rank0_num_tokens", low=0), strict=True)
    rows: dict[tuple[object, ...], dict[str, tuple[float, int]]] = defaultdict(dict)
    for key, distribution, figure in zip(names, table.text("distribution"), figures, strict=True):
        rows[key][distribution] = figure
    return rows


def reached(tokens: int, experts: int, chosen: int, ranks: int, exponent: float, replicas: int | None) -> float:
    """Mean number of tokens that reach the fullest rank, each at `chosen` different experts."""
    shares = np.sort(power_law(exponent, max(DRAWN * tokens, 1.0), experts))[::-1]
    eplb = None if replicas is None else ExpertBalancer(replicas=replicas, period=1.0)
    share = fullest_rank(shares / shares.sum(), ranks, eplb) / ranks
    return float(tokens * (1 - (1 - min(share, 1.0)) ** chosen))


def tables_of(data: Path) -> Iterator[tuple[str, Columns]]:
    """The tables of TensorRT-LLM by device."""
    for path in sorted(data.glob("*/moe/trtllm/*/wideep_moe_perf.parquet")):
        yield path.parts[-5], read_columns(path)


def main() -> int:
    """Print a line for each device, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True)
    options = parser.parse_args()
    everything: dict[str, list[float]] = defaultdict(list)
    for device, table in tables_of(options.tables):
        ratios: dict[str, list[float]] = defaultdict(list)
        for key, by_distribution in rows_of(table).items():
            tokens, _, _, chosen, experts, slots, _, ranks = key[2:]
            for distribution, (milliseconds, fullest) in by_distribution.items():
                law, _, balanced = distribution.removeprefix("power_law_").partition("_")
                if not balanced and f"{distribution}_eplb" in by_distribution:
                    ratios["eplb"].append(by_distribution[f"{distribution}_eplb"][0] / milliseconds)
                if tokens >= MANY and ranks <= 64:  # type: ignore[operator]
                    replicas = slots - experts if balanced else None  # type: ignore[operator]
                    mean = reached(tokens, experts, chosen, ranks, float(law), replicas)  # type: ignore[arg-type]
                    ratios["eplb tokens" if balanced else "tokens"].append(mean / max(fullest, 1))
            if {"power_law_1.2", "power_law_1.01"} <= by_distribution.keys():
                ratios["law"].append(by_distribution["power_law_1.2"][0] / by_distribution["power_law_1.01"][0])
        print_ratios(device, ratios)
        for name, values in ratios.items():
            everything[name] += values
    print_ratios("all", everything)
    return 0


def print_ratios(device: str, ratios: dict[str, list[float]]) -> None:
    """One line; a dash for what a device lacks."""

    def quantile(name: str, at: float) -> str:
        return f"{np.quantile(ratios[name], at):.3f}" if ratios.get(name) else "-"

    print(
        f"{device:20} EPLB over none, median {quantile('eplb', 0.5)}  1.2 over 1.01, P90 {quantile('law', 0.9)}"
        f"  tokens of the fullest rank, predicted over measured: median {quantile('tokens', 0.5)}"
        f" ({quantile('tokens', 0.1)} to {quantile('tokens', 0.9)}), with EPLB {quantile('eplb tokens', 0.5)}"
        f" ({quantile('eplb tokens', 0.1)} to {quantile('eplb tokens', 0.9)})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
