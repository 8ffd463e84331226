"""Models on an inventory of GPUs: the split among models against brute force, simulated rates, and the cost."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from reports.plan_report import inventory_report
from tests.twin.planning.scenarios import document, kind, question, simulations
from twin.cli.plan_options import api_price_of_text, commitments_of_texts
from twin.planning.cost import costs
from twin.planning.inventory import Demand, Option, best_split, demands_of, divide
from twin.planning.space import candidate, families
from workloads.errors import BadInput

QUESTION = question(document())


def option(model: str, gpu: str, rates: list[float]) -> Option:
    """An option of stated rates by number of GPUs."""
    return cast(Option, SimpleNamespace(model=model, gpu=gpu, rates=np.array(rates), question=QUESTION))


@pytest.mark.parametrize("wanted", [(None, None), (3.0, 4.0), (9.0, 2.0), (1.0, 1.0)])
def test_the_split_is_that_of_brute_force(wanted: tuple[float | None, float | None]) -> None:
    rng = np.random.default_rng(3)
    have = {"big": 4, "small": 3}
    options = [option(model, gpu, [0.0, *np.cumsum(rng.integers(0, 3, count)).astype(float)])
               for gpu, count in have.items() for model in "ab"]  # fmt: skip
    rates = {(option.model, option.gpu): option.rates for option in options}

    def score(split: dict[tuple[str, str], int]) -> tuple[float, ...]:
        ratios = []
        for model, rate in zip("ab", wanted, strict=True):
            ratio = sum(rates[model, gpu][split[model, gpu]] for gpu in have) / (rate or 1.0)
            ratios.append(ratio if rate is None else min(ratio, 1.0))
        met = sum(ratio >= 1.0 for ratio, rate in zip(ratios, wanted, strict=True) if rate is not None)
        return met, min(ratios), sum(ratios), -sum(split.values())

    every = [
        {("a", "big"): a, ("b", "big"): b, ("a", "small"): c, ("b", "small"): d}
        for a, b, c, d in itertools.product(range(5), range(5), range(4), range(4))
        if a + b <= 4 and c + d <= 3
    ]
    demands = [Demand(model, rate) for model, rate in zip("ab", wanted, strict=True)]
    assert score(best_split(have, demands, options)) == pytest.approx(max(map(score, every)))


def test_two_models_share_gpus_at_rates_that_simulation_confirms() -> None:
    def small(name: str, speed: float) -> Option:
        plan = document(
            layouts=["colocated"], vary={}, engines=[kind("one", 1, 2.0, speed)], limits={"gpus": 3},
            objective="throughput", goals={"ttft_p90": "300ms"}, commitments={"1y": 0.7},
            api={"input": 1.0, "output": 4.0},
        )  # fmt: skip
        return Option(name, "bf16", "X", question({**plan, "name": name}))

    options = [small("slow", 1.0), small("fast", 2.0)]
    served = divide({"X": 3}, [Demand("slow"), Demand("fast")], options, simulations()).document()
    assert {row["model"]: row["gpus"] for row in served["rows"]} == {"slow": 2, "fast": 1}
    assert served["feasible"]
    assert all(row["meets"] and row["sure"] is None for row in served["rows"])
    alone = next(entry for entry in served["rows"] if entry["model"] == "fast")
    assert alone["rate"] > 0.4 * sum(entry["rate"] for entry in served["rows"])
    on_demand, committed, api = served["costs"]
    assert on_demand["per_hour"] == 6.0
    assert committed["per_month"] == pytest.approx(0.7 * 6 * 730)
    assert api["per_hour"] == pytest.approx(6 * sum(m["rate"] for m in served["models"]) / on_demand["break_even_rate"])
    assert list(inventory_report(served))
    wants = [Demand("slow", 1e4), Demand("fast", 20.0)]
    short = divide({"X": 3}, wants, options, simulations(), brief=True).document()
    assert not short["feasible"]
    assert [model["met"] for model in short["models"]] == [False, True]
    assert "Too few: slow has" in short["answer"]


def test_whole_nodes_and_apis_have_their_price() -> None:
    stated = question(document(node_size=8, api={"input": 1.0, "output": 4.0}))
    deployment = candidate(stated.spec, families(stated)[0], (3,))
    row, api = costs(stated, [(stated, deployment)], 2.0)
    assert (row["per_hour"], row["nodes_per_hour"]) == (6.0, 16.0)
    lengths = stated.lengths()
    of_request = (lengths.prompts.mean() + 4 * lengths.answers.mean()) / 1e6
    assert api["per_hour"] == pytest.approx(of_request * 2.0 * 3600)
    assert row["break_even_rate"] == pytest.approx(6.0 / 3600 / of_request)


def test_texts_of_commitments_prices_and_rates() -> None:
    assert commitments_of_texts(["1y=-30%", "3y=-55%"]) == pytest.approx({"1y": 0.7, "3y": 0.45})
    assert api_price_of_text("in=0.5,out=1.5") == {"input": 0.5, "output": 1.5}
    assert demands_of(["a", "b"], ["a=2", "b=3"]) == [Demand("a", 2.0), Demand("b", 3.0)]
    for models, rates in ((["a", "b"], ["2"]), (["a", "b"], ["a=2"]), (["a"], ["b=2"]), (["a"], ["0"])):
        with pytest.raises(BadInput, match="--rate"):
            demands_of(models, rates)
    for text in ("in=1", "1,2", "in=1,out=x"):
        with pytest.raises(BadInput, match="in=PRICE,out=PRICE"):
            api_price_of_text(text)
    with pytest.raises(BadInput, match="1y=-30%"):
        commitments_of_texts(["1y=30%"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--have", "h100"], "--have: got 'h100', expected GPU=NUMBER"),
        (["--have", "h100=0"], "--have: got 'h100=0', expected a whole number"),
        (["--have", "h20=1"], "did you mean h200-sxm"),
        (["--have", "h100=1", "--gpu", "h100"], "--gpu: "),
    ],
)
def test_bad_inventories_are_one_line(flags: list[str], message: str, folder: Path, refusal) -> None:
    stated = ["--model", "qwen3-4b", "--slo", "ttft_p99=1s", "--prompt-tokens", "9", "--answer-tokens", "9"]
    assert message in refusal("plan", *stated, "--jobs", "1", *flags)
