"""The installed summary of the error board names files that there are, and answers with the most alike rows."""

from __future__ import annotations

from dataclasses import replace

from latency_models.deployment.models import load_model
from latency_models.io.files import builtin_names
from latency_models.sources.roofline.placement import Placement
from latency_models.sources.roofline.spec import Cell, board_cell, built_in_board

FP8 = Placement(tensor_parallel=4, weights="fp8", experts="fp8")


def test_cells_are_of_built_in_models_and_devices() -> None:
    for cell in built_in_board().cells:
        assert cell.hardware in builtin_names("hardware")
        assert cell.model in ("", *builtin_names("models"))
        assert cell.median <= cell.p90


def test_the_most_alike_rows_answer() -> None:
    own = board_cell(load_model("minimax-m2.5"), "h200-sxm", FP8)
    assert (own.model, own.engine) == ("minimax-m2.5", "vllm")
    like = board_cell(load_model("qwen3-30b-a3b"), "h200-sxm", FP8)
    assert (like.model, like.family) == ("", "experts")
    assert board_cell(load_model("qwen3-30b-a3b"), "l40s", FP8) is None
    assert board_cell(load_model("minimax-m2.5"), "h200-sxm", replace(FP8, experts="int8")) is None


def test_a_sentence_says_error_rows_and_bias() -> None:
    numbers = {"rows": 54, "bias": -0.2, "median": 0.08, "p90": 0.3, "spread": 0.1}
    cell = Cell.model_validate({"family": "dense", "model": "a", "hardware": "b", "precision": "fp8", **numbers})
    off = "were 8 % off in the median of TPOT (54 rows, 20 % too fast on the whole)"
    assert cell.sentence() == f"measured rows like this one (a in fp8 on b) {off}"
