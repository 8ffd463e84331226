"""What confidence costs, and why alternatives lose."""

from __future__ import annotations

from dataclasses import replace

from reports.plan_report import plan_report
from tests.twin.planning.scenarios import kind, uncertain


def test_each_level_is_the_cheapest_deployment_that_reaches_it() -> None:
    search = uncertain()
    plan = search.run()
    search.brief = False  # the curve alone, without headroom and changes
    answer = replace(plan, curve=search._curve(plan.by_estimate)).document()
    levels = answer["confidence_curve"]
    assert [level["confidence"] for level in levels] == [None, 0.5, 0.8, 0.9, 0.95]
    by_estimate, best = answer["by_best_estimate"], answer["recommendation"]
    assert levels[0]["gpus"] == by_estimate["gpus"] < levels[3]["gpus"] == best["gpus"]
    trials = [search._confirming_trial(rung) for rung in search.search.ladder()]
    assert [trial.candidate.gpus for trial in trials] == sorted(trial.candidate.gpus for trial in trials)
    for level in levels[1:3]:
        reach = [trial.candidate.gpus for trial in trials if (trial.sure or 0) >= level["confidence"] - 1e-9]
        assert level["gpus"] == min([*reach, best["gpus"]])
    assert levels[4]["gpus"] is None or levels[4]["sure"] >= 0.95
    excesses = [entry["excess"] for entry in answer["narrowing"] if entry["excess"] is not None]
    assert excesses == sorted(excesses, reverse=True)
    assert answer["narrowing"][0]["about"] == by_estimate["costliest_unknown"]["about"]
    titles = [block.text for block in plan_report(answer) if hasattr(block, "style") and block.style == "heading"]
    assert titles.index("What confidence costs") < titles.index("What would narrow it, the most first")


def test_every_layout_has_a_line_and_the_goal_that_would_admit_it() -> None:
    apart = {"layouts": ["colocated", "disaggregated"], "link": {"bandwidth": 1e4, "bytes_per_token": 1e5}}
    slow = {"goals": {"ttft_p99": "300ms", "e2e_p50": "2s"}, "limits": {"engines": 4}}
    engines = [kind("one", 1, 2.0, 1.0)]
    answer = uncertain(engines=engines, **apart, **slow).run().document()
    layouts = {entry["layout"] for entry in answer["alternatives"]}
    assert "disaggregated" in layouts
    assert all(entry["why"] for entry in answer["alternatives"])
    unreachable = uncertain(engines=engines, goals={"tpot_p50": "5ms"}).run().document()
    (line,) = unreachable["alternatives"]
    assert "tpot_p50 is at least" in line["why"]
    admitting = line["admitted_by"].removeprefix("--slo tpot_p50=")
    assert float(admitting.removesuffix("ms")) > 5
