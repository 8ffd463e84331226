"""AIConfigurator's answer as a candidate. The tables here are written after its documented columns, not by the tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.twin.planning.scenarios import document, kind, question
from twin.cli import run
from twin.planning.aiconfigurator_answer import candidates_of_answer
from workloads.errors import BadInput

AGG: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B", "isl": 200, "osl": 16, "concurrency": 32, "bs": 16, "ttft": 210.0, "tpot": 22.0,
    "seq/s": 15.0, "tokens/s": 240.0, "num_total_gpus": 2, "tp": 2, "pp": 1, "dp": 1, "moe_tp": 1, "moe_ep": 1,
    "parallel": "tp2pp1", "gemm": "fp8_block", "kvcache": "fp8", "moe": "bfloat16", "ctx_tokens": 512,
    "backend": "vllm", "version": "0.24.0", "system": "h200_sxm",
}  # fmt: skip
DISAGG: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B", "isl": 200, "osl": 16, "seq/s": 25.0, "num_total_gpus": 4, "ttft": 90.0, "tpot": 15.0,
    **{f"(p){key}": value for key, value in (("tp", 1), ("bs", 2), ("workers", 2), ("system", "h200_sxm"))},
    **{f"(d){key}": value for key, value in (("tp", 2), ("bs", 64), ("workers", 1), ("system", "h200_sxm"))},
}  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_folder_has_a_candidate_of_each_table(tmp_path: Path) -> None:
    asked = question(document())  # 40 requests a second
    folder = tmp_path / "Qwen3-32B_isl200_osl16"
    write(folder / "agg" / "best_config_topn.csv", AGG, {**AGG, "tp": 8})
    write(folder / "disagg" / "best_config_topn.csv", DISAGG)
    write(folder / "agg" / "pareto.csv", AGG)
    together, apart = candidates_of_answer(tmp_path, asked)
    # 40/15 and 40/25 replicas, rounded up; the plan's own engines of one and of two devices have the step times.
    assert (together.devices, apart.devices) == ("6 = 3×2", "8 = 4×1 P + 2×2 D")
    assert together.cost == 12.0
    assert together.family.given is not None
    (pool,) = together.family.given.sections["system"]["pools"]
    assert (pool["engine"]["max_num_seqs"], pool["engine"]["max_num_batched_tokens"]) == (16, 528)
    assert pool["step_time"]["source"] == "linear"
    assert apart.family.given is not None
    prefill, decode = apart.family.given.sections["system"]["pools"]
    assert prefill["engine"]["max_num_batched_tokens"] == 400
    assert decode["engine"]["max_num_seqs"] == 64


def test_engines_that_the_plan_lacks_get_step_times_of_data_sheets(tmp_path: Path) -> None:
    made = document(engines=[kind("one", 1, 2.0, 1.0)], prices={"h200-sxm": 3.5})
    made["engine"] = {key: value for key, value in made["engine"].items() if key != "num_gpu_blocks"}
    made["plan"]["engines"][0]["engine"] = {"num_gpu_blocks": 2000}
    (found,) = candidates_of_answer(write(tmp_path / "best_config_topn.csv", AGG), question(made))
    assert found.family.given is not None
    (pool,) = found.family.given.sections["system"]["pools"]
    step_time = pool["step_time"]
    assert (step_time["source"], step_time["model"], step_time["hardware"]) == ("roofline", "qwen3-32b", "h200-sxm")
    assert (step_time["weights"], step_time["cache"], step_time["tensor_parallel"]) == ("fp8", "fp8", 2)
    assert found.cost == 6 * 3.5


def test_stages_of_the_answer_are_stages_of_the_engine(tmp_path: Path) -> None:
    made = document(engines=[kind("one", 1, 2.0, 1.0)], prices={"h200-sxm": 3.5})
    made["engine"] = {key: value for key, value in made["engine"].items() if key != "num_gpu_blocks"}
    made["plan"]["engines"][0]["engine"] = {"num_gpu_blocks": 2000}
    row = {**AGG, "pp": 2, "num_total_gpus": 4}
    (found,) = candidates_of_answer(write(tmp_path / "best_config_topn.csv", row), question(made))
    assert found.family.given is not None
    (pool,) = found.family.given.sections["system"]["pools"]
    assert pool["engine"]["pipeline_parallel_size"] == pool["step_time"]["pipeline_parallel"] == 2
    assert pool["device"]["count"] == 4


def test_its_row_is_in_the_table_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(document(limits={"engines": 3})))
    write(tmp_path / "answer" / "agg" / "best_config_topn.csv", AGG)
    asked = ["plan", "plan.yaml", "--candidate", "answer", "--json", "--no-figures", "--brief", "--jobs", "1"]
    assert run(asked) == 0
    answer = json.loads(capsys.readouterr().out)
    (row,) = [each for each in answer["rows"] if each["parallelism"] == "given: answer (agg of AIConfigurator)"]
    assert row["devices"] == "6 = 3×2"
    assert row["summary"]["tpot"]["mean"] > 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seq/s": "fast"}, r"best_config_topn.csv:2: seq/s: got 'fast'"),
        ({"tp": 1.5}, r"tp: got '1.5', expected a whole number"),
        ({"moe_tp": 2, "moe_ep": 2}, r"moe_ep.*expected experts that are split or spread"),
        ({"model": "my/own", "tp": 4}, r"model: got 'my/own', expected one of .*qwen3-32b"),
        ({"system": "tpu", "tp": 4}, r"system: got 'tpu', expected one of .*h200-sxm"),
        ({"gemm": "int3", "tp": 4}, r"gemm: got 'int3', expected one of bfloat16"),
    ],
)
def test_errors_name_line_and_column(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    file = write(tmp_path / "best_config_topn.csv", {**AGG, **change})
    with pytest.raises(BadInput, match=expected):
        candidates_of_answer(file, question(document()))


def test_missing_tables_columns_and_links_are_named(tmp_path: Path) -> None:
    asked = question(document())
    with pytest.raises(BadInput, match=r"expected agg/best_config_topn.csv"):
        candidates_of_answer(tmp_path, asked)
    with pytest.raises(BadInput, match="bs"):
        candidates_of_answer(write(tmp_path / "a.csv", {key: AGG[key] for key in AGG if key != "bs"}), asked)
    together = question(document(layouts=["colocated"], link=None))
    with pytest.raises(BadInput, match=r"plan.link.*expected a link"):
        candidates_of_answer(write(tmp_path / "b.csv", DISAGG), together)
