"""A deployment that new windows confirm keeps its goals, however many candidates had a chance to be lucky."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from scenarios.goals import Goal
from tests.twin.planning.scenarios import document, kind, planner, question
from twin.planning.confidence import adjusted_luck, chance_of_luck, probability
from twin.planning.confirming import LOOKS, OTHER_SEED, Confirmer
from twin.planning.judging import Judge, Verdict
from twin.planning.space import Candidate, candidate, families

REPLICATIONS, SPAN = 20, 50.0
ALLOWED = 30.0
"""Misses of a window that just meets the goal."""


@dataclass
class DrawnWindows:
    """Stands in for a judge: windows whose excess is drawn around a mean for each candidate."""

    means: dict[str, float]
    rng: np.random.Generator
    goals: tuple[Goal, ...] = (Goal("ttft_p99", "ttft", 1.0, 0.99),)
    drawn: dict[str, list[float]] = field(default_factory=dict)
    requests: int = 3000
    allowed: float = ALLOWED
    burst: float = 20.0

    def __post_init__(self) -> None:
        self.question = SimpleNamespace(seed=OTHER_SEED, spec=SimpleNamespace(reliability=0.95, replications=20))
        self.horizon = SimpleNamespace(long=self.requests)

    def random(self, candidates: list[Candidate]) -> bool:
        return True

    def with_draws(self, verdict: Verdict) -> Verdict:
        return verdict

    def look(self, candidates: list[Candidate], count: int) -> list[Verdict]:
        (chosen,) = candidates
        own = self.drawn.setdefault(chosen.name, [])
        while len(own) < count:  # misses come in bursts: a skewed excess
            own.append(self.burst * (self.rng.exponential() - 1.0) + self.means[chosen.name])
        windows = [{"excess": [each], "variance": [0.99 * self.allowed], "values": [1.0]} for each in own]
        chance = probability(np.array(own)[:, None], SPAN)
        return [Verdict(chosen, chance, windows, False, True, chance >= 0.95, "" if chance >= 0.95 else "misses")]


def pool(size: int) -> list[Candidate]:
    asked = question(document(layouts=["colocated"]))
    return [candidate(asked.spec, families(asked)[0], (i + 1,)) for i in range(size)]


def search(means: list[float], rng: np.random.Generator) -> tuple[Candidate, Verdict] | None:
    """The first candidate that passes a race of 20 windows and is confirmed."""
    candidates = pool(len(means))
    by_name = {each.name: mean for each, mean in zip(candidates, means, strict=True)}
    race, last = DrawnWindows(by_name, rng), DrawnWindows(by_name, rng)
    confirmer = Confirmer(cast(Judge, last))
    for each in candidates:
        (verdict,) = race.look([each], REPLICATIONS)
        if verdict.meets and (confirmed := confirmer.confirm(verdict)).meets:
            return each, confirmed
    return None


def test_candidates_that_miss_by_little_are_seldom_confirmed() -> None:
    """At most 5 % of searches among ten candidates that all miss recommend one; the race alone lets many pass."""
    rng = np.random.default_rng(5)
    trials = 400
    raced = sum(
        any(DrawnWindows({each.name: 1.0}, rng).look([each], 20)[0].meets for each in pool(10)) for _ in range(100)
    )
    assert raced > 20
    wrong = sum(search([1.0] * 10, rng) is not None for _ in range(trials))
    assert wrong <= 0.05 * trials


def test_a_candidate_with_room_is_confirmed_by_the_first_windows() -> None:
    rng = np.random.default_rng(6)
    found = [search([-25.0], rng) for _ in range(100)]
    assert sum(each is not None and len(each[1].windows) == REPLICATIONS for each in found) > 80


def test_recommendations_keep_their_claims_out_of_sample() -> None:
    """New spans of what is recommended meet the goal as often as was claimed, or more often."""
    rng = np.random.default_rng(7)
    claimed, kept = [], []
    for _ in range(500):
        means = rng.uniform(-12.0, 6.0, 8).tolist()
        if (found := search(means, rng)) is not None:
            chosen, verdict = found
            mean = means[chosen.sizes[0] - 1]
            spans = (20.0 * (rng.exponential(size=(20, int(SPAN))) - 1.0) + mean).sum(axis=1) <= 0
            claimed.append(verdict.probability)
            kept.append(spans.mean())
    assert len(kept) > 200
    error = np.std(np.array(kept) - np.array(claimed)) / math.sqrt(len(kept))
    assert np.mean(kept) >= np.mean(claimed) - 3 * error
    assert np.mean(kept) >= 0.95


def test_windows_without_a_miss_prove_only_what_their_number_does() -> None:
    excess = np.full((4, 1), -5.0)
    few, many = (chance_of_luck(np.full((4, 1), -allowed / 4), np.array([allowed])) for allowed in (20.0, 200.0))
    assert few == pytest.approx(math.exp(-2.0))  # no cluster of ten where two were expected
    assert many == pytest.approx(0.0, abs=1e-3)
    assert chance_of_luck(excess, np.array([0.0])) == 0.0  # a goal that counts no misses


def test_the_worst_goal_decides() -> None:
    excess = np.random.default_rng(1).normal([-10.0, -0.1], 3.0, (20, 2))
    both = chance_of_luck(excess, np.zeros(2))
    assert both == pytest.approx(chance_of_luck(excess[:, 1:], np.zeros(1)))
    assert both > 0.05


def test_however_many_are_tried_the_errors_allowed_add_up_to_what_the_plan_allows() -> None:
    luck = [0.05 / (LOOKS * attempt * (attempt + 1)) for attempt in range(1, 5000)]  # each adjusted to 5 %
    assert [adjusted_luck(each, i + 1, LOOKS) for i, each in enumerate(luck)] == pytest.approx([0.05] * len(luck))
    assert LOOKS * sum(luck) == pytest.approx(0.05, rel=1e-3)
    assert adjusted_luck(0.5, 3, LOOKS) == 1.0


def test_short_windows_are_added_until_they_can_rule_luck_out() -> None:
    """Four windows of two hundred requests prove nothing, 32 little; a candidate without a miss gets what it takes."""
    drawn = DrawnWindows({}, np.random.default_rng(8), requests=200, allowed=2.0, burst=0.0)
    drawn.question.spec.replications = 4
    (tried,) = pool(1)
    drawn.means[tried.name] = -2.0
    confirmed = Confirmer(cast(Judge, drawn), tried=4).confirm(drawn.look([tried], 4)[0])
    assert confirmed.meets
    assert len(confirmed.windows) > 4 << (LOOKS - 1)


def test_a_recommendation_rests_on_windows_of_another_seed() -> None:
    made = planner({**document(engines=[kind("one", 1, 2.0, 1.0)], replications=8), "seed": 3})
    best: dict[str, Any] = made.run()["recommendation"]
    assert best["seed"] == 3 + OTHER_SEED
    assert best["windows"] >= 8
