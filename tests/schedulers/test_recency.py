"""The recency list compared with an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from schedulers.eviction import Linked, RecencyList

CHANGES = st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove", "move_to_end"]), st.integers(0, 5)))


@given(CHANGES)
def test_as_an_ordered_dictionary(changes: list[tuple[str, int]]) -> None:
    entries = [Linked() for _ in range(6)]
    result, expected = RecencyList(), OrderedDict[int, None]()
    for change, number in changes:
        if (number in expected) == (change in ("append", "prepend")):
            continue  # an entry is in the list once
        getattr(result, change)(entries[number])
        if change == "remove":
            del expected[number]
        else:
            expected[number] = None
            expected.move_to_end(number, last=change != "prepend")
        assert [entries.index(entry) for entry in result] == list(expected)
        assert result.size == len(expected)
        assert result.last is (entries[next(reversed(expected))] if expected else None)
