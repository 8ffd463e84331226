"""AIConfigurator's answer as a candidate. The tables have the columns and names that 0.12 writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.twin.planning.scenarios import document, kind, question
from twin.planning.given import candidates_of_answer
from twin.planning.space import Candidate
from workloads.errors import BadInput

AGG: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B", "isl": 200, "osl": 16, "prefix": 0, "concurrency": 16, "request_rate": 15.0, "bs": 16,
    "global_bs": 16, "ttft": 210.0, "tpot": 22.0, "request_latency": 540.0, "encoder_latency": 0,
    "encoder_memory": 0.0, "seq/s": 15.0, "seq/s/gpu": 7.5, "tokens/s": 240.0, "tokens/s/gpu": 120.0,
    "tokens/s/user": 45.4, "num_total_gpus": 2, "tp": 2, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "cp": 1,
    "parallel": "tp2pp1dp1etp1ep1", "gemm": "fp8_block", "kvcache": "fp8", "fmha": "bfloat16", "moe": "bfloat16",
    "comm": "half", "memory": 43.0, "balance_score": 0.076, "num_ctx_reqs": 3.0, "num_gen_reqs": 13.0,
    "num_tokens": 525.0, "ctx_tokens": 512, "gen_tokens": 13.0, "backend": "vllm", "version": "0.24.0",
    "system": "h200_sxm", "power_w": 0.0, "tokens/s/gpu_cluster": 120.0,
}  # fmt: skip
WORKER: dict[str, Any] = {
    "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1, "parallel": "tp1pp1dp1etp1ep1", "gemm": "fp8_block", "kvcache": "fp8",
    "fmha": "bfloat16", "moe": "fp8_block", "comm": "half", "memory": 40.0, "backend": "vllm", "version": "0.24.0",
    "system": "h200_sxm",
}  # fmt: skip
DISAGG: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B", "isl": 200, "osl": 16, "prefix": 0, "concurrency": 64, "request_rate": 25.0,
    "seq/s": 25.0, "num_total_gpus": 4, "ttft": 90.0, "tpot": 15.0,
    **{f"(p){key}": value for key, value in {**WORKER, "tp": 1, "bs": 2, "global_bs": 2, "workers": 2}.items()},
    **{f"(d){key}": value for key, value in {**WORKER, "tp": 2, "bs": 64, "global_bs": 64, "workers": 1}.items()},
    "(e)workers": 0, "(e)tp": 0, "power_w": 0.0,
}  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B_h200_sxm_vllm_isl200_osl16_ttft300_tpot40_735296", "Qwen3-32B", ""])
def test_a_folder_has_a_candidate_of_each_table(name: str, tmp_path: Path) -> None:
    answers = question(document())  # 40 requests a second
    folder = tmp_path / name
    write(folder / "agg" / "best_config_topn.csv", AGG, {**AGG, "tp": 8})
    write(folder / "disagg" / "best_config_topn.csv", DISAGG)
    write(folder / "agg" / "pareto.csv", AGG)
    together, apart = candidates_of_answer(tmp_path, answers)
    # 40/15 and 40/25 replicas, rounded up; the plan's own engines of one and of two devices have the step times.
    assert (together.devices, apart.devices) == ("6 = 3×2", "8 = 4×1 P + 2×2 D")
    assert together.cost == 12.0
    (pool,) = together.family.given.sections["system"]["pools"]
    assert (pool["engine"]["max_num_seqs"], pool["engine"]["max_num_batched_tokens"]) == (16, 528)
    assert pool["step_time"]["source"] == "linear"
    prefill, decode = apart.family.given.sections["system"]["pools"]
    assert prefill["engine"]["max_num_batched_tokens"] == 400
    assert decode["engine"]["max_num_seqs"] == 64


def without_engines(**section: Any) -> dict[str, Any]:
    """A question whose engines have other numbers of GPUs than the answer."""
    scenario = document(engines=[kind("one", 1, 2.0, 1.0)], prices={"h200-sxm": 3.5}, **section)
    scenario["engine"] = {key: value for key, value in scenario["engine"].items() if key != "num_gpu_blocks"}
    scenario["plan"]["engines"][0]["engine"] = {"num_gpu_blocks": 2000}
    return scenario


def pools_of(row: dict[str, Any], folder: Path, scenario: dict[str, Any]) -> tuple[Candidate, list[dict[str, Any]]]:
    """The candidate of a table of one row, and its pools."""
    (candidate,) = candidates_of_answer(write(folder / "best_config_topn.csv", row), question(scenario))
    return candidate, candidate.family.given.sections["system"]["pools"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, {"source": "roofline", "model": "Qwen/Qwen3-32B", "hardware": "h200-sxm", "weights": "fp8", "cache": "fp8",
              "tensor_parallel": 2}),
        ({"pp": 2, "num_total_gpus": 4}, {"pipeline_parallel": 2}),
        (
            {"model": "openai/gpt-oss-120b", "tp": 1, "dp": 4, "moe_tp": 4, "gemm": "bfloat16", "moe": "w4a16_mxfp4"},
            {"data_parallel": 4, "expert_parallel": False, "weights": "bf16", "experts": "mxfp4"},
        ),
        (
            {"model": "deepseek-ai/DeepSeek-V3", "tp": 1, "dp": 16, "moe_ep": 16, "moe": "fp8_block"},
            {"data_parallel": 16, "expert_parallel": True, "weights": "fp8", "experts": "fp8"},
        ),
        (
            {"model": "nvidia/Llama-3.1-70B-Instruct-FP8", "gemm": "fp8_static", "moe": "fp8"},
            {"data_parallel": 1, "expert_parallel": False, "weights": "fp8", "experts": "fp8"},
        ),
        (
            {"model": "/models/Qwen3-235B-A22B", "tp": 4, "moe_tp": 4, "gemm": "fp8_block", "moe": "fp8_block",
             "system": "gb200"},
            {"data_parallel": 1, "expert_parallel": False, "weights": "fp8", "hardware": "gb200"},
        ),
    ],
)  # fmt: skip
def test_its_model_ids_systems_and_formats_are_known(
    row: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The plan lacks such engines, so that they get step times of data sheets. Three replicas bear the rate."""
    candidate, (pool,) = pools_of(AGG | row, tmp_path, without_engines())
    assert {key: pool["step_time"][key] for key in expected} == expected
    assert pool["device"]["count"] == row.get("tp", 2) * row.get("dp", 1) * row.get("pp", 1)
    assert pool["engine"].get("pipeline_parallel_size", 1) == row.get("pp", 1)
    priced = pool["device"]["type"] == "h200-sxm"
    assert candidate.cost == (3 * pool["device"]["count"] * 3.5 if priced else None)


