"""The workload of SPEAR's Table 3, the latency tables that its static rows imply, and the twin's errors in these rows.

The workload of 300 ShareGPT requests at 16 a second (SPEAR 5.1). The paper does not say how they were drawn.

The trace holds every turn of its conversations, with all earlier turns as the prompt. Benchmarks use ShareGPT in
different ways: first turns, filters by length, prompts cut to a length. Each such way is a `Sampling`.

The latency tables that the static rows of SPEAR's Table 3 imply, and the twin's errors in these rows.

At a static chunk size almost every long gap between tokens is a step with a whole chunk, so that P99 ITL is the time of
such a step. That gives T_S at the four chunk sizes under each of three densities, as

    T_S(M) = W(M) + density · E(M):

W is a pass of the plain 4-bit model, and E the time that compensators on all modules would add. A pass over one token
is known from 5.3.1; compensators are taken to have the share in it that they have at the smallest chunk. Between these
points T_S is linear, as in 4.3. It does not say how P99 ITL splits over layer types and attention: by weights, all in
the former.

The paper leaves open whether decodes count as part of a static chunk, and whether it is padded. Each answer is a
`Reading`, and the static rows judge between them. Of what a step of d decodes and c prompt tokens takes they cannot:
with the chunk beside the decodes, T(d) + T(c) and T(d + c) fit them alike. Section 4.3 estimates an iteration as the
former.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.ec_tables import LAYER_TYPES, LayerTables, LayerType, Passes
from papers.common import scenario as read_scenario
from papers.spear.published import (
    DENSITIES,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    MEMORY,
    PARAMETERS,
    RATE,
    REQUESTS,
    SINGLE_TOKEN,
    SINGLE_TOKEN_DENSITY,
    Row,
    static_rows,
)
from scenarios.serving import check_scenario
from twin.serving.plan.plan import make_plan
from twin.serving.results.summary import summarise
from twin.serving.run.simulation import Simulation
from workloads.traces import Trace

Kind = Literal["all turns", "first turns", "new tokens", "vllm", "prompt up to", "total up to", "prompt cut to"]

SYNTHETIC = {
    "prefill": {"distribution": "lognormal", "mean": 428.0, "cv": 0.849},
    "decode": {"distribution": "lognormal", "mean": 416.3, "cv": 0.647},
}
"""Without a trace: mean and variation of prompts and answers of the trace's turns with at most 1152 prompt tokens."""


@dataclass(frozen=True)
class Sampling:
    """A way of drawing requests from conversations, up to `tokens`.

    `new tokens`: of each prompt only those that its turn added (the rest is cached). `vllm`: its benchmark's filter,
    prompts of at most 1024 tokens and 2048 in total, neither below 4.
    """

    kind: Kind
    tokens: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.tokens}" if self.tokens else self.kind

    def draw_from(self, trace: Trace) -> Trace:
        """The turns that are drawn from, all equally likely."""
        prompts, answers = trace.prefill_tokens, trace.decode_tokens
        keep = np.ones(len(trace), dtype=np.bool_)
        match self.kind:
            case "first turns":
                keep = ~_continuing(trace)
            case "new tokens":
                before = np.concatenate([[0], (prompts + answers)[:-1]])
                prompts = np.maximum(np.where(_continuing(trace), prompts - before, prompts), 1)
            case "vllm":
                keep = (prompts >= 4) & (answers >= 4) & (prompts <= 1024) & (prompts + answers <= 2048)
            case "prompt up to":
                keep = prompts <= self.tokens
            case "total up to":
                keep = prompts + answers <= self.tokens
            case "prompt cut to":
                prompts = np.minimum(prompts, self.tokens)
        keep &= prompts > 0
        return Trace(f"{trace.name}, {self.name}", None, prompts[keep], answers[keep])


def _continuing(trace: Trace) -> Any:
    """True if a turn's prompt has room for the whole turn before it: the trace lists conversations turn by turn."""
    total = trace.prefill_tokens + trace.decode_tokens
    return np.concatenate([[False], trace.prefill_tokens[1:] >= total[:-1]])


SAMPLINGS = (
    Sampling("all turns"),
    Sampling("first turns"),
    Sampling("new tokens"),
    Sampling("vllm"),
    *(Sampling("prompt up to", tokens) for tokens in (512, 768, 896, 1024, 1152, 1280, 1536, 2048)),
    *(Sampling("total up to", tokens) for tokens in (512, 768, 896, 1024, 1280, 1536, 2048)),
    *(Sampling("prompt cut to", tokens) for tokens in (256, 384, 512, 640)),
)


