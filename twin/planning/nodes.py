"""Nodes of a deployment: engines are placed on whole machines, which is what a team rents.

An engine that fits a node shares it with others of the same device, and never lies across two. One that is larger than
a node has whole nodes to itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.deployment.hardware import load_hardware
from twin.planning.question import Question
from twin.planning.space import Candidate, document

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an engine: its first node, from 1 up, its span in nodes, and its first device there."""

    node: int
    span: int
    first: int


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of one device: their number, and the devices of each."""

    device: str
    count: int
    size: int

    def __str__(self) -> str:
        return f"{self.count} node{'s' if self.count > 1 else ''} of {self.size}"


def place(engines: Iterable[tuple[str, int, int]]) -> list[Place]:
    """The places of engines, each on the first node of its device that has room.

    Args:
        engines: the type of the device, devices of the engine, and devices of a node.
    """
    places: list[Place] = []
    num_used: dict[int, int] = {}  # devices, by the nodes that engines share
    types: dict[int, str] = {}
    num_nodes = 0
    for device, count, size in engines:
        shared = (node for node, used in num_used.items() if types[node] == device and used + count <= size)
        node = next(shared, None)
        if node is None:
            node, span = num_nodes + 1, math.ceil(count / size)
            num_nodes += span
            places.append(Place(node, span, 0))
            num_used[node], types[node] = span * size if span > 1 else count, device
        else:
            places.append(Place(node, 1, num_used[node]))
            num_used[node] += count
    return places


def node_size(step_time: Document, base: Path, stated: int | None) -> int | None:
    """Devices of a node: as stated, else as the hardware file of the step times says; None if neither does.

    Args:
        step_time: a section of a scenario, whose relative paths start from `base`.
    """
    hardware = step_time.get("hardware")
    if stated is not None or hardware is None:
        return stated
    return load_hardware(hardware, base).devices_per_node


def nodes_of(question: Question, candidate: Candidate) -> list[Nodes]:
    """The nodes of a deployment by their device; none where a size is not known."""
    family = candidate.family
    pools = document(question, family, candidate.sizes)["system"]["pools"]
    engines: list[tuple[str, int, int]] = []
    for pool, kind, replicas in zip(pools, family.kinds, family.engines(candidate.sizes), strict=True):
        size = node_size(pool.get("step_time") or {}, question.path.parent, question.spec.node_size)
        if size is None:
            return []
        engines += [(kind.device.type, kind.device.count, size)] * replicas
    counts: dict[tuple[str, int], set[int]] = {}
    for (device, _, size), spot in zip(engines, place(engines), strict=True):
        counts.setdefault((device, size), set()).update(range(spot.node, spot.node + spot.span))
    return [Nodes(device, len(numbers), size) for (device, size), numbers in counts.items()]
