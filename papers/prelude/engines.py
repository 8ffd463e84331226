"""Tables 4 to 6 of the Prelude paper from three costs an engine: what a request, a step and a token take.

Every prediction is a closed loop through the twin's own schedulers, with as many requests as the paper sent. A client
waits as long between an answer and its next request as Table 4 shows. The variation of that time is not printed, and
exponential is assumed: clients that never vary would stay in step with each other, unlike real ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq, minimize_scalar

from latency_models.deployment.hardware import WEIGHT_BYTES, Hardware, load_hardware
from latency_models.deployment.models import Model, load_model
from latency_models.sources.linear import LinearStepTime
from papers.common import Task, ends, published, records, scenario
from reports.blocks import Document
from schedulers.batches import Batch
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import Run
from twin.serving.results.uncertainty import combine
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

ENGINES = ("prelude", "vllm", "sglang")
DEVICE = "h200-sxm"
SECONDS_A_MINUTE = 60.0
DECODE_REQUESTS = 400
"""Requests of Table 6 (appendix D)."""

PROMPT_TOKENS = 512
"""Prompt tokens of the sweep, as the paper counts them: its 95,590 input tok/s at 186.7 requests/s (section 4)."""


@dataclass(frozen=True)
class ServingRow:
    """One engine's row of Table 4 or 6. Seconds, tokens, requests/s; `tpot` is None where answers have one token."""

    engine: str
    output_tokens: int
    concurrency: int
    ttft: float
    tpot: float | None
    e2e: float
    input_rate: float
    requests_per_minute: float

    @property
    def rate(self) -> float:
        return self.requests_per_minute / SECONDS_A_MINUTE

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens a request as the engine counted them, chat template included."""
        return self.input_rate / self.rate

    @property
    def client_seconds(self) -> float:
        """Each client's time between an answer and its next request: c / X − E2E, by Little's law."""
        return self.concurrency / self.rate - self.e2e


def serving_rows(table: str) -> dict[str, ServingRow]:
    """Table 4 (`oneshot`) or 6 (`decode_control`), by engine."""
    rows = records(
        ServingRow, "prelude", table, ttft="ttft_ms", tpot="tpot_ms", e2e="e2e_ms", input_rate="input_tok_s",
        requests_per_minute="requests_per_min",
    )  # fmt: skip
    return {row.engine: row for row in rows}


def one_shot_rows() -> dict[str, ServingRow]:
    return serving_rows("oneshot")


@dataclass(frozen=True)
class SweepRow:
    """One row of Table 5: requests/s of each engine at one concurrency."""

    concurrency: int
    rates: dict[str, float]


def sweep_rows() -> list[SweepRow]:
    return [
        SweepRow(int(row["concurrency"]), {engine: float(row[f"{engine}_req_s"]) for engine in ENGINES})
        for row in published("prelude", "concurrency")
    ]


def arithmetic() -> list[Document]:
    """The implications of the printed numbers, engine by engine; seconds.

    `client_*`: between an answer and the next request, at c = 1 (Table 4) and c = 4 (Table 6). `cycle_4b`: from request
    to request at c = 1 in Table 5. `p50_4b`: latency there (section 4, "Concurrency sweep"). `faster_half`: the most
    that the faster half can have averaged in that cycle.
    """
    one_shot, control, rates = one_shot_rows(), serving_rows("decode_control"), sweep_rows()[0].rates
    median = {row["engine"]: float(row["p50_ms"]) / 1e3 for row in published("prelude", "latency")}
    return [
        {
            "engine": engine,
            "prompt_tokens": row.prompt_tokens,
            "client_one_shot": row.client_seconds,
            "client_decode": control[engine].client_seconds,
            "cycle_4b": 1 / rates[engine],
            "p50_4b": median[engine],
            "ttft_06b": row.ttft,
            "faster_half": 2 * (1 / rates[engine] - row.client_seconds) - median[engine],
        }
        for engine, row in one_shot.items()
    ]


CACHE_BYTES = 2.0
"""Bytes of one KV element, BF16 like the weights."""


def weight_bytes(model: Model) -> float:
    """Bytes of weights that a forward pass reads: every layer, and the output head."""
    return (_layer_weights(model) + model.vocabulary * model.hidden_size) * WEIGHT_BYTES["bf16"]


def floor_seconds(model: Model, hardware: Hardware, prompts: int, tokens: int) -> float:
    """The shortest time of a forward pass over `prompts` whole prompts of `tokens` tokens on one device.

    FLOPs over peak (causal attention, and the head for last tokens) or weight bytes over bandwidth, without launches.
    """
    pairs = tokens * (tokens + 1) / 2
    attention = 4 * model.attention.heads * _head_dim(model) * model.layers * pairs
    flops = prompts * (2 * _layer_weights(model) * tokens + attention + 2 * model.vocabulary * model.hidden_size)
    return max(flops / hardware.flops("bf16"), weight_bytes(model) / hardware.memory_bandwidth)


def step_line(model: Model, hardware: Hardware) -> dict[str, float]:
    """Seconds a step, a token, and a cached token: a roofline whose parts are added up, so an upper bound."""
    bandwidth = hardware.memory_bandwidth * hardware.efficiency.memory
    rate = hardware.flops("bf16") * hardware.efficiency.compute
    cached = model.kv_bytes_per_token(CACHE_BYTES)
    return {
        "overhead": weight_bytes(model) / bandwidth,
        "per_token": 2 * _layer_weights(model) / rate,
        "per_kv_token": cached / bandwidth,
    }


def _layer_weights(model: Model) -> float:
    hidden = model.hidden_size
    return model.layers * (model.attention.projection_weights(hidden) + model.ffn.weights(hidden))


def _head_dim(model: Model) -> int:
    attention = model.attention
    assert attention.kind == "gqa"  # both of the paper's models
    return attention.head_dim


FITTED = (1, 16, 96)
"""Concurrencies of Table 5 that parameters are fitted to; the others are predicted."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a lone request's fixed time that may block the engine. Throughput alone does not determine the share."""

