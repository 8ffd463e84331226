"""The page of a plan: its answer, its deployments to compare, and every candidate with its reason."""

from __future__ import annotations

from typing import Any

from tests.reports.pages.page_contents import Tables, columns, models
from tests.reports.rendering import lines_of, page_of
from tests.reports.serving.documents import spread


def row(name: str, layout: str, gpus: int, user: float, meets: bool) -> dict[str, Any]:
    """A deployment whose GPUs give 100 tokens/s each."""
    goal = {"name": "ttft_p99", "limit": 0.5, "value": 0.4 if meets else 0.6, "interval": [0.35, 0.45], "met": meets}
    return {
        "name": name, "layout": layout, "parallelism": "TP 2", "settings": {"max_num_batched_tokens": 512 * gpus},
        "gpus": gpus, "devices": f"{gpus} = {gpus}×1", "cost_per_hour": None, "cost_per_million_output_tokens": None,
        "output_throughput": 100.0 * gpus, "tokens_per_second_per_gpu": 100.0, "tokens_per_second_per_user": user,
        "goals": [goal], "probability": 0.97 if meets else 0.1, "sure": 0.95 if meets else None, "meets": meets,
        "role": "recommended" if meets else "alternative", "routing": "least_loaded", "summary": {"ttft": spread(0.16)},
    }  # fmt: skip


def candidate(name: str, status: str, reason: str) -> dict[str, Any]:
    return {
        "name": name, "layout": "colocated", "parallelism": "TP 2", "settings": {"max_num_batched_tokens": 512},
        "sizes": [1], "gpus": 2, "cost_per_hour": None, "status": status, "reason": reason,
    }  # fmt: skip


def plan(**changes: Any) -> dict[str, Any]:
    rows = [row("a", "colocated", 2, 40.0, True), row("b", "disaggregated", 4, 60.0, False)]
    ledger = [candidate("a", "feasible", ""), candidate("c", "saturated", "5 requests/s <arrive>")]
    return {
        "schema": "twin.plan/1", "name": "chat", "note": "Simulated.", "answer": "Take 2 GPUs.", "feasible": True,
        "question": {"goals": {"ttft_p99": 0.5}, "arrivals": "Poisson arrivals",
                     "window": {"requests": 1500, "warmup": 1.4}},
        "recommendation": rows[0], "nearest_miss": None, "rows": rows,
        "headroom": {"rate": 12.0, "factor": 1.2, "binds": "ttft_p99", "beyond": "ttft_p99 is 600 ms"},
        "changes": [{"change": "rate +20 %", "meets": False, "probability": 0.2, "sure": None, "reason": "slow"}],
        "evaluated": 1, "ledger": ledger, **changes,
    }  # fmt: skip


def test_a_plan_has_its_answer_its_goals_and_what_would_change_it() -> None:
    page = page_of(plan(), {"command": "twin plan chat.yaml"})
    tables = Tables(page)
    assert tables.loaded == []
    assert "Take 2 GPUs." in page
    assert ["1", "2 = 2×1", "TP 2", "1024", "100", "40", "400 ±50 ms ✓", "95 %", "97 %"] in tables.rows
    assert ["rate +20 %", "✗", "–", "20 %", "slow"] in tables.rows
    assert "Max load: 12 requests/s (+20 %). A little above: ttft_p99 is 600 ms." in page


def test_prices_are_shown() -> None:
    rows = [item | {"cost_per_hour": 5.2} for item in plan()["rows"]]
    assert ["1", "2 = 2×1", "TP 2", "1024", "5.2", "–", "100", "40", "400 ±50 ms ✓", "95 %", "97 %"] in Tables(
        page_of(plan(rows=rows), {})
    ).rows


def test_80_columns_keep_the_price_and_the_chosen_settings() -> None:
    goals = [{"name": name, "limit": 0.5, "value": 0.0154, "interval": [0.0150, 0.0158], "met": True}
             for name in ("ttft_p99", "itl_p95")]  # fmt: skip
    priced = {"cost_per_hour": 32.4, "cost_per_million_output_tokens": 0.123, "goals": goals, "devices": "8 = 2×4"}
    rows = [item | priced for item in plan()["rows"]]
    question = plan()["question"] | {"goals": {"ttft_p99": 0.5, "itl_p95": 0.5}, "arrivals": "Poisson"}
    lines = lines_of(plan(rows=rows, question=question), 80)
    (left_out,) = (line for line in lines if line.startswith("Left out"))
    assert "$/M tokens" in left_out
    assert "$/h" not in left_out
    assert "max_num_batched_tokens" not in left_out
    for text in ("$/h", "32.4", "1024", "15.4 ±0.4 ms ✓"):
        assert text in "\n".join(lines)


def test_deployments_are_compared_by_throughput_and_interactivity() -> None:
    page = page_of(plan())
    explored = next(item for item in columns(page) if "#verdict" in item)
    assert explored["user"] == [40.0, 60.0]
    assert explored["output_throughput_per_device"] == [100.0, 100.0]
    assert explored["#verdict"] == ["recommended", "misses a goal"]
    assert explored["devices"] == [2, 4]
    axes = {item["title"]: item["value"] for item in models(page, "Select")}
    assert axes == {"horizontal": "user", "vertical": "output_throughput_per_device", "colour": "#verdict"}


def test_every_candidate_is_there_with_its_reason() -> None:
    page = page_of(plan())
    ledger = next(item for item in columns(page) if ["feasible", "saturated"] in item.values())
    assert ["", "5 requests/s <arrive>"] in ledger.values()
    assert {item["title"] for item in models(page, "MultiChoice")} >= {"only status"}


def test_a_plan_without_a_feasible_candidate_names_the_nearest_miss() -> None:
    miss = row("b", "colocated", 4, 60.0, False) | {"reason": "ttft_p99 is 600 ms"}
    page = page_of(plan(feasible=False, recommendation=None, nearest_miss=miss, headroom=None, rows=[]), {})
    assert "Nearest miss: 4 = 4×1 (TP 2, max_num_batched_tokens 2048). ttft_p99 is 600 ms." in page
    assert "Deployments" not in page
