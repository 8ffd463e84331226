"""SUN's published serving runs, and Table 4 again: its decode line, the closed loop that it predicts, and simulations.

The decode line is fitted to concurrency 1 and 4:

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from latency_models.deployment.hardware import Hardware, load_hardware
from latency_models.fitting.linear import LinearLatency
from papers.common import published, records
from papers.common import scenario as read_scenario
from reports.blocks import Document
from twin.sweeps.serving_sweep import prepare, run_task

ISOLATED: Final = "isolated"
SHARED: Final = "shared"

Placement = Literal["isolated", "shared"]


@dataclass(frozen=True)
class ConcurrencyRow:
    """A row of Table 4: seconds, tokens, output tokens a second of all clients. Bits are the weights'; the cache has
    16.
    """

    model: str
    method: str
    prefill_bits: int
    decode_bits: int
    prompt: int
    answer: int
    concurrency: int
    ttft: float
    tpot: float
    throughput: float

    @property
    def tpot_of_throughput(self) -> float:
        """TPOT by the other column: each of c clients gets one answer in TTFT + (n - 1) TPOT seconds."""
        return (self.concurrency * self.answer / self.throughput - self.ttft) / (self.answer - 1)

    @property
    def decoding(self) -> float:
        """The share of a request's time in the system in which it decodes."""
        decoding = (self.answer - 1) * self.tpot
        return decoding / (self.ttft + decoding)


@dataclass(frozen=True)
class PoolRow:
    """Decode workers of four models under one load (4.3): tokens a second and GPU, and change of interactivity."""

    workers: int
    placement: str
    throughput_per_worker: float
    interactivity_change: float


@dataclass(frozen=True)
class AccuracyRow:
    """A printed accuracy, in per cent: tables 1 and 3, and figure 2 as section 3.2.2 says; `papers.sun.training`."""

    where: str
    model: str
    variant: str
    benchmark: str
    accuracy: float


def accuracy_rows() -> list[AccuracyRow]:
    return records(AccuracyRow, "sun", "accuracy")


def concurrency_rows() -> list[ConcurrencyRow]:
    return records(
        ConcurrencyRow, "sun", "concurrency", prefill_bits="weight_bits_prefill", decode_bits="weight_bits_decode",
        prompt="isl", answer="osl", ttft="ttft_ms", tpot="tpot_ms", throughput="throughput_tok_s",
    )  # fmt: skip


def pool_rows() -> list[PoolRow]:
    """Section 4.3, figure 3: the isolated row first, then shared pools from large to small."""
    return records(
        PoolRow, "sun", "decode_pool", workers="decode_workers",
        throughput_per_worker="throughput_per_decode_gpu_tok_s",
        interactivity_change="interactivity_change_vs_isolated",
    )  # fmt: skip


def skew_facts() -> dict[str, float]:
    """Section 4.3, figure 4: the sizes that the text prints, relative."""
    return {row["fact"]: float(row["published"]) for row in published("sun", "skew")}


FITTED = (1, 4)
"""Concurrencies whose rows are fitted; the others are predicted."""

Form = Literal["batching", "rows", "neither"]
FORMS: tuple[Form, ...] = ("batching", "rows", "neither")
"""The coefficient that explains the cost of four sequences beyond their KV: J, α_n, or neither (the KV alone)."""