FITTING, PREDICTING = range(4), range(4, 12)
"""Replications. Predictions are made with other random numbers than the fit."""


@dataclass(frozen=True)
class EngineCosts:
    """Seconds between an answer and the next request; of a request beside others' work; of a step; of its prompts."""

    client: float
    host: float
    overhead: float
    per_prompt: float


class HeldUp(LinearStepTime):
    """A line, and `per_prompt` further seconds for each prompt: work of the host for which the whole step waits."""

    def __init__(self, overhead: float, per_token: float, per_kv_token: float, per_prompt: float) -> None:
        super().__init__(overhead, per_token, per_kv_token)
        self.per_prompt = per_prompt

    def seconds(self, batch: Batch) -> float:
        return super().seconds(batch) + self.per_prompt * len(batch.chunks)


# -- Table 5 -----------------------------------------------------------------------------------------------------------


def sweep_tasks(fitted: tuple[int, ...] = FITTED, shares: tuple[float, ...] = SHARES) -> list[Task]:
    """Each engine's costs fitted to the rows `fitted` of Table 5, and every row predicted."""
    rows, clients = sweep_rows(), {name: row.client_seconds for name, row in one_shot_rows().items()}
    return [Task(f"Table 5, {name}", fit_sweep, (name, rows, clients[name], fitted, shares)) for name in ENGINES]


def sweep_rates(one_shot: bool, costs: EngineCosts, concurrency: int, replications: Sequence[int]) -> list[float]:
    """Throughput (requests/s) of 200 requests of 512 tokens in a closed loop, by replication; `one_shot`: has the
    class.
    """
    plan = _waiting(_plan(one_shot, 200, PROMPT_TOKENS, 1, concurrency), costs.client + costs.host)
    plan = plan.with_step_time(LinearStepTime(costs.overhead, costs.per_prompt / PROMPT_TOKENS))
    return [len(run.columns.last_token) / max(run.columns.last_token) for run in _runs(plan, replications)]


def split_costs(cycle: float, client: float, per_prompt: float, share: float) -> EngineCosts:
    """The costs of an engine that answers a lone request every `cycle` seconds; `share` of the rest blocks it."""
    fixed = cycle - client - per_prompt
    return EngineCosts(client, (1 - share) * fixed, share * fixed, per_prompt)


