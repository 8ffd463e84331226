"""Nodes that a deployment is placed on, and its cost: by the hour and the month, by commitment, beside an API's price.

An engine that fits a node shares it with others of the same device, and never lies across two. One that is larger than
a node has whole nodes to itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from latency_models.deployment.hardware import load_hardware
from twin.planning.question import Document, Question
from twin.planning.space import Candidate, document


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

    `engines`: the type of the device, devices of the engine, and devices of a node.
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

    `step_time`: a section of a scenario, whose relative paths start from `base`.
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


HOURS_A_MONTH = 730.0

ON_DEMAND = "on demand"


def cost_of_nodes(question: Question, candidate: Candidate) -> float | None:
    """The price per hour of all GPUs of the nodes that a deployment is placed on; None without prices or sizes."""
    prices = {kind.device.type: question.spec.price(kind.device) for kind in candidate.family.kinds}
    nodes = nodes_of(question, candidate)
    costs = [price * group.count * group.size for group in nodes if (price := prices[group.device]) is not None]
    return sum(costs) if nodes and len(costs) == len(nodes) else None


def costs(question: Question, deployments: Sequence[tuple[Question, Candidate]], rate: float | None) -> list[Document]:
    """Rows of the cost of deployments together: by commitment, and of an API at the same rate; none without prices.

    `question`: has the commitments, the price of an API and the lengths. `deployments`: with their own questions.
    `rate`: requests per second in all; None where there is none.
    """
    prices = [candidate.cost for _, candidate in deployments]
    nodes = [cost_of_nodes(stated, candidate) for stated, candidate in deployments]
    if not prices or None in prices:
        return []
    per_hour = sum(price for price in prices if price is not None)
    whole = None if None in nodes else sum(price for price in nodes if price is not None)
    api, of_request = question.spec.api, None
    if api is not None:  # the price of a request of mean lengths
        lengths = question.lengths()
        of_request = float(lengths.prompts.mean() * api.input + lengths.answers.mean() * api.output) / 1e6
    rows = [
        _row(name, share * per_hour, None if whole is None else share * whole, of_request)
        for name, share in {ON_DEMAND: 1.0, **question.spec.commitments}.items()
    ]
    if of_request is not None and rate is not None:
        rows.append(_row("API", of_request * rate * 3600, None, None))
    return rows


def _row(name: str, per_hour: float, nodes: float | None, of_request: float | None) -> Document:
    return {
        "commitment": name,
        "per_hour": per_hour,
        "per_month": per_hour * HOURS_A_MONTH,
        "nodes_per_hour": nodes,
        "break_even_rate": None if not of_request else per_hour / 3600 / of_request,
    }
