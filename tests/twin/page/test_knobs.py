"""The knobs of a scenario, the fields that they set, and the links that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.twin.page.scenarios import roofline
from tests.twin.serving.scenarios import scenario
from twin.page.questions import Choices, Inquiry


def inquiry(document: dict[str, Any] | None = None) -> Inquiry:
    return Inquiry(document or roofline(), Path("s.yaml"))


def changed(**choices: Any) -> dict[str, Any]:
    question = inquiry()
    return question.changed(question.choices({}) | choices)


def test_the_knobs_of_a_scenario_have_its_values() -> None:
    values = {knob.name: knob.value for knob in inquiry().knobs}
    assert values == {
        "rate": 4.0, "prompt": 500.0, "answer": 100.0, "model": "llama-3.1-8b", "gpu": "h100-sxm", "tp": "1",
        "weights": "bf16", "layout": "together", "engines": 1, "prefill": 1, "seqs": 128, "chunk": 4096, "ttft": 0.5,
        "tpot": 0.05, "batch": 64,
    }  # fmt: skip


def test_a_scenario_with_its_own_step_times_has_no_model_to_choose() -> None:
    names = {knob.name for knob in inquiry(scenario()).knobs}
    assert {"seqs", "chunk", "layout"} <= names
    assert not {"model", "gpu", "tp", "batch"} & names


def test_nothing_chosen_changes_nothing_but_states_the_goals() -> None:
    document = roofline()
    assert changed() == document | {"measure": {"slo": {"ttft": 0.5, "tpot": 0.05}}}


def test_choices_set_their_fields() -> None:
    document = changed(rate=7.5, answer=40, seqs=32, tp="2", gpu="h200-sxm", tpot=0.03)
    assert document["workload"]["arrivals"]["rate"] == 7.5
    assert document["workload"]["decode"]["mean"] == 40
    assert document["engine"]["max_num_seqs"] == 32
    assert (document["step_time"]["tensor_parallel"], document["step_time"]["hardware"]) == (2, "h200-sxm")
    assert document["measure"]["slo"] == {"ttft": 0.5, "tpot": 0.03}


def test_weights_are_those_of_the_chosen_model_as_published() -> None:
    assert changed(weights="fp8")["step_time"]["weights"] == "fp8"
    assert changed(weights="as published", model="gpt-oss-20b")["step_time"]["weights"] is None
    document = roofline()
    del document["step_time"]["weights"]
    question = inquiry(document)
    (knob,) = [knob for knob in question.knobs if knob.name == "weights"]
    assert (knob.value, knob.options) == ("as published", ("as published", "bf16", "fp8"))
    assert "weights" not in question.changed(question.choices({"model": "gpt-oss-20b"}))["step_time"]


def test_engines_are_taken_apart_with_a_link_for_the_caches() -> None:
    system = changed(layout="apart", engines=3, prefill=2)["system"]
    link = system.pop("link")
    assert system == {
        "layout": "disaggregated", "routing": "least_loaded", "prefill_replicas": 2, "decode_replicas": 3,
    }  # fmt: skip
    assert link["bytes_per_token"] == 131072  # 32 layers, 8 heads of 128, keys and values, 2 bytes
    assert changed(engines=3)["system"] == {"replicas": 3}


@given(st.data())
def test_links_restore_choices(data: st.DataObject) -> None:
    question = inquiry()
    choices: Choices = {
        knob.name: data.draw(st.sampled_from(knob.options))
        if knob.options
        else knob.whole(data.draw(st.floats(knob.low, knob.high)))
        for knob in question.knobs
    }
    assert question.choices(question.link(choices)) == choices


@pytest.mark.parametrize("query", [{"rate": "fast"}, {"rate": "-1"}, {"rate": "nan"}, {"model": "gpt-17"}, {"x": "1"}])
def test_links_that_say_what_cannot_be_are_left_aside(query: dict[str, str]) -> None:
    question = inquiry()
    assert question.choices(query) == {knob.name: knob.value for knob in question.knobs}


def test_settings_name_only_what_differs() -> None:
    question = inquiry()
    choices = question.choices({"rate": "5"})
    assert question.settings(choices) == {
        "workload.arrivals.rate": 5.0,
        "measure.slo.tpot": 0.05,
    }
    assert question.link(choices) == {"rate": "5.0"}