ITERATIONS = 100
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
        extra = {"batching": [float(batch > 1)], "rows": [batch - 1], "neither": []}[form]
        context = batch * mean_context(row.prompt, row.answer)
        columns = [*(float(row.decode_bits == bits) for bits in kinds), *extra, context]
        for time in (row.tpot,) if plain else (row.tpot, row.tpot_of_throughput):
            design.append(columns)
            times.append(time)
    matrix, target = np.array(design), np.array(times)
    scale = matrix.max(axis=0)
    solution, _ = nnls(matrix / scale / target[:, None], np.ones(len(target)))
    coefficients = solution / scale
    values = coefficients.tolist()
    return DecodeFit(
        weights=dict(zip(kinds, values[: len(kinds)], strict=True)),
        batching=values[-2] if form == "batching" else 0.0,
        per_row=values[-2] if form == "rows" else 0.0,
        per_kv_token=values[-1],
        misfit=float(np.abs(matrix @ coefficients / target - 1).mean()),
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
    ttft = float(prompts.predict(row.prompt))
    context, batch, tpot = mean_context(row.prompt, row.answer), float(row.concurrency), 0.0
    for _ in range(ITERATIONS):
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


DEVICE = "a100-sxm-80gb"
ROUNDS = 8
"""Requests of each client. The first few end in the grace period; the others are all alike, so more change nothing."""

METRICS = ("ttft", "tpot", "throughput")


def predict_engine(model: str, method: str) -> list[Document]:
    """The rows of a model and method: printed, simulated, in closed form, and the range that the fit leaves open."""
    rows = rows_of(concurrency_rows(), model)
    fit, prompts = fit_decode(rows), fit_prompts(rows)
    return [_predict(row, fit, prompts[row.prefill_bits]) for row in rows if row.method == method]


def _predict(row: ConcurrencyRow, fit: DecodeFit, prompts: LinearLatency) -> Document:
    predicted = asdict(simulate_row(row, fit, prompts.alpha_, prompts.beta_))
    closed, slower = (closed_loop(line, prompts, row) for line in (fit, all_rows(fit)))
    published = {metric: getattr(row, metric) for metric in METRICS}
    return {
        **{name: getattr(row, name) for name in ("model", "method", "prompt", "answer", "concurrency")},
        "fitted": row.concurrency in FITTED,
        "published": published,
        "predicted": predicted,
        "closed_form": asdict(closed),
        "tpot_any_split": [closed.tpot, slower.tpot],
        "errors": {metric: predicted[metric] / published[metric] - 1 for metric in METRICS},
    }


def simulate_row(row: ConcurrencyRow, fit: DecodeFit, prompt_token: float, prompt_overhead: float) -> ClosedLoop:
    """Simulate a row's closed loop; throughput by Little's law, which is exact here, unlike a count over a window."""
    document = scenario(row, fit, prompt_token, prompt_overhead)
    summary = run_task(prepare(document, Path(document["name"])).tasks[0])["summary"]
    throughput = row.concurrency * row.answer / summary["e2e"]["mean"]
    return ClosedLoop(summary["ttft"]["mean"], summary["tpot"]["mean"], throughput)


def scenario(row: ConcurrencyRow, fit: DecodeFit, prompt_token: float, prompt_overhead: float) -> Document:
    """The row's settings as a scenario document. A budget of one prompt keeps prompts whole and apart."""
    document = read_scenario("sun", "engines")
    document["name"] = f"sun-{row.model}-{row.method}-{row.prompt}-{row.concurrency}"
    workload, engine = document["workload"], document["engine"]
    workload["requests"] = ROUNDS * row.concurrency
    workload["prefill"]["mean"], workload["decode"]["mean"] = row.prompt, row.answer
    workload["arrivals"]["concurrency"] = row.concurrency
    engine["num_gpu_blocks"] = row.concurrency * -(-(row.prompt + row.answer) // 16)
    engine["max_num_batched_tokens"] = row.prompt
    document["step_time"] |= {"overhead": prompt_overhead, "per_token": prompt_token}
    document["system"]["decode_step_time"] |= {
        "overhead": fit.overhead(row.decode_bits, row.concurrency > 1) - fit.per_row,
        "per_token": fit.per_row,
        "per_kv_token": fit.per_kv_token,
    }
    return document


def fits(rows: Sequence[ConcurrencyRow]) -> list[Document]:
    """The fits, model by model, with the roofline that decides their form."""
    hardware = load_hardware(DEVICE)
    results = []
    for model, model_rows in _by_model(rows).items():
        fit, prompts = fit_decode(model_rows), fit_prompts(model_rows)
        results.append(
            {
                "model": model,
                "weights": {str(bits): seconds for bits, seconds in fit.weights.items()},
                "batching": fit.batching,
                "per_kv_token": fit.per_kv_token,
                "misfit": fit.misfit,
                "prompts": {
                    str(bits): {"overhead": line.beta_, "per_token": line.alpha_} for bits, line in prompts.items()
                },
                "ridge_rows": {str(bits): ridge_rows(hardware, bits) for bits in fit.weights},
            }
        )
    return results


def forms(rows: Sequence[ConcurrencyRow]) -> list[Document]:
    """The influence of the line's form and refinements: misfit of fitted rows, errors of the others, in closed form."""
    return [
        {"form": form, "plain": plain, **_errors_of(rows, form, plain)} for plain in (False, True) for form in FORMS
    ]


def _errors_of(rows: Sequence[ConcurrencyRow], form: Form, plain: bool) -> Document:
    misfits, tpots, throughputs = [], [], []
    for model_rows in _by_model(rows).values():
        fit, prompts = fit_decode(model_rows, form, plain=plain), fit_prompts(model_rows)
        misfits.append(fit.misfit)
        for row in (row for row in model_rows if row.concurrency not in FITTED):
            prediction = closed_loop(fit, prompts[row.prefill_bits], row)
            tpots.append(abs(prediction.tpot / row.tpot - 1))
            throughputs.append(abs(prediction.throughput / row.throughput - 1))
    columns = {"misfit": misfits, "tpot_error": tpots, "throughput_error": throughputs}
    return {name: float(np.mean(values)) for name, values in columns.items()}


def errors(results: Sequence[Document], metric: str) -> Document:
    """Errors of the held-out rows: mean and worst absolute relative error, in all and by model and method."""
    held_out = [result for result in results if not result["fitted"]]
    worst = max(held_out, key=lambda result: abs(result["errors"][metric]))
    groups: dict[str, list[float]] = {}
    for result in held_out:
        groups.setdefault(f"{result['model']} {result['method']}", []).append(abs(result["errors"][metric]))
    return {
        "mean": float(np.mean([abs(result["errors"][metric]) for result in held_out])),
        "worst": worst["errors"][metric],
        "worst_row": {key: worst[key] for key in ("model", "method", "prompt", "concurrency")},
        "by_method": {name: float(np.mean(values)) for name, values in groups.items()},
    }


def _by_model(rows: Sequence[ConcurrencyRow]) -> dict[str, list[ConcurrencyRow]]:
    return {model: rows_of(rows, model) for model in dict.fromkeys(row.model for row in rows)}
