"""Loads of engines, kept so that the least is known without a look at all of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

_NO_ENGINE: Final = 1 << 62
"""More than any load: fills the tree up to a power of two."""


class LoadTree:
    """The loads of n engines by position. Setting one and finding the least take O(log n).

    A complete binary tree in a list: the children of node i are nodes 2i and 2i + 1, each node holds the smaller of
    its children, and the leaves are the loads. A sorted list of the same loads counts those below one.
    """

    def __init__(self, loads: Iterable[int]) -> None:
        leaves = list(loads)
        first = 1
        while first < len(leaves):
            first *= 2
        nodes = [_NO_ENGINE] * first + leaves + [_NO_ENGINE] * (first - len(leaves))
        for node in range(first - 1, 0, -1):
            nodes[node] = min(nodes[2 * node], nodes[2 * node + 1])
        self._nodes = nodes
        self._first_leaf = first
        self._sorted = sorted(leaves)

    def set(self, position: int, load: int) -> None:
        nodes, node = self._nodes, self._first_leaf + position
        if nodes[node] == load:
            return
        del self._sorted[bisect_left(self._sorted, nodes[node])]
        insort(self._sorted, load)
        nodes[node] = load
        while node > 1:
            sibling = nodes[node ^ 1]
            minimum = load if load <= sibling else sibling
            node >>= 1
            if nodes[node] == minimum:
                break
            nodes[node] = load = minimum

    def first_least(self, start: int) -> int:
        """The first position with the smallest load, looking from `start` to the end and then from 0."""
        nodes, node = self._nodes, self._first_leaf + start
        minimum = nodes[1]
        if nodes[node] != minimum:
            # Up, until a subtree to the right has it: from a left child to its sibling.
            while node > 1 and (node & 1 or nodes[node + 1] != minimum):
                node >>= 1
            node = node + 1 if node > 1 else 1  # none from `start` on: the first of all
        while node < self._first_leaf:
            node *= 2
            if nodes[node] != minimum:
                node += 1
        return node - self._first_leaf

    def num_below(self, position: int) -> int:
        """The number of engines with less load than the one at a position."""
        return bisect_left(self._sorted, self._nodes[self._first_leaf + position])
