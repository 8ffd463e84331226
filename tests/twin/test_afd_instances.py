"""Instances of several cards: what a bundle has of them, and the optimum when cards are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.deployment.hardware import Deployment, cards_of_ffn_instance
from latency_models.deployment.models import load_model
from twin.cli import run

DEEPSEEK = "calibration={hardware: h200-sxm, model: deepseek-v3, deployment: {ffn_cards: 32, precision: fp8}}"


def test_throughput_per_card_counts_the_cards_of_both_kinds(sweep) -> None:
    document = sweep("--ratio", "2,7/2", "--set", "instances={attention_cards: 2, ffn_cards: 8}")
    assert document["configurations"][0]["cards"] == {"attention": 2, "ffn": 8, "source": "scenario"}
    assert [point["cards"] for point in document["points"]] == [2 * 2 + 8, 7 * 2 + 2 * 8]
    for point in document["points"]:
        instances = point["attention_instances"] + point["ffn_instances"]
        for name in ("", "_theory", "_barrier"):
            total = point[f"throughput_per_instance{name}"] * instances
            assert point[f"throughput_per_card{name}"] == pytest.approx(total / point["cards"], rel=1e-12)


def test_the_best_by_card_is_not_the_best_by_instance(sweep) -> None:
    """With batches of 16 the FFN's fixed cost rules: r_peak = sqrt(100/(0.083 * 16)) = 8.7, times sqrt(16) by card."""
    document = sweep("--ratio", "4,8,16,32,64", "--set", "instances.ffn_cards=16", "--set", "requests_per_instance=300")
    theory, simulation = document["theory"], document["simulation"]
    assert simulation["best_ratio"] == 8
    assert simulation["best_ratio_per_card"] == 32
    assert simulation["best_topology_per_card"] == "32A-1F"
    assert theory["r_star_per_card"] == pytest.approx(4 * theory["r_star"], rel=1e-12)
    assert theory["r_star_barrier_per_card"] == pytest.approx(theory["r_star_per_card"], rel=5e-3)
    best = max(point["throughput_per_card_steady"] for point in document["points"])
    assert simulation["best_throughput_per_card"] == best
    low, high = simulation["best_range_per_card"]
    assert low <= 32 <= high


def test_a_derived_calibration_knows_its_cards(sweep) -> None:
    document = sweep("--set", DEEPSEEK, "--ratio", "2")
    assert document["configurations"][0]["cards"] == {"attention": 1, "ffn": 32, "source": "deployment"}
    assert document["points"][0]["cards"] == 34


def test_experts_per_card_alone_say_how_many_cards_there_are() -> None:
    model = load_model("deepseek-v3")
    assert cards_of_ffn_instance(model, Deployment(experts_per_card=10)) == 26  # 256 experts, 10 a card
    assert cards_of_ffn_instance(model, Deployment(ffn_cards=32, experts_per_card=10)) == 32
    assert cards_of_ffn_instance(load_model("llama-3.1-8b"), Deployment(ffn_cards=4)) == 4


def test_cards_counted_twice_are_refused(scenario: Path, refusal) -> None:
    assert "instances.ffn_cards: got 8, expected none" in refusal(
        "sweep", str(scenario), "--set", DEEPSEEK, "--set", "instances.ffn_cards=8"
    )


def test_the_table_leads_with_cards_where_there_are_several(
    scenario: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "600")
    arguments = ["sweep", str(scenario), "--jobs", "1", "--no-figures", "--ratio", "2,4"]
    assert run([*arguments, "--set", "instances.ffn_cards=8"]) == 0
    several = capsys.readouterr().out
    rows = [line.split() for line in several.splitlines()]
    assert "per card (1 an attention, 8 an FFN instance): r* = " in several
    assert ["r", "bundle", "cards", "per", "card"] in [row[:5] for row in rows]
    assert ["2", "2A-1F", "10"] in [row[:3] for row in rows]
    assert "is assumed" not in several
    assert run(arguments) == 0
    one_each = " ".join(capsys.readouterr().out.split())  # the note may be wrapped
    assert "per card" not in one_each
    assert "One card an instance is assumed (instances.attention_cards, instances.ffn_cards)." in one_each
