from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import BadInput
from workloads.request import TASKS, Request

ARGUMENTS = st.fixed_dictionaries(
    {
        "id": st.integers(),
        "arrival": st.floats(0, allow_infinity=False),
        "prompt_tokens": st.integers(0),
        "max_tokens": st.integers(0),
    },
    optional={
        "model": st.text(),
        "prefix_blocks": st.lists(st.integers(), max_size=3).map(tuple),
        "task": st.sampled_from(TASKS),
        "priority": st.integers(),
        "tenant": st.text(max_size=3),
        "service_class": st.text(max_size=3),
        "ttft_goal": st.floats(0, 100),
    },
)


def test_a_request_holds_what_a_client_sends() -> None:
    values = (7, 1.5, 100, 20, "chat", (4, 5), "score", -2, 9, "ours", "batch", 30.0)
    assert dataclasses.astuple(Request(*values)) == values
    assert Request(*values).deadline == 31.5
    plain = (7, 1.5, 100, 20, "default", (), "generate", 0, -1, "", "", math.inf)
    assert dataclasses.astuple(Request(7, 1.5, 100, 20)) == plain


def test_the_true_output_length_is_nowhere_in_it() -> None:
    names = {field.name for field in dataclasses.fields(Request)}
    prompt = {"prompt_tokens", "prefix_blocks", "session"}
    contract = {"priority", "tenant", "service_class", "ttft_goal"}
    assert names == {"id", "arrival", "max_tokens", "model", "task"} | prompt | contract


@pytest.mark.parametrize("arrival", [-1e-9, math.inf, -math.inf, math.nan])
def test_an_arrival_is_a_finite_time(arrival: float) -> None:
    with pytest.raises(BadInput, match=r"request 3: arrival: got .*expected a finite time"):
        Request(3, arrival, 1, 1)


@pytest.mark.parametrize(("prompt", "limit", "field"), [(-1, 1, "prompt_tokens"), (1, -1, "max_tokens")])
def test_lengths_are_not_negative(prompt: int, limit: int, field: str) -> None:
    with pytest.raises(BadInput, match=f"request 3: {field}: got -1"):
        Request(3, 0.0, prompt, limit)


def test_a_task_is_one_of_those_known() -> None:
    assert [Request(0, 0.0, 1, 1, task=task).task for task in TASKS] == list(TASKS)
    for task in ("chat", "", "Generate", None):
        with pytest.raises(BadInput, match=r"request 3: task: .*expected one of generate, classify, embed, score,"):
            Request(3, 0.0, 1, 1, task=task)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("limit", "short"), [(0, True), (1, True), (2, False), (500, False)])
def test_one_shot_is_all_but_generation_of_several_tokens(task: str, limit: int, short: bool) -> None:
    """Prelude's table 1: classify, embed, prompt-logprobs, K <= 1 generation."""
    assert Request(0, 0.0, 10, limit, task=task).one_shot is (short or task != "generate")


@given(ARGUMENTS)
def test_a_request_survives_printing_copying_and_pickling(arguments: dict[str, Any]) -> None:
    request = Request(**arguments)
    assert {name: getattr(request, name) for name in arguments} == arguments
    for again in (eval(repr(request)), copy.deepcopy(request), pickle.loads(pickle.dumps(request))):
        assert again == request
        assert hash(again) == hash(request)