def fit_share(
    engine: str, rows: Sequence[SweepRow], client: float, floor: float, share: float
) -> tuple[EngineCosts, float]:
    """Costs with the best `per_prompt` for one share, and the root mean square of the relative errors over `rows`."""
    cycle = 1 / next(row.rates[engine] for row in rows if row.concurrency == 1)
    loaded = [row for row in rows if row.concurrency > 1]

    def misfit(per_prompt: float) -> float:
        costs = split_costs(cycle, client, per_prompt, share)
        errors = [
            np.mean(sweep_rates(_has_class(engine), costs, row.concurrency, FITTING)) / row.rates[engine] - 1
            for row in loaded
        ]
        return float(np.sqrt(np.mean(np.square(errors))))

    minimum = minimize_scalar(misfit, bounds=(floor, cycle - client), method="bounded", options={"xatol": 2e-5})
    return split_costs(cycle, client, float(minimum.x), share), float(minimum.fun)


def fit_sweep(
    engine: str,
    rows: Sequence[SweepRow],
    client: float,
    fitted: Sequence[int] = FITTED,
    shares: Sequence[float] = SHARES,
) -> Document:
    """Fit one engine's costs to some rows of Table 5, the first with one client, and predict all rows.

    `any_share`: the range of predictions over all shares of the fixed time that may block the engine.
    """
    floor = floor_seconds(load_model("qwen3-4b"), load_hardware(DEVICE), 1, PROMPT_TOKENS)
    fitted_rows = [row for row in rows if row.concurrency in fitted]
    fits = [(share, *fit_share(engine, fitted_rows, client, floor, share)) for share in shares]
    share, costs, misfit = best = min(fits, key=lambda fit: fit[2])
    return {
        "engine": engine,
        "fitted": list(fitted),
        "share": share,
        **dataclasses.asdict(costs),
        "misfit": misfit,
        "floor_per_prompt": floor,
        "shares": [{"share": size, "misfit": error, **dataclasses.asdict(part)} for size, part, error in fits],
        "rows": [
            {
                "concurrency": row.concurrency,
                "fitted": row.concurrency in fitted,
                **_predict_rate(engine, row, [part for _, part, _ in fits], fits.index(best)),
                "of_floor": row.rates[engine] * floor,
            }
            for row in rows
        ],
        "latency_alone": 1 / rows[0].rates[engine] - client,
    }


def _predict_rate(engine: str, row: SweepRow, costs: Sequence[EngineCosts], best: int) -> Document:
    """A row of Table 5 predicted from the best of several costs, the range over all, and from the other class."""
    one_shot, concurrency, published = _has_class(engine), row.concurrency, row.rates[engine]
    predicted = [_interval(sweep_rates(one_shot, part, concurrency, PREDICTING)) for part in costs]
    return {
        "published": published,
        **predicted[best],
        "error": predicted[best]["predicted"] / published - 1,
        "any_share": list(ends(part["predicted"] for part in predicted)),
        "switched": float(np.mean(sweep_rates(not one_shot, costs[best], concurrency, PREDICTING))),
    }


# -- Tables 4 and 6 ----------------------------------------------------------------------------------------------------


def decode_tasks() -> list[Task]:
    """Each engine's row of Table 6, under both interpretations of its fixed time."""
    rows, controls = one_shot_rows(), serving_rows("decode_control")
    return [
        Task(f"Table 6, {engine}", predict_decode, (rows[engine], controls[engine], blocking))
        for engine in ENGINES
        for blocking in (False, True)
    ]