def test_a_row_whose_experts_are_both_split_and_spread_is_passed_over(tmp_path: Path) -> None:
    mixed = AGG | {"model": "deepseek-ai/DeepSeek-V3", "tp": 1, "dp": 8, "moe_tp": 2, "moe_ep": 4, "moe": "fp8_block"}
    file = write(tmp_path / "best_config_topn.csv", mixed, mixed | {"moe_tp": 1, "moe_ep": 8, "bs": 9})
    (candidate,) = candidates_of_answer(file, question(without_engines()))
    assert candidate.family.given.sections["engine"]["max_num_seqs"] == 9


def test_a_large_batch_of_decodes_has_as_many_tokens_a_step(tmp_path: Path) -> None:
    _, (_, decode) = pools_of(DISAGG | {"(d)bs": 3000}, tmp_path, document())
    assert (decode["engine"]["max_num_seqs"], decode["engine"]["max_num_batched_tokens"]) == (3000, 3000)


def test_its_row_is_in_the_table_of_the_plan(command, folder: Path) -> None:
    write(folder / "answer" / "agg" / "best_config_topn.csv", AGG)
    flags = ("--candidate", "answer", "--json", "--no-figures", "--brief")
    answer = command(document(limits={"engines": 3}), *flags)
    (row,) = [row for row in answer["rows"] if row["parallelism"] == "given: answer (agg of AIConfigurator)"]
    assert row["devices"] == "6 = 3×2"
    assert row["summary"]["tpot"]["mean"] > 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seq/s": "fast"}, r"best_config_topn.csv:2: seq/s: got 'fast'"),
        ({"tp": 1.5}, r"tp: got '1.5', expected a whole number"),
        ({"moe_tp": 2, "moe_ep": 2}, r"moe_ep.*expected experts that are split or spread"),
        ({"model": "my/own", "tp": 4}, r"model: got 'my/own', expected one of .*qwen3-32b"),
        ({"system": "abacus", "tp": 4}, r"system: got 'abacus', expected one of .*h200-sxm"),
        ({"gemm": "int3", "tp": 4}, r"gemm: got 'int3', expected one of bfloat16"),
    ],
)
def test_errors_name_line_and_column(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    file = write(tmp_path / "best_config_topn.csv", {**AGG, **change})
    with pytest.raises(BadInput, match=expected):
        candidates_of_answer(file, question(document()))


def test_missing_tables_columns_and_links_are_named(tmp_path: Path) -> None:
    answers = question(document())
    write(tmp_path / "a/b/c/d/e/agg" / "best_config_topn.csv", AGG)  # a folder is not walked to its end
    with pytest.raises(BadInput, match=r"expected agg/best_config_topn.csv"):
        candidates_of_answer(tmp_path, answers)
    with pytest.raises(BadInput, match="bs"):
        candidates_of_answer(write(tmp_path / "a.csv", {key: AGG[key] for key in AGG if key != "bs"}), answers)
    together = question(document(layouts=["colocated"], link=None))
    with pytest.raises(BadInput, match=r"plan.link.*expected a link"):
        candidates_of_answer(write(tmp_path / "b.csv", DISAGG), together)
