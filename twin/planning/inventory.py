"""What an inventory serves: the rate of each model and format on the GPUs that there are, and their split among models.

A model on GPUs of one kind is a plan for the highest rate within that number. Rates of several kinds add, since a
router that sends each a fixed share of Poisson arrivals leaves Poisson arrivals at each. Splits are compared by
estimates, which the simulations of the best split correct until it stays the best.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twin.planning.cost import costs
from twin.planning.family_estimates import estimate_families
from twin.planning.max_load import highest_estimate, rounded
from twin.planning.planner import Planner
from twin.planning.question import Document, Question
from twin.planning.result import NOTE, Plan, arrivals, goals_in_words, row
from twin.planning.windows import Simulations
from workloads.errors import BadInput

ROUNDS = 6
"""Splits that are simulated, at most."""

MAX_SPLITS = 1_000_000
"""Splits of an inventory, at most."""

Floats = NDArray[np.float64]
Split = dict[tuple[str, str], int]
"""GPUs by model and kind of GPU."""


@dataclass(frozen=True)
class Demand:
    """A model to serve; `rate` is in requests per second, and None: as many as can be."""

    model: str
    rate: float | None = None


def demands_of(models: Sequence[str], rates: Sequence[str]) -> list[Demand]:
    """Models with the rates of `--rate 20`, or `--rate MODEL=20` where there are several."""
    numbers: dict[str, float] = {}
    for text in rates:
        model, _, number = text.rpartition("=")
        model = model or models[0]
        try:
            rate = float(number)
        except ValueError:
            rate = 0.0
        if not 0 < rate < float("inf") or model not in models or ("=" not in text and len(models) > 1):
            expected = "expected requests per second" if len(models) == 1 else "expected MODEL=RATE of a --model"
            raise BadInput(expected, field="--rate", value=text)
        numbers[model] = rate
    if numbers and (missing := [model for model in models if model not in numbers]):
        raise BadInput("expected a rate of every model, or of none", field="--rate", value=missing[0])
    return [Demand(model, numbers.get(model)) for model in dict.fromkeys(models)]


class Option:
    """A model in one format of weights on GPUs of one kind, with the rates that it bears.

    Attributes:
        question: for the highest rate on all of these GPUs. plans: by number of GPUs, those that were made. refused:
            engines that cannot run.
    """

    def __init__(self, model: str, weights: str, gpu: str, question: Question) -> None:
        self.model = model
        self.weights = weights
        self.gpu = gpu
        self.question = question
        self.plans: dict[int, Plan] = {}
        self._scale = 1.0
        families, self.refused = estimate_families(question)
        gpus = question.spec.limits.gpus
        assert gpus is not None
        self._estimates = np.zeros(gpus + 1)
        for family in families:
            for candidate in family.candidates:
                rate = highest_estimate(family, candidate, question.goals)
                self._estimates[candidate.gpus] = max(rate, self._estimates[candidate.gpus])
        self._estimates = np.maximum.accumulate(self._estimates)

    @property
    def problem(self) -> str:
        """The most frequent reason why engines cannot run, where none can; else empty."""
        reasons = Counter(family.reason for family in self.refused)
        return "" if self._estimates.any() or not reasons else reasons.most_common(1)[0][0]

    @property
    def rates(self) -> Floats:
        """Requests per second by number of GPUs: simulated, else estimated."""
        rates = self._scale * self._estimates
        for gpus, plan in self.plans.items():
            rates[gpus] = rate_of(plan)
        return np.maximum.accumulate(rates)

    def simulate(self, gpus: int, simulations: Simulations) -> None:
        """Find the highest rate on this many GPUs; estimates of other numbers of them are corrected by it."""
        estimate = float(self._estimates[gpus])
        if gpus in self.plans or not estimate:
            return
        limits = self.question.spec.limits.model_copy(update={"gpus": gpus})
        spec = self.question.spec.model_copy(update={"limits": limits})
        question = replace(self.question.at_rate(rounded(estimate)), spec=spec)
        self.plans[gpus] = plan = Planner(question, simulations, brief=True).run()
        self._scale = rate_of(plan) / estimate


def rate_of(plan: Plan) -> float:
    """The rate of the recommendation of a plan for the highest; 0 where nothing meets the goals."""
    return 0.0 if plan.best is None else plan.question.rate or 0.0


@dataclass(frozen=True)
class Inventory:
    """The answer for an inventory. `have`: GPUs by kind. `options`: all that were compared. `split`: of the GPUs."""

    have: Mapping[str, int]
    demands: Sequence[Demand]
    options: Sequence[Option]
    split: Split

    def rate(self, model: str) -> float:
        """Requests per second of a model in the split."""
        return sum(float(best_option(self.options, *key).rates[gpus]) for key, gpus in self._parts(model))

    @property
    def feasible(self) -> bool:
        """True if every model has its rate, or any at all where none is stated."""
        return all(self._is_met(demand) for demand in self.demands)

    def document(self) -> Document:
        """The document `twin.inventory/1`."""
        used = [(option, plan, plan.best) for option, plan in self._plans(chosen=True) if plan.best is not None]
        question = self.options[0].question
        deployments = [(plan.question, trial.candidate) for _, plan, trial in used]
        spare = {gpu: count - sum(gpus for (_, kind), gpus in self.split.items() if kind == gpu)
                 for gpu, count in self.have.items()}  # fmt: skip
        return {
            "schema": "twin.inventory/1",
            "name": "inventory",
            "simulated": True,
            "note": NOTE,
            "have": dict(self.have),
            "question": {"goals": {goal.name: goal.limit for goal in question.goals}, "arrivals": arrivals(question),
                         "confidence": question.spec.confidence, "workload": question.document["workload"]},
            "answer": self.answer(),
            "feasible": self.feasible,
            "models": [self._model(demand) for demand in self.demands],
            "spare": spare,
            "rows": [_row(option, plan, "used") for option, plan in self._plans(chosen=True)]
            + [_row(option, plan, "alternative") for option, plan in self._plans(chosen=False)],
            "costs": costs(question, deployments, sum(self.rate(demand.model) for demand in self.demands)),
            "refused": [{"model": option.model, "weights": option.weights, "gpu": option.gpu, "why": why}
                        for option in self.options if (why := option.problem)],
        }  # fmt: skip

    def answer(self) -> str:
        """The rates of all models, and those that fall short, in sentences."""
        stated = " and ".join(f"{count} {gpu}" for gpu, count in self.have.items())
        parts = []
        for demand in self.demands:
            places = " and ".join(f"{gpus} {gpu}" for (_, gpu), gpus in self._parts(demand.model)) or "no GPU"
            parts.append(f"{self.rate(demand.model):.4g} requests/s of {demand.model} on {places}")
        missed = [
            f"{demand.model} has {self.rate(demand.model):.4g} of {demand.rate or 'any'} requests/s"
            for demand in self.demands
            if not self._is_met(demand)
        ]
        goals = goals_in_words(self.options[0].question)
        return f"{stated} serve {', '.join(parts)}: {goals}." + "".join(f" Too few: {text}." for text in missed)

    def _is_met(self, demand: Demand) -> bool:
        rate = self.rate(demand.model)
        return rate >= demand.rate if demand.rate is not None else rate > 0

    def _parts(self, model: str) -> list[tuple[tuple[str, str], int]]:
        return [(key, gpus) for key, gpus in self.split.items() if key[0] == model and gpus]

    def _plans(self, *, chosen: bool) -> list[tuple[Option, Plan]]:
        """Plans of the numbers of GPUs in the split: of the best formats, or of the others."""
        return [
            (option, option.plans[gpus])
            for key, gpus in self.split.items()
            for option in self.options
            if (option.model, option.gpu) == key and gpus in option.plans
            if (option is best_option(self.options, *key)) == chosen
        ]

    def _model(self, demand: Demand) -> Document:
        rate = self.rate(demand.model)
        return {"model": demand.model, "wanted": demand.rate, "rate": rate, "met": self._is_met(demand)}


def _row(option: Option, plan: Plan, role: str) -> Document:
    """A row of `twin.plan/1` with its model, format, kind of GPU and rate; of a plan without an answer, the reason."""
    rate = rate_of(plan)
    part = {"model": option.model, "weights": option.weights, "gpu": option.gpu, "rate": rate}
    if plan.best is None or plan.headroom is None:
        return {**part, "role": role, "binds": None, "reason": plan.answer()}
    binds = plan.headroom.binds
    return {**part, **row(plan.question, plan.best, role), "binds": None if binds is None else binds.name}


def divide(
    have: Mapping[str, int],
    demands: Sequence[Demand],
    options: Sequence[Option],
    simulations: Simulations,
    *,
    brief: bool = False,
) -> Inventory:
    """Split an inventory among models, and simulate the split.

    `brief`: leave out the formats of weights that the split does not use.
    """
    split = best_split(have, demands, options)
    for _ in range(ROUNDS):
        parts = [(best_option(options, *key), gpus) for key, gpus in split.items() if gpus]
        if all(gpus in option.plans for option, gpus in parts):
            break
        for option, gpus in parts:
            option.simulate(gpus, simulations)
        split = best_split(have, demands, options)
    for key, gpus in split.items():
        for option in options:
            if (option.model, option.gpu) == key and gpus and not brief:
                option.simulate(gpus, simulations)
    return Inventory(have, demands, options, {key: gpus for key, gpus in split.items() if gpus})


def best_option(options: Sequence[Option], model: str, gpu: str) -> Option:
    """The format of a model's weights with the highest rate on all GPUs of a kind."""
    formats = [option for option in options if (option.model, option.gpu) == (model, gpu)]
    return max(formats, key=lambda option: float(option.rates[-1]))