def predict_decode(one_shot: ServingRow, control: ServingRow, blocking: bool) -> Document:
    """Predict TTFT, E2E and throughput of Table 6 from Table 4 and the TPOT.

    A lone request's TTFT beyond a step is the host's. One client cannot show whether that time overlaps with other
    requests' work or blocks the engine (`held`), so both are tried.
    """
    hardware = load_hardware(DEVICE)
    line = step_line(load_model("qwen3-0.6b"), hardware)
    per_token, per_kv_token = line["per_token"], line["per_kv_token"]
    tokens = round(one_shot.prompt_tokens)
    plan = _plan(_has_class(one_shot.engine), DECODE_REQUESTS, tokens, control.output_tokens, control.concurrency)

    def costs(overhead: float) -> EngineCosts:
        fixed = one_shot.ttft - overhead - per_token * tokens
        return EngineCosts(one_shot.client_seconds, 0.0 if blocking else fixed, overhead, fixed if blocking else 0.0)

    @functools.cache
    def measured(overhead: float, replications: Sequence[int]) -> list[dict[str, float]]:
        engine = costs(overhead)
        step_time = HeldUp(engine.overhead, per_token, per_kv_token, engine.per_prompt)
        timed = _waiting(plan, engine.client + engine.host).with_step_time(step_time)
        return [_latencies(run, engine.host) for run in _runs(timed, replications)]

    assert control.tpot is not None
    goal = control.tpot

    def excess(overhead: float) -> float:
        return float(np.mean([run["tpot"] for run in measured(overhead, FITTING)])) - goal

    feasible = excess(0.0) < 0
    overhead = float(brentq(excess, 0.0, goal, xtol=1e-6)) if feasible else 0.0
    mean, intervals = combine(measured(overhead, PREDICTING))
    published = {"ttft": control.ttft, "tpot": control.tpot, "e2e": control.e2e, "rate": control.rate}
    return {
        "engine": one_shot.engine,
        "held": blocking,
        "feasible": feasible,
        **dataclasses.asdict(costs(overhead)),
        "rows": [
            {
                "metric": metric,
                "fitted": metric == "tpot",
                "published": value,
                "predicted": mean[metric],
                "interval": intervals[metric]["confidence"],
                "error": mean[metric] / value - 1,
            }
            for metric, value in published.items()
        ],
    }


def floors(one_shot: dict[str, ServingRow], sweep: Sequence[SweepRow]) -> list[Document]:
    """Each engine's best beside the peak of one H200: TTFT of Table 4, the most requests/s of Table 5."""
    hardware, small = load_hardware(DEVICE), load_model("qwen3-0.6b")
    ceiling = 1 / floor_seconds(load_model("qwen3-4b"), hardware, 1, PROMPT_TOKENS)
    best = {engine: max(sweep, key=lambda row: row.rates[engine]) for engine in one_shot}
    return [
        {
            "engine": engine,
            "ttft": row.ttft,
            "ttft_floor": floor_seconds(small, hardware, 1, round(row.prompt_tokens)),
            "best_rate": best[engine].rates[engine],
            "best_concurrency": best[engine].concurrency,
            "rate_ceiling": ceiling,
        }
        for engine, row in one_shot.items()
    ]


# -- the closed loop ---------------------------------------------------------------------------------------------------


def _has_class(engine: str) -> bool:
    return engine == "prelude"


def _plan(one_shot: bool, requests: int, prompt: int, output: int, concurrency: int) -> ServingPlan:
    document = scenario("prelude", "tables")
    workload = document["workload"]
    workload["requests"] = requests
    workload["prefill"]["mean"], workload["decode"]["mean"] = prompt, output
    workload["arrivals"]["concurrency"] = concurrency
    document["engine"]["one_shot"] = {"tokens": 8192, "sequences": 256} if one_shot else None
    return prepare(document, Path("prelude")).cases[0].plan


def _waiting(plan: ServingPlan, think: float) -> ServingPlan:
    """The plan with clients who take `think` seconds in the mean; a host beside the engine is the same as a slower
    client.
    """
    workload = plan.scenario.workload
    arrivals = workload.arrivals.model_copy(update={"think": think})
    workload = workload.model_copy(update={"arrivals": arrivals})
    return dataclasses.replace(plan, scenario=plan.scenario.model_copy(update={"workload": workload}))


def _runs(plan: ServingPlan, replications: Sequence[int]) -> list[Run]:
    return [Simulation(plan, replication).run() for replication in replications]


def _latencies(run: Run, host: float) -> dict[str, float]:
    """Means as the paper's harness reports them; `host` is the time of a request before the engine sees it."""
    arrival, first, last = (np.array(getattr(run.columns, name)) for name in ("arrival", "first_token", "last_token"))
    tokens = np.array(run.columns.output_tokens)
    return {
        "ttft": float((first - arrival).mean()) + host,
        "tpot": float(((last - first) / np.maximum(tokens - 1, 1)).mean()),
        "e2e": float((last - arrival).mean()) + host,
        "rate": len(last) / float(last.max()),
    }


def _interval(rates: Sequence[float]) -> Document:
    mean, intervals = combine([{"rate": rate} for rate in rates])
    return {
        "predicted": mean["rate"],
        "interval": intervals["rate"]["confidence"],
        "one_run": intervals["rate"]["prediction"],
    }
