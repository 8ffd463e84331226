"""SUN 4.3 on the testbed of appendix A.2: smaller shared decode pools (figure 3) and skew over models (figure 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from latency_models.fitting.estimator import student_quantile
from papers.common import CONFIDENCE
from papers.common import scenario as read_scenario
from papers.sun.concurrency import (
    DEVICE,
    ISOLATED,
    SHARED,
    Placement,
    PoolRow,
    concurrency_rows,
    fit_decode,
    fit_prompts,
    pool_rows,
    rows_of,
    skew_facts,
)
from reports.blocks import Document
from scenarios.fields import MeasureSpec
from twin.serving.results.summary import RequestLatencies, Run, summarise
from twin.sweeps.one_run import run_plan
from twin.sweeps.serving_sweep import prepare
from workloads.mixes import ModelMix

MODEL, MODEL_FILE, BITS = "LLaMA3.1-8B", "llama-3.1-8b", 16
MODELS = 4
PROMPT = 1024
"""Prompt tokens: A.2's only example and Table 4's minimum. Our text of section 4.3 lacks its number."""

LARGEST_BATCH = 256
"""Sequences of a decode worker: vLLM's default on an A100 (1024 on newer devices); the paper states none. The fitted
line may be a little fast so far up, for the ridge lies at 153 rows."""

STEP_BUDGET = 2048
"""Tokens of a step: the default of vLLM's server on an A100."""

CACHE_BYTES = 2.0
"""Bytes of one KV element, for any bits of the weights."""

GRACE, WINDOW = 30.0, 60.0
"""Grace period and measured window, seconds (appendix A.2)."""


@dataclass(frozen=True)
class Service:
    """Seconds of a prefill step and of each of its tokens, of a decode step and of each KV token that it reads."""

    prompt_overhead: float
    prompt_token: float
    step: float
    kv_token: float

    def prompts_a_second(self, tokens: int) -> float:
        """Most prompts that one prefill worker computes in a second, with its budget full."""
        together = STEP_BUDGET // tokens
        return together / (self.prompt_overhead + self.prompt_token * together * tokens)


@dataclass(frozen=True)
class Load:
    """The offered load. `rate`: requests a second, all models together; `zipf`: skew over models; tokens; seconds."""

    rate: float
    answer: int
    zipf: float = 0.0
    grace: float = GRACE
    window: float = WINDOW


@dataclass(frozen=True)
class Outcome:
    """One run's window: output tokens a second, mean TPOT and TTFT, mean 1/TPOT, answered over offered requests."""

    throughput: float
    tpot: float
    ttft: float
    interactivity: float
    achieved: float


def fitted_service() -> Service:
    """Service times from Table 4's rows of the model that section 4.3 serves, 16-bit weights, concurrency 1 and 4."""
    rows = rows_of(concurrency_rows(), MODEL)
    fit, prompts = fit_decode(rows), fit_prompts(rows)[BITS]
    return Service(prompts.beta_, prompts.alpha_, fit.overhead(BITS, several=True), fit.per_kv_token)


def scenario(service: Service, load: Load, placement: Placement, workers: int = MODELS) -> Document:
    """A scenario document; `workers` are decode workers in all."""
    hardware, model = load_hardware(DEVICE), load_model(MODEL_FILE)
    until = load.grace + load.window
    expected = load.rate * until
    document = read_scenario("sun", "node") | {"name": f"sun-{placement}"}
    workload, system = document["workload"], document["system"]
    # So many that they practically never run out before the window ends.
    workload["requests"] = math.ceil(expected + 4 * math.sqrt(expected))
    workload["decode"]["mean"] = load.answer
    workload["arrivals"]["rate"] = load.rate
    workload["models"]["zipf"] = load.zipf
    document["engine"]["kv_memory"]["memory"] = hardware.memory_capacity
    document["step_time"] |= {"overhead": service.prompt_overhead, "per_token": service.prompt_token}
    system["decode"] = placement
    system["decode_replicas"] = workers if placement == "shared" else workers // MODELS
    system["link"] = {
        "bandwidth": hardware.network.intra_node,
        "bytes_per_token": model.kv_bytes_per_token(CACHE_BYTES),
    }
    system["decode_step_time"] |= {"overhead": service.step, "per_kv_token": service.kv_token}
    document["measure"] = {"after": load.grace, "before": until}
    return document


def outcomes(document: Document, replications: int) -> list[Outcome]:
    """One run for each realisation of the arrivals; run k of two scenarios of one load gets the same requests."""
    tasks = prepare(document, Path(document["name"]), replications=replications).tasks
    return [_outcome(run_plan(task.plan, task.replication), task.plan.scenario.measure, document) for task in tasks]


def _outcome(run: Run, measure: MeasureSpec, document: Document) -> Outcome:
    summary, samples = summarise(run, measure), RequestLatencies(run.columns, measure).counted()
    return Outcome(
        throughput=summary["output_throughput"],
        tpot=summary["tpot"]["mean"],
        ttft=summary["ttft"]["mean"],
        interactivity=float(np.mean(1 / samples["tpot"])),
        achieved=summary["request_throughput"] / document["workload"]["arrivals"]["rate"],
    )


