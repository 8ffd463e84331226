"""The decode line of Table 4's engines, fitted to concurrency 1 and 4, and the closed loop that it predicts.

t = β + J·[B > 1] + α_n (B - 1) + α_kv · KV for a step of B sequences that attend to KV cached tokens. β is the time to
read the weights, so it goes with their bits; a KV token has the same bytes whatever the weights, so α_kv belongs to the
model, and all prompts and methods of a model are fitted together.

Concurrency 1 and 4 fix β, α_kv and what four sequences cost beyond their KV, 3 α_n + J together. They cannot divide
that into a cost of every further row and one of batching at all, and at 16 it matters. The roofline does: below the
ridge, peak FLOP/s over bytes/s, a further row hides behind the reading of the weights and is free. An A100 has it at
153 rows of 16-bit weights and 38 of 4-bit ones, so α_n = 0 and the rest is J: what a step pays once it is no longer a
matrix-vector product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from latency_models.deployment.hardware import Hardware
from latency_models.fitting.linear import LinearLatency
from papers.sun.published import ConcurrencyRow

FITTED = (1, 4)
"""Concurrencies whose rows are fitted; the others are predicted."""

Form = Literal["batching", "rows", "neither"]
FORMS: tuple[Form, ...] = ("batching", "rows", "neither")
"""The coefficient that explains the cost of four sequences beyond their KV: J, α_n, or neither (the KV alone)."""

ROUNDS = 100
"""Iterations of the fixed point between TPOT and the batch; each gains about two digits."""


@dataclass(frozen=True)
class DecodeFit:
    """The line of one model, seconds: β by bits of weights, J, α_n, α_kv; and the mean relative misfit."""

    weights: dict[int, float]
    batching: float
    per_row: float
    per_kv_token: float
    misfit: float

    def step(self, bits: int, batch: float, kv: float) -> float:
        """Seconds of a step; `batch` may be a mean."""
        return self.overhead(bits, batch > 1) + self.per_row * (batch - 1) + self.per_kv_token * kv

    def overhead(self, bits: int, several: bool) -> float:
        """Seconds of a step before its rows and its KV, with one sequence or several."""
        return self.weights[bits] + self.batching * several


@dataclass(frozen=True)
class ClosedLoop:
    """The steady state of a closed loop: seconds, seconds, output tokens a second."""

    ttft: float
    tpot: float
    throughput: float


def fit_decode(rows: Iterable[ConcurrencyRow], form: Form = "batching", *, plain: bool = False) -> DecodeFit:
    """Non-negative least squares of relative errors over the rows of one model at the concurrencies `FITTED`.

    Each row is read by its TPOT and by its throughput, with the batch that a request sees: itself and those others that
    decode just then. `plain` leaves out both refinements: TPOT alone, and the concurrency for the batch.
    """
    from scipy.optimize import nnls

    fitted = [row for row in rows if row.concurrency in FITTED]
    kinds = sorted({row.decode_bits for row in fitted})
    design, times = [], []
    for row in fitted:
        batch = seen_batch(row.concurrency, 1.0 if plain else row.decoding)
        columns = [float(row.decode_bits == bits) for bits in kinds]
        columns += {"batching": [float(batch > 1)], "rows": [batch - 1], "neither": []}[form]
        for time in (row.tpot,) if plain else (row.tpot, row.tpot_of_throughput):
            design.append([*columns, batch * mean_context(row.prompt, row.answer)])
            times.append(time)
    matrix, target = np.array(design), np.array(times)
    scale = matrix.max(axis=0)
    solution, _ = nnls(matrix / scale / target[:, None], np.ones(len(target)))
    coefficients = solution / scale
    misfit = float(np.abs(matrix @ coefficients / target - 1).mean())
    values = [float(value) for value in coefficients]
    extra = values[len(kinds)] if form != "neither" else 0.0
    return DecodeFit(
        weights=dict(zip(kinds, values[: len(kinds)], strict=True)),
        batching=extra if form == "batching" else 0.0,
        per_row=extra if form == "rows" else 0.0,
        per_kv_token=values[-1],
        misfit=misfit,
    )


def fit_prompts(rows: Iterable[ConcurrencyRow]) -> dict[int, LinearLatency]:
    """TTFT by prompt tokens at concurrency 1, for each width of the prefill weights of one model."""
    single = [row for row in rows if row.concurrency == 1]
    return {
        bits: LinearLatency(relative=True, holdout=0.0).fit(
            [float(row.prompt) for row in single if row.prefill_bits == bits],
            [row.ttft for row in single if row.prefill_bits == bits],
        )
        for bits in sorted({row.prefill_bits for row in single})
    }


def all_rows(fit: DecodeFit) -> DecodeFit:
    """The other end of the range that concurrency 1 and 4 leave open: rows have the cost at 4 in place of batching."""
    return replace(fit, batching=0.0, per_row=fit.per_row + fit.batching / (max(FITTED) - 1))


def closed_loop(fit: DecodeFit, prompts: LinearLatency, row: ConcurrencyRow) -> ClosedLoop:
    """A row's engines in closed form. Clients send in the order of their answers, so prompts do not overlap."""
    ttft = prompts.seconds(row.prompt)
    context, batch, tpot = mean_context(row.prompt, row.answer), float(row.concurrency), 0.0
    for _ in range(ROUNDS):
        tpot = fit.step(row.decode_bits, batch, batch * context)
        decoding = (row.answer - 1) * tpot
        batch = seen_batch(row.concurrency, decoding / (ttft + decoding))
    return ClosedLoop(ttft, tpot, row.concurrency * row.answer / (ttft + (row.answer - 1) * tpot))


def seen_batch(concurrency: int, decoding: float) -> float:
    """Mean sequences in a step that a request takes part in, when each decodes this share of its time."""
    return 1 + (concurrency - 1) * decoding


def mean_context(prompt: int, answer: int) -> float:
    """Cached tokens that a request attends to in its answer - 1 decode steps, on average: prompt + 1 … + answer - 1."""
    return prompt + answer / 2


def ridge_rows(hardware: Hardware, bits: int) -> float:
    """Rows up to which a matrix product, two FLOPs a weight and row, takes no longer than reading its weights."""
    return hardware.flops("bf16") / hardware.memory_bandwidth * (bits / 8) / 2


def rows_of(rows: Sequence[ConcurrencyRow], model: str) -> list[ConcurrencyRow]:
    return [row for row in rows if row.model == model]
