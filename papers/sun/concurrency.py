"""Table 4 by simulation: one prefill and one decode worker, a closed loop, and the error of each row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.deployment.hardware import load_hardware
from papers.data import scenario as read_scenario
from papers.sun.decode import (
    FITTED,
    FORMS,
    ClosedLoop,
    DecodeFit,
    Form,
    all_rows,
    closed_loop,
    fit_decode,
    fit_prompts,
    ridge_rows,
    rows_of,
)
from papers.sun.published import ConcurrencyRow, concurrency_rows
from twin.sweeps.serving_sweep import prepare, run_task

DEVICE = "a100-sxm-80gb"
ROUNDS = 8
"""Requests of each client. The first few end in the grace period; the others are all alike, so more change nothing."""

METRICS = ("ttft", "tpot", "throughput")

Result = dict[str, Any]


def predict_engine(model: str, method: str) -> list[Result]:
    """The rows of a model and method: printed, simulated, in closed form, and the range that the fit leaves open."""
    rows = rows_of(concurrency_rows(), model)
    fit, prompts = fit_decode(rows), fit_prompts(rows)
    results = []
    for row in rows:
        if row.method != method:
            continue
        line = prompts[row.prefill_bits]
        twin = simulate_row(row, fit, line.alpha_, line.beta_)
        open_ends = [closed_loop(form, line, row).tpot for form in (fit, all_rows(fit))]
        results.append(_compare(row, twin, closed_loop(fit, line, row), open_ends))
    return results


def simulate_row(row: ConcurrencyRow, fit: DecodeFit, prompt_token: float, prompt_overhead: float) -> ClosedLoop:
    """Simulate a row's closed loop; throughput by Little's law, which is exact here, unlike a count over a window."""
    document = scenario(row, fit, prompt_token, prompt_overhead)
    summary = run_task(prepare(document, Path(document["name"])).tasks[0])["summary"]
    throughput = row.concurrency * row.answer / summary["e2e"]["mean"]
    return ClosedLoop(summary["ttft"]["mean"], summary["tpot"]["mean"], throughput)


def scenario(row: ConcurrencyRow, fit: DecodeFit, prompt_token: float, prompt_overhead: float) -> dict[str, Any]:
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


def fits(rows: Sequence[ConcurrencyRow]) -> list[Result]:
    """The fits, model by model, with the roofline that decides their form."""
    hardware = load_hardware(DEVICE)
    results = []
    for model in dict.fromkeys(row.model for row in rows):
        model_rows = rows_of(rows, model)
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


def forms(rows: Sequence[ConcurrencyRow]) -> list[Result]:
    """The influence of the line's form and refinements: misfit of fitted rows, errors of the others, in closed form."""
    return [
        {"form": form, "plain": plain, **_errors_of(rows, form, plain)} for plain in (False, True) for form in FORMS
    ]


def errors(results: Sequence[Result], metric: str) -> Result:
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


def _errors_of(rows: Sequence[ConcurrencyRow], form: Form, plain: bool) -> Result:
    misfits, tpots, throughputs = [], [], []
    for model in dict.fromkeys(row.model for row in rows):
        model_rows = rows_of(rows, model)
        fit, prompts = fit_decode(model_rows, form, plain=plain), fit_prompts(model_rows)
        misfits.append(fit.misfit)
        for row in model_rows:
            if row.concurrency not in FITTED:
                prediction = closed_loop(fit, prompts[row.prefill_bits], row)
                tpots.append(abs(prediction.tpot / row.tpot - 1))
                throughputs.append(abs(prediction.throughput / row.throughput - 1))
    return {
        "misfit": float(np.mean(misfits)),
        "tpot_error": float(np.mean(tpots)),
        "throughput_error": float(np.mean(throughputs)),
    }


def _compare(row: ConcurrencyRow, twin: ClosedLoop, closed: ClosedLoop, open_ends: list[float]) -> Result:
    published = {metric: getattr(row, metric) for metric in METRICS}
    predicted = {metric: getattr(twin, metric) for metric in METRICS}
    return {
        "model": row.model,
        "method": row.method,
        "prompt": row.prompt,
        "answer": row.answer,
        "concurrency": row.concurrency,
        "fitted": row.concurrency in FITTED,
        "published": published,
        "predicted": predicted,
        "closed_form": {metric: getattr(closed, metric) for metric in METRICS},
        "tpot_any_split": open_ends,
        "errors": {metric: predicted[metric] / published[metric] - 1 for metric in METRICS},
    }