def scenario(chunking: dict[str, Any], step_time: dict[str, Any], *, synthetic: bool = False) -> dict[str, Any]:
    """One engine under Table 3's load. A trace has to be handed to the plan, unless lengths are `synthetic`."""
    lengths = SYNTHETIC if synthetic else {"trace": {"path": "ShareGPT"}}
    document = read_scenario("spear")
    document["workload"] |= {"requests": REQUESTS, **lengths}
    document["workload"]["arrivals"]["rate"] = RATE
    document["engine"] |= {"num_gpu_blocks": kv_blocks(), "chunking": chunking}
    return document | {"step_time": step_time}


def kv_blocks(block_tokens: int = 16, utilization: float = 0.9) -> int:
    """Blocks of a 16-bit cache that fit beside 4-bit weights. Table 3's load never fills them."""
    return int((MEMORY * utilization - PARAMETERS / 2) // (LAYERS * 2 * HIDDEN * 2 * block_tokens))


CHUNKS = (64, 128, 256, 512)
GRID = (1, *CHUNKS)

SMALLEST, LARGEST = 16, CHUNKS[-1]
"""c_min and c_max, tokens, which the paper does not give. c_max is where the tables end."""

WEIGHTS: dict[LayerType, int] = {
    "qkv": 3 * HIDDEN * HIDDEN,
    "o": HIDDEN * HIDDEN,
    "gate_up": 2 * HIDDEN * INTERMEDIATE,
    "down": HIDDEN * INTERMEDIATE,
}
"""Weights of one layer."""

HOPELESS = 1.0
"""Misfit of TTFT (a factor of e, typically) that no change of the tables can mend: such a fit ends there."""

Floats = NDArray[np.float64]
Figures = tuple[float, float]
"""P99 ITL and mean TTFT of one run, seconds."""


@dataclass(frozen=True)
class Reading:
    """An interpretation of a step: passes T(d) + T(c) or T(d + c); chunks beside the decodes or with them; padded or
    not.
    """

    passes: Passes
    beside_decodes: bool
    padded: bool = False

    @property
    def name(self) -> str:
        step = "T(d) + T(c)" if self.passes == "separate" else "T(d + c)"
        return f"{step}, decodes {'beside' if self.beside_decodes else 'within'}{', padded' if self.padded else ''}"


READINGS = (
    Reading("separate", beside_decodes=True),
    Reading("separate", beside_decodes=True, padded=True),
    Reading("separate", beside_decodes=False),
    Reading("joint", beside_decodes=True),
    Reading("joint", beside_decodes=False),
    Reading("joint", beside_decodes=False, padded=True),
)


@dataclass(frozen=True)
class Iteration:
    """The times W and E over `GRID`, seconds of the whole model."""

    base: tuple[float, ...]
    compensators: tuple[float, ...]

    def at(self, density: float) -> list[float]:
        return [w + density * e for w, e in zip(self.base, self.compensators, strict=True)]

    def tables(self) -> LayerTables:
        shares = {kind: WEIGHTS[kind] / sum(WEIGHTS.values()) / LAYERS for kind in LAYER_TYPES}
        return LayerTables(
            schema="twin.ec-tables/1",
            layers=LAYERS,
            tokens=list(GRID),
            w4={kind: [share * w for w in self.base] for kind, share in shares.items()},
            ec={kind: [share * t for t in self.at(1.0)] for kind, share in shares.items()},
            attention=[0.0] * len(GRID),
            source="implied by the static rows of SPEAR's Table 3 and the decode latency of 5.3.1; attention is within"
            " the linear layers, which are split by weights",
        )


def complete(base: Sequence[float], compensators: Sequence[float]) -> Iteration:
    """The times W and E over `CHUNKS` and a single token. W and W + E, and so every T_S, grow with the tokens."""
    share = max(compensators[0], 0.0) / base[0]
    single = SINGLE_TOKEN / (1 + SINGLE_TOKEN_DENSITY * share)
    slightly = np.arange(len(GRID)) * 1e-9  # seconds
    plain = np.maximum.accumulate([single, *base]) + slightly
    full = np.array([single, *base]) + np.maximum([share * single, *compensators], 0.0)
    carrying = np.maximum.accumulate(np.maximum(full, plain)) + slightly
    return Iteration(tuple(plain.tolist()), tuple((carrying - plain).tolist()))


def on_density(values: Floats, densities: Sequence[str]) -> tuple[Floats, Floats]:
    """Least squares of values, (densities, chunks), as a + b · density, with the least b for one density."""
    design = np.array([[1.0, DENSITIES[name]] for name in densities])
    (a, b), *_ = np.linalg.lstsq(design, values, rcond=None)
    return a, b


def density_misfit(densities: Sequence[str] = tuple(DENSITIES)) -> list[dict[str, float]]:
    """Distance of printed P99 ITL from a line in the density, at each static chunk size, seconds."""
    published = _by_density({(row.density, row.chunk): row.p99_itl for row in static_rows()}, densities)
    a, b = on_density(published, densities)
    lines = a + np.outer([DENSITIES[name] for name in densities], b)
    return [
        {"chunk": chunk, "at_none": float(a[i]), "per_density": float(b[i]), "largest": float(largest)}
        for i, (chunk, largest) in enumerate(zip(CHUNKS, np.abs(published - lines).max(axis=0), strict=True))
    ]


@dataclass(frozen=True, eq=False)
class Setting:
    """A reading and the requests that it is tried on (None: synthetic); chunks are multiples of `step`."""

    reading: Reading
    lengths: Trace | None
    name: str
    step: int = 1

    def run(self, iteration: Iteration, row: Row, replications: Sequence[int]) -> list[Figures]:
        """The row, simulated: P99 ITL and mean TTFT, one entry a replication. Every row meets the same requests."""
        reading = self.reading
        step_time = {
            "source": "ec_tables",
            "tables": iteration.tables().document(),
            "selection": {"density": DENSITIES[row.density]},
            "passes": reading.passes,
            "pad_to": row.chunk if reading.padded and row.chunk else 0,
        }
        document = scenario(self.chunking(row), step_time, synthetic=self.lengths is None)
        checked = check_scenario(document, {}, Path())
        plan = make_plan(checked, Path(), self.lengths)
        figures = []
        for replication in replications:
            summary = summarise(Simulation(plan, replication).run(), checked.measure)
            figures.append((summary["itl"]["p99"], summary["ttft"]["mean"]))
        return figures

    def chunking(self, row: Row) -> dict[str, Any]:
        """The `chunking` section of the row's engine."""
        if row.chunk:
            return {"policy": "static", "tokens": row.chunk, "exclude_decodes": self.reading.beside_decodes}
        return {
            "policy": "slo",
            "slo_seconds": row.goal,
            "min_tokens": SMALLEST,
            "max_tokens": LARGEST,
            "granularity": self.step,
        }


def fit_tables(
    setting: Setting, densities: tuple[str, ...], effort: tuple[int, int], start: Iteration | None = None
) -> dict[str, Any]:
    """Fit W and E to the P99 ITL of the static rows of some densities, by simulation, from a first guess `start`.

    `effort`: replications, and rounds, of which the last corrects nothing. The result has the `iteration`, `p99` and
    `ttft` of the last round, (densities, chunks), and the misfit of both columns.
    """
    replications, rounds = effort
    rows = [row for row in static_rows() if row.density in densities]
    printed_p99, printed_ttft = (
        _by_density({(row.density, row.chunk): getattr(row, name) for row in rows}, densities)
        for name in ("p99_itl", "ttft")
    )
    if start is None:
        base, added = on_density(printed_p99, densities)
        if setting.reading.passes == "separate":  # then the decodes' pass takes half of a step with the smallest chunk
            base, added = base - base[0] / 2, added - added[0] / 2
    else:
        base, added = np.array(start.base[1:]), np.array(start.compensators[1:])
    result: dict[str, Any] = {}
    for _ in range(rounds):
        iteration = complete(base.tolist(), added.tolist())
        runs = {(row.density, row.chunk): setting.run(iteration, row, range(replications)) for row in rows}
        p99, ttft = (
            _by_density(
                {key: math.fsum(run[i] for run in values) / len(values) for key, values in runs.items()}, densities
            )
            for i in range(2)
        )
        result = {
            "iteration": iteration,
            "p99": p99,
            "ttft": ttft,
            "misfit_p99": _misfit(p99, printed_p99),
            "misfit_ttft": _misfit(ttft, printed_ttft),
        }
        if result["misfit_ttft"] > HOPELESS:
            break
        # Half of what is missing: of two passes, the one over the decodes may read the same entry of the table.
        a, b = on_density(0.5 * (printed_p99 - p99), densities)
        base, added = np.array(iteration.base[1:]) + a, np.array(iteration.compensators[1:]) + b
    return result


def _by_density(values: dict[Any, float], densities: Sequence[str]) -> Floats:
    return np.array([[values[name, chunk] for chunk in CHUNKS] for name in densities])


def _misfit(simulated: Floats, published: Floats) -> float:
    return float(np.sqrt(np.mean(np.log(simulated / published) ** 2)))
