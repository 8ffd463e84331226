"""Section 4.3, figure 3: four isolated decode workers against shared pools of three, two and one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from papers.sun.node import MODELS, PROMPT, Load, Outcome, Service, outcomes, scenario
from papers.sun.published import ISOLATED, SHARED, PoolRow, pool_rows
from workloads.mixes import ModelMix

ANSWERS = (64, 128, 256, 512, 1024, 2048)
"""Possible tokens of an answer: the powers of two up to the longest answers in the paper. Our text lacks figure 3's."""

LONG_ANSWER, LONG_GRACE, LONG_WINDOW = 2048, 60.0, 180.0
"""The longest answers, and their longer grace period and window (appendix A.2)."""

STRONGEST_SKEW = 2.0
"""Zipf exponent at the end of our sweep; the paper's is lost too."""

Result = dict[str, Any]


def predict_pools(service: Service, answer: int, replications: int) -> Result:
    """All rows for one length of answers, printed and by the twin, and the error of the row that chooses the length."""
    isolated, *pools = pool_rows()
    load = offered(isolated, answer)
    base = outcomes(scenario(service, load, ISOLATED), replications)
    rows = [_compare(isolated, isolated, base, base)]
    for row in pools:
        pool = outcomes(scenario(service, load, SHARED, row.workers), replications)
        rows.append(_compare(row, isolated, pool, base))
    return {
        "answer": answer,
        "rate": load.rate,
        "replications": replications,
        "rows": rows,
        "distance": _distance(rows[-1]),
    }


def offered(isolated: PoolRow, answer: int) -> Load:
    """The load that the isolated row implies: its workers keep up, so that offered and achieved load are equal."""
    rate = isolated.workers * isolated.throughput_per_worker / answer
    if answer >= LONG_ANSWER:
        return Load(rate, answer, grace=LONG_GRACE, window=LONG_WINDOW)
    return Load(rate, answer)


def possible_answers(service: Service) -> list[int]:
    """Lengths whose rate the prefill worker of the most popular model can sustain under the strongest skew.

    The paper offers one rate at every length (4.1) and keeps throughput (4.3): no prefill worker was overrun.
    """
    isolated = pool_rows()[0]
    share = float(ModelMix.zipf([str(i) for i in range(MODELS)], STRONGEST_SKEW).probabilities[0])
    prompt_rate = service.prompts_a_second(PROMPT)
    return [answer for answer in ANSWERS if offered(isolated, answer).rate * share < prompt_rate]


def choose(results: Sequence[Result]) -> Result:
    """The length at which the row of one shared worker is nearest; the rows of two and three are not used."""
    return min(results, key=lambda result: float(result["distance"]))


def _compare(row: PoolRow, isolated: PoolRow, runs: Sequence[Outcome], base: Sequence[Outcome]) -> Result:
    """Throughput as a share of the isolated run's with the same requests, whose printed value fixed the load."""
    throughput = np.mean([run.throughput for run in runs]) / np.mean([run.throughput for run in base])
    per_worker = float(throughput) * isolated.throughput_per_worker * isolated.workers / row.workers
    change = np.mean([run.tpot for run in base]) / np.mean([run.tpot for run in runs]) - 1
    return {
        "workers": row.workers,
        "placement": row.placement,
        "fixes_the_load": row.placement == ISOLATED or row.workers == 1,
        "published": {"throughput": row.throughput_per_worker, "interactivity_change": row.interactivity_change},
        "predicted": {"throughput": per_worker, "interactivity_change": float(change)},
        "tpot": float(np.mean([run.tpot for run in runs])),
        "throughput_error": per_worker / row.throughput_per_worker - 1,
        "interactivity_points": float(change) - row.interactivity_change,
    }


def _distance(row: Result) -> float:
    """Distance of a row's throughput and interactivity from the printed ones, by logarithms of ratios."""
    published, predicted = row["published"], row["predicted"]
    speed = math.log((1 + predicted["interactivity_change"]) / (1 + published["interactivity_change"]))
    return math.hypot(speed, math.log(predicted["throughput"] / published["throughput"]))
