"""Questions without a file: names, formats as published, and settings that take effect or are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.plan_report import ledger_lines
from tests.twin.planning.scenarios import document
from twin.planning.catalogue import CatalogueQuestion, of_every_engine, scenario_of
from twin.planning.question import read_question
from twin.planning.result import measured_like, untried
from twin.planning.space import document as candidate_document
from twin.planning.space import families
from workloads.errors import BadInput

GOALS = {"ttft_p99": 2.0, "tpot_mean": 0.06}


def scenario(model: str, gpu: str = "h100", **fields: Any) -> dict[str, Any]:
    question = CatalogueQuestion(
        model, [gpu], GOALS, 1.0, prompt_tokens=500, answer_tokens=50, layouts=("colocated",), **fields
    )
    return scenario_of(question)


def weights_on_each(document: dict[str, Any], settings: dict[str, Any] | None = None) -> dict[str, float]:
    """Bytes of weights on a device of each kind of engine that can be had."""
    question = read_question(document, of_every_engine(settings or {}, document), Path("plan"))
    weight_bytes = {}
    for family in families(question):
        try:
            plan = question.plan(candidate_document(question, family, (1,)))
        except BadInput:
            continue
        measured = plan.step_time.measured_deployment()
        assert measured.weights is not None
        weight_bytes[family.kinds[0].name] = measured.weights
    return weight_bytes


@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_gpt_oss_fits_on_one_gpu_as_it_is_published(weights: str | None) -> None:
    for model in ("gpt-oss-120b", "openai/gpt-oss-120b"):
        weight_bytes = weights_on_each(scenario(model, weights=(weights,)))
        assert weight_bytes["tp1"] == pytest.approx(65.2e9, rel=0.01)
        assert weight_bytes.keys() == {"tp1", "tp2", "tp4", "tp8"}
    assert weights_on_each(scenario("gpt-oss-120b", weights=("bf16",))).keys() == {"tp4", "tp8"}


def test_deepseek_r1_fits_on_eight_h200() -> None:
    assert weights_on_each(scenario("deepseek-ai/DeepSeek-R1", "h200")).keys() == {"tp8", "tp1-dp8"}
    assert not weights_on_each(scenario("deepseek-ai/DeepSeek-R1", "h200", weights=("bf16",)))


def test_attention_replicas_share_whole_experts_within_a_node_and_over_nodes() -> None:
    question = scenario("deepseek-v3", "h200", degrees=(1,), replicas=(1, 8, 16))
    weight_bytes = weights_on_each(question)
    assert weight_bytes.keys() == {"tp1-dp8", "tp1-dp16"}  # a single GPU has too little memory
    kinds = {kind["name"]: kind for kind in question["plan"]["engines"]}
    assert kinds["tp1-dp16"]["device"]["count"] == kinds["tp1-dp16"]["engine"]["data_parallel_size"] == 16
    experts = 2 * (weight_bytes["tp1-dp8"] - weight_bytes["tp1-dp16"])  # the rest is on every device
    assert 8 * experts == pytest.approx(656e9, rel=0.02)


def test_a_setting_of_the_step_times_is_one_of_every_engine() -> None:
    bf16 = scenario("gpt-oss-120b", weights=("bf16",))
    assert "tp1" in weights_on_each(bf16, {"step_time.experts": "mxfp4"})


def test_a_setting_that_no_engine_reads_is_refused(refused) -> None:
    line = refused(document(), "--set", "step_time.overhead=1")
    assert "--set: got 'step_time.overhead', expected plan.engines.one.step_time.overhead" in line


@pytest.mark.parametrize("flag", ["--weights", "--cache", "--tensor-parallel", "--layout", "--chunk", "--gpu"])
def test_flags_of_a_question_without_a_file_are_refused_beside_one(flag: str, refused) -> None:
    assert f"{flag}: " in refused(document(), flag, "1")


@pytest.mark.parametrize(
    ("model", "gpu", "message"),
    [
        ("llama-3.4-70b", "h200", r"--model: got 'llama-3.4-70b', expected .*\(did you mean llama-3.3-70b\?\)"),
        ("llama-3.3-70b", "h20", r"--gpu: got 'h20', expected .*\(did you mean h200-sxm\?\)"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(model: str, gpu: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        scenario(model, gpu)


def test_a_price_goes_by_the_name_that_was_given_or_meant() -> None:
    for name in ("h200", "h200-sxm"):
        assert scenario("qwen3-4b", "h200", prices={name: 3.5})["plan"]["prices"] == {"h200-sxm": 3.5}


def test_the_error_of_measured_rows_like_the_engines_is_said() -> None:
    """Llama-3.3-70B has the shapes of Llama-3.1-70B, which was measured; nothing like the other was."""
    asked = read_question(scenario("llama-3.3-70b", "h200", weights=("fp8",)), {}, Path("plan"))
    (sentence,) = measured_like(asked, asked.spec.engines)
    assert sentence.startswith("Measured rows like this one (llama-3.1-70b in fp8 on h200-sxm, vllm) were ")
    elsewhere = read_question(scenario("llama-3.1-8b", "l40s"), {}, Path("plan"))
    assert measured_like(elsewhere, elsewhere.spec.engines) == []


def test_engines_that_were_not_tried_are_said_where_they_matter() -> None:
    def untried_engines(model: str, settings: dict[str, Any] | None = None, **question: Any) -> list[str]:
        return untried(read_question(scenario(model, "h200", **question), settings or {}, Path("plan")))

    assert untried_engines("deepseek-v3") == []  # engines of eight replicas are among them
    (latent,) = untried_engines("deepseek-v3", replicas=(1,))
    assert latent.startswith("Engines with data-parallel attention and spread experts were not tried: deepseek-v3")
    assert latent.endswith("each has a whole copy of its latent KV cache.")
    (sparse,) = untried_engines("qwen3-30b-a3b")
    assert "latent" not in sparse
    assert untried_engines("llama-3.3-70b") == []
    spread = {"plan.engines.tp2.step_time.data_parallel": 4, "plan.engines.tp2.engine.data_parallel_size": 4}
    assert untried_engines("deepseek-v3", spread) == []
    single = read_question(scenario("gpt-oss-20b", degrees=(1,)), {}, Path("plan"))
    assert untried(single) == []  # nothing is split
    ended = {"ledger": [{"status": "infeasible", "reason": "slow"}], "evaluated": 1, "notes": [latent]}
    assert ledger_lines(ended)[1:] == ["1 infeasible; for example: slow", latent]
