"""The Prelude paper's published serving runs, and what follows from these numbers without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from papers.data import published

ENGINES = ("prelude", "vllm", "sglang")
SECONDS_A_MINUTE = 60.0
PROMPT_TOKENS = 512
"""Prompt tokens of the sweep, as the paper counts them: its 95,590 input tok/s at 186.7 requests/s (section 4)."""


@dataclass(frozen=True)
class ServingRow:
    """One engine's row of Table 4 or 6. Seconds, tokens, requests/s; `tpot` is None where answers have one token."""

    engine: str
    output_tokens: int
    concurrency: int
    requests: int
    ttft: float
    tpot: float | None
    e2e: float
    input_rate: float
    rate: float

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens a request as the engine counted them, chat template included."""
        return self.input_rate / self.rate

    @property
    def client_seconds(self) -> float:
        """Each client's time between an answer and its next request: c / X − E2E, by Little's law."""
        return self.concurrency / self.rate - self.e2e


@dataclass(frozen=True)
class SweepRow:
    """One row of Table 5: requests/s of each engine at one concurrency."""

    concurrency: int
    rates: dict[str, float]


def one_shot_rows() -> dict[str, ServingRow]:
    """Table 4, by engine: 100 requests (appendix D)."""
    return {row["engine"]: _serving(row, 100) for row in published("prelude", "oneshot")}


def decode_rows() -> dict[str, ServingRow]:
    """Table 6, by engine: 400 requests (appendix D)."""
    return {row["engine"]: _serving(row, 400) for row in published("prelude", "decode_control")}


def sweep_rows() -> list[SweepRow]:
    return [
        SweepRow(int(row["concurrency"]), {engine: float(row[f"{engine}_req_s"]) for engine in ENGINES})
        for row in published("prelude", "concurrency")
    ]


def sweep_latency() -> dict[str, tuple[float, float]]:
    """P50 and P95 latency of the sweep at concurrency 1, seconds (section 4, "Concurrency sweep")."""
    return {
        row["engine"]: (float(row["p50_ms"]) / 1e3, float(row["p95_ms"]) / 1e3)
        for row in published("prelude", "latency")
    }


def arithmetic() -> list[dict[str, Any]]:
    """The implications of the printed numbers, engine by engine; seconds.

    `client_*`: between an answer and the next request, at c = 1 (Table 4) and c = 4 (Table 6). `cycle_4b`: from request
    to request at c = 1 in Table 5. `faster_half`: the most that the faster half can have averaged in that cycle.
    """
    one_shot, control, latency = one_shot_rows(), decode_rows(), sweep_latency()
    rates = sweep_rows()[0].rates
    return [
        {
            "engine": engine,
            "prompt_tokens": one_shot[engine].prompt_tokens,
            "client_one_shot": one_shot[engine].client_seconds,
            "client_decode": control[engine].client_seconds,
            "cycle_4b": 1 / rates[engine],
            "p50_4b": latency[engine][0],
            "ttft_06b": one_shot[engine].ttft,
            "faster_half": 2 * (1 / rates[engine] - one_shot[engine].client_seconds) - latency[engine][0],
        }
        for engine in ENGINES
    ]


def _serving(row: dict[str, str], requests: int) -> ServingRow:
    tpot = row.get("tpot_ms")
    return ServingRow(
        row["engine"],
        int(row["output_tokens"]),
        int(row["concurrency"]),
        requests,
        float(row["ttft_ms"]) / 1e3,
        float(tpot) / 1e3 if tpot else None,
        float(row["e2e_ms"]) / 1e3,
        float(row["input_tok_s"]),
        float(row["requests_per_min"]) / SECONDS_A_MINUTE,
    )
