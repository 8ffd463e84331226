from __future__ import annotations

import dataclasses
import math

import pytest

from workloads.errors import BadInput
from workloads.request import Request


def test_a_request_holds_what_a_client_sends() -> None:
    request = Request(7, 1.5, 100, 20, "chat", (4, 5))
    assert dataclasses.astuple(request) == (7, 1.5, 100, 20, "chat", (4, 5))
    assert Request(7, 1.5, 100, 20).model == "default"
    assert Request(7, 1.5, 100, 20).prefix_blocks == ()


def test_the_true_output_length_is_nowhere_in_it() -> None:
    names = {field.name for field in dataclasses.fields(Request)}
    assert names == {"id", "arrival", "prompt_tokens", "max_tokens", "model", "prefix_blocks"}


def test_it_is_frozen_slotted_and_hashable() -> None:
    request = Request(0, 0.0, 1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.arrival = 1.0  # type: ignore[misc]
    assert not hasattr(request, "__dict__")
    assert {request: "seen"}[Request(0, 0.0, 1, 1)] == "seen"


def test_nothing_to_read_and_nothing_to_write_is_allowed() -> None:
    assert Request(0, 0.0, 0, 0).max_tokens == 0


@pytest.mark.parametrize("arrival", [-1e-9, math.inf, -math.inf, math.nan])
def test_an_arrival_is_a_finite_time(arrival: float) -> None:
    with pytest.raises(BadInput, match=r"request 3: arrival: got .*expected a finite time"):
        Request(3, arrival, 1, 1)


@pytest.mark.parametrize(("prompt", "limit", "field"), [(-1, 1, "prompt_tokens"), (1, -1, "max_tokens")])
def test_lengths_are_not_negative(prompt: int, limit: int, field: str) -> None:
    with pytest.raises(BadInput, match=f"request 3: {field}: got -1"):
        Request(3, 0.0, prompt, limit)
