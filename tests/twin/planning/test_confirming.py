"""A deployment that new windows confirm keeps its goals, however many candidates had a chance to be lucky."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from scenarios.fields import Goal
from tests.twin.planning.scenarios import document, kind, plan, question
from twin.planning.confidence import adjusted_p_value, p_value, probability
from twin.planning.confirming import EARLY, LOOKS, OTHER_SEED, Confirmer
from twin.planning.evaluation import Evaluator
from twin.planning.space import Candidate, candidate, families
from twin.planning.windows import Trial

REPLICATIONS, SPAN = 20, 50.0
ALLOWED = 30.0
"""Misses of a window that just meets the goal."""


@dataclass
class DrawnWindows:
    """Stands in for an evaluator: windows whose excess is drawn around a mean for each candidate."""

    means: dict[str, float]
    rng: np.random.Generator
    goals: tuple[Goal, ...] = (Goal("ttft_p99", "ttft", 1.0, 0.99),)
    excess: dict[str, list[float]] = field(default_factory=dict)
    requests: int = 3000
    allowed: float = ALLOWED
    burst: float = 20.0

    def __post_init__(self) -> None:
        self.question = SimpleNamespace(seed=OTHER_SEED, spec=SimpleNamespace(reliability=0.95, replications=20))
        self.horizon = SimpleNamespace(long=self.requests)

    def is_random(self, candidates: list[Candidate]) -> bool:
        return True

    def can_draw(self, tested: Candidate) -> bool:
        return False

    def add_draws(self, trial: Trial) -> Trial:
        return trial

    def evaluate(self, candidates: list[Candidate], count: int) -> list[Trial]:
        (tested,) = candidates
        excess = self.excess.setdefault(tested.name, [])
        while len(excess) < count:  # misses come in bursts: a skewed excess
            excess.append(self.burst * (self.rng.exponential() - 1.0) + self.means[tested.name])
        windows = [{"excess": [value], "variance": [0.99 * self.allowed], "values": [1.0]} for value in excess]
        chance = probability(np.array(excess)[:, None], SPAN)
        return [Trial(tested, chance, windows, meets=chance >= 0.95, reason="" if chance >= 0.95 else "misses")]


def pool(size: int) -> list[Candidate]:
    colocated = question(document(layouts=["colocated"]))
    return [candidate(colocated.spec, families(colocated)[0], (i + 1,)) for i in range(size)]


def search(means: list[float], rng: np.random.Generator) -> Trial | None:
    """The first candidate that passes 20 windows and is confirmed."""
    candidates = pool(len(means))
    by_name = {deployment.name: mean for deployment, mean in zip(candidates, means, strict=True)}
    windows, confirmer = DrawnWindows(by_name, rng), Confirmer(cast(Evaluator, DrawnWindows(by_name, rng)))
    for deployment in candidates:
        (trial,) = windows.evaluate([deployment], REPLICATIONS)
        if trial.meets and (confirmed := confirmer.confirm(trial)).meets:
            return confirmed
    return None


def test_candidates_that_miss_by_little_are_seldom_confirmed() -> None:
    """At most 5 % of searches among ten candidates that all miss recommend one; first windows alone let many pass."""
    rng = np.random.default_rng(5)
    trials = 400
    passed = sum(
        any(DrawnWindows({item.name: 1.0}, rng).evaluate([item], 20)[0].meets for item in pool(10)) for _ in range(100)
    )
    assert passed > 20
    wrong = sum(search([1.0] * 10, rng) is not None for _ in range(trials))
    assert wrong <= 0.05 * trials


def test_a_candidate_with_room_is_confirmed_by_the_first_windows() -> None:
    rng = np.random.default_rng(6)
    trials = [search([-25.0], rng) for _ in range(100)]
    assert sum(trial is not None and len(trial.windows) <= REPLICATIONS for trial in trials) > 80
    assert sum(trial is not None and len(trial.windows) == EARLY for trial in trials) > 20


def test_recommendations_keep_their_claims_out_of_sample() -> None:
    """New spans of what is recommended meet the goal as often as was claimed, or more often."""
    rng = np.random.default_rng(7)
    claimed, observed = [], []
    for _ in range(500):
        means = rng.uniform(-12.0, 6.0, 8).tolist()
        if (trial := search(means, rng)) is not None:
            mean = means[trial.candidate.sizes[0] - 1]
            spans = (20.0 * (rng.exponential(size=(20, int(SPAN))) - 1.0) + mean).sum(axis=1) <= 0
            claimed.append(trial.probability)
            observed.append(spans.mean())
    assert len(observed) > 200
    error = np.std(np.array(observed) - np.array(claimed)) / math.sqrt(len(observed))
    assert np.mean(observed) >= np.mean(claimed) - 3 * error
    assert np.mean(observed) >= 0.95


def test_windows_without_a_miss_prove_only_what_their_number_does() -> None:
    excess = np.full((4, 1), -5.0)
    few, many = (p_value(np.full((4, 1), -allowed / 4), np.array([allowed])) for allowed in (20.0, 200.0))
    assert few == pytest.approx(math.exp(-2.0))  # no cluster of ten where two were expected
    assert many == pytest.approx(0.0, abs=1e-3)
    assert p_value(excess, np.array([0.0])) == 0.0  # a goal that counts no misses


def test_the_worst_goal_decides() -> None:
    excess = np.random.default_rng(1).normal([-10.0, -0.1], 3.0, (20, 2))
    both = p_value(excess, np.zeros(2))
    assert both == pytest.approx(p_value(excess[:, 1:], np.zeros(1)))
    assert both > 0.05


def test_however_many_are_tried_the_errors_allowed_add_up_to_what_the_plan_allows() -> None:
    values = [0.05 / (LOOKS * attempt * (attempt + 1)) for attempt in range(1, 5000)]  # each adjusted to 5 %
    adjusted = [adjusted_p_value(value, i + 1, LOOKS) for i, value in enumerate(values)]
    assert adjusted == pytest.approx([0.05] * len(values))
    assert LOOKS * sum(values) == pytest.approx(0.05, rel=1e-3)
    assert adjusted_p_value(0.5, 3, LOOKS) == 1.0


def test_short_windows_are_added_until_their_p_value_can_be_small() -> None:
    """Four windows of two hundred requests prove nothing, 32 little; a candidate without a miss gets what it takes."""
    windows = DrawnWindows({}, np.random.default_rng(8), requests=200, allowed=2.0, burst=0.0)
    windows.question.spec.replications = 4
    (tested,) = pool(1)
    windows.means[tested.name] = -2.0
    (trial,) = windows.evaluate([tested], 4)
    confirmed = Confirmer(cast(Evaluator, windows), attempts=4).confirm(trial)
    assert confirmed.meets
    assert len(confirmed.windows) > 4 << (LOOKS - 1)


def test_a_recommendation_rests_on_windows_of_another_seed() -> None:
    scenario = {**document(engines=[kind("one", 1, 2.0, 1.0)], replications=8), "seed": 3}
    best = plan(scenario)["recommendation"]
    assert best["seed"] == 3 + OTHER_SEED
    assert best["windows"] >= 8