ANSWERS = (64, 128, 256, 512, 1024, 2048)
"""Possible tokens of an answer: the powers of two up to the longest answers in the paper. Our text lacks figure 3's."""

LONG_ANSWER, LONG_GRACE, LONG_WINDOW = 2048, 60.0, 180.0
"""The longest answers, and their longer grace period and window (appendix A.2)."""

STRONGEST_SKEW = 2.0
"""Zipf exponent at the end of our sweep; the paper's is lost too."""


def predict_pools(service: Service, answer: int, replications: int) -> Document:
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


def choose(results: Sequence[Document]) -> Document:
    """The length at which the row of one shared worker is nearest; the rows of two and three are not used."""
    return min(results, key=lambda result: float(result["distance"]))


def _compare(row: PoolRow, isolated: PoolRow, runs: Sequence[Outcome], base: Sequence[Outcome]) -> Document:
    """Throughput as a share of the isolated run's with the same requests, whose printed value fixed the load."""
    throughput = _mean(runs, "throughput") / _mean(base, "throughput")
    per_worker = throughput * isolated.throughput_per_worker * isolated.workers / row.workers
    change = _mean(base, "tpot") / _mean(runs, "tpot") - 1
    return {
        "workers": row.workers,
        "placement": row.placement,
        "fixes_the_load": row.placement == ISOLATED or row.workers == 1,
        "published": {"throughput": row.throughput_per_worker, "interactivity_change": row.interactivity_change},
        "predicted": {"throughput": per_worker, "interactivity_change": change},
        "tpot": _mean(runs, "tpot"),
        "throughput_error": per_worker / row.throughput_per_worker - 1,
        "interactivity_points": change - row.interactivity_change,
    }


def _distance(row: Document) -> float:
    """Distance of a row's throughput and interactivity from the printed ones, by logarithms of ratios."""
    published, predicted = row["published"], row["predicted"]
    speed = math.log((1 + predicted["interactivity_change"]) / (1 + published["interactivity_change"]))
    return math.hypot(speed, math.log(predicted["throughput"] / published["throughput"]))


SKEWS = (0.0, 0.5, 1.0, 1.5, 2.0)
"""Zipf exponents."""

ANSWER = 512
"""Tokens of an answer: appendix A.2 meets its target, which our text lacks, with 511.8 on average."""

Point = tuple[Placement, float]
METRICS = ("throughput", "interactivity")


def simulate(service: Service, rate: float, placement: Placement, zipf: float, replications: int) -> list[Outcome]:
    return outcomes(scenario(service, Load(rate, ANSWER, zipf), placement), replications)


def skew_points() -> list[Point]:
    """Both placements at every skew."""
    return [(placement, zipf) for placement in (ISOLATED, SHARED) for zipf in SKEWS]


def summarise_skew(curves: Mapping[Point, Sequence[Outcome]], rate: float) -> Document:
    """Curves over skew, and the paper's sizes beside the results, by both averages: the paper does not say which."""
    facts, worst, even = skew_facts(), max(SKEWS), min(SKEWS)
    compared: list[tuple[str, str, str, Placement, Placement]] = [
        ("isolated_throughput_change", "throughput, isolated against uniform", "throughput", ISOLATED, ISOLATED),
        ("shared_throughput_gain", "throughput, shared against isolated", "throughput", SHARED, ISOLATED),
        ("shared_interactivity_gain", "interactivity, shared against isolated", "interactivity", SHARED, ISOLATED),
        ("shared_interactivity_gain", "the same by mean TPOT, shared against isolated", "tpot", ISOLATED, SHARED),
    ]

    def change(metric: str, over: Placement, under: Placement) -> Document:
        return _change(curves, metric, (over, worst), (under, even if over == under else worst))

    return {
        "rate": rate,
        "answer": ANSWER,
        "replications": len(next(iter(curves.values()))),
        "points": [
            {"placement": placement, "zipf": zipf, **{name: _mean(runs, name) for name in Outcome.__dataclass_fields__}}
            for (placement, zipf), runs in curves.items()
        ],
        "sizes": [
            {"what": label, "published": facts[fact], **change(metric, over, under)}
            for fact, label, metric, over, under in compared
        ],
        "falls": {
            metric: bool(np.all(np.diff([_mean(curves[ISOLATED, zipf], metric) for zipf in SKEWS]) < 0))
            for metric in METRICS
        },
        "shared_change": {metric: change(metric, SHARED, SHARED) for metric in METRICS},
    }


def _change(curves: Mapping[Point, Sequence[Outcome]], metric: str, over: Point, under: Point) -> Document:
    """The mean relative change of replications with the same arrivals, and the 95 % range of one run."""
    pairs = zip(curves[over], curves[under], strict=True)
    changes = np.array([getattr(above, metric) / getattr(below, metric) - 1 for above, below in pairs])
    mean, count = float(changes.mean()), len(changes)
    reach = math.nan
    if count > 1:
        reach = student_quantile(CONFIDENCE, count - 1) * float(changes.std(ddof=1)) * math.sqrt(1 + 1 / count)
    return {"predicted": mean, "one_run": [mean - reach, mean + reach]}


def _mean(runs: Sequence[Outcome], name: str) -> float:
    return float(np.mean([getattr(run, name) for run in runs]))