def best_split(have: Mapping[str, int], demands: Sequence[Demand], options: Sequence[Option]) -> Split:
    """The split that gives the most models their rates, then the highest rate relative to those, at the least cost."""
    models = [demand.model for demand in demands]
    wanted = np.array([demand.rate or 1.0 for demand in demands])
    limits = np.array([np.inf if demand.rate is None else 1.0 for demand in demands])
    prices = [options[0].question.spec.prices.get(gpu) for gpu in have]
    weights = np.array([1.0 if None in prices else price for price in prices], dtype=float)
    rates, gpus = np.zeros((1, len(models))), np.zeros((1, 0), dtype=np.int64)
    for gpu, count in have.items():
        kind_gpus, kind_rates = _shares(count, [best_option(options, model, gpu) for model in models])
        if (number := len(rates) * len(kind_rates)) > MAX_SPLITS:
            expected = f"expected an inventory and models with at most {MAX_SPLITS:,} splits, not {number:,}"
            raise BadInput(expected, field="--have")
        rates = (rates[:, None] + kind_rates[None]).reshape(-1, len(models))
        gpus = np.hstack([np.repeat(gpus, len(kind_gpus), axis=0), np.tile(kind_gpus, (len(gpus), 1))])
    ratios = np.minimum(rates / wanted, limits)
    met = (ratios >= np.minimum(limits, 1.0)).sum(axis=1)
    cost = (gpus * np.repeat(weights, len(models))).sum(axis=1)
    best = np.lexsort((-cost, ratios.sum(axis=1), ratios.min(axis=1), met))[-1]
    keys = [(model, gpu) for gpu in have for model in models]
    return {key: int(number) for key, number in zip(keys, gpus[best], strict=True)}


def _shares(count: int, options: Sequence[Option]) -> tuple[NDArray[np.int64], Floats]:
    """Splits of GPUs of one kind among models, and the rates of these, both of shape (splits, models)."""
    curves = [option.rates for option in options]
    useful = [[0, *(gpus for gpus in range(1, count + 1) if rates[gpus] > rates[gpus - 1])] for rates in curves]
    splits = [split for split in itertools.product(*useful) if sum(split) <= count]
    shares = [[rates[gpus] for rates, gpus in zip(curves, split, strict=True)] for split in splits]
    return np.array(splits), np.array(shares)
