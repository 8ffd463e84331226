"""Registries: names in order, one entry a name, and unknown names answered with those there are."""

from __future__ import annotations

import pytest

from schedulers.scheduling_policies import PREEMPTION_POLICIES
from workloads.registry import Registry


def test_a_plug_in_adds_itself_by_name() -> None:
    registry: Registry[type] = Registry(whole=int)

    @registry.register("text")
    class Text(str):
        pass

    assert registry.select("text") is Text
    assert list(registry) == ["whole", "text"]


def test_a_name_is_given_once() -> None:
    registry: Registry[type] = Registry(whole=int)
    with pytest.raises(ValueError, match="expected a name that is not registered, found 'whole'"):
        registry.register("whole")
    assert registry == {"whole": int}


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^expected one of newest, lowest_priority, fewest_outputs, found 'oldest'$"):
        PREEMPTION_POLICIES.select("oldest")
