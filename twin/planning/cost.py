"""The cost of a deployment: by the hour and the month, by commitment, on whole nodes, and beside an API's price."""

from __future__ import annotations

from collections.abc import Sequence

from scenarios.planning import ApiPrice
from twin.planning.nodes import nodes_of
from twin.planning.question import Document, Question
from twin.planning.space import Candidate

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

    Args:
        question: has the commitments, the price of an API and the lengths. deployments: with their own questions.
        rate: requests per second in all; None where there is none.
    """
    prices = [candidate.cost for _, candidate in deployments]
    nodes = [cost_of_nodes(stated, candidate) for stated, candidate in deployments]
    if not prices or None in prices:
        return []
    per_hour = sum(price for price in prices if price is not None)
    whole = None if None in nodes else sum(price for price in nodes if price is not None)
    of_request = None if question.spec.api is None else api_price_of_request(question, question.spec.api)
    rows = [
        _row(name, share * per_hour, None if whole is None else share * whole, of_request)
        for name, share in {ON_DEMAND: 1.0, **question.spec.commitments}.items()
    ]
    if of_request is not None and rate is not None:
        rows.append(_row("API", of_request * rate * 3600, None, None))
    return rows


def api_price_of_request(question: Question, api: ApiPrice) -> float:
    """The price that an API has for a request of mean lengths."""
    lengths = question.lengths()
    return float(lengths.prompts.mean() * api.input + lengths.answers.mean() * api.output) / 1e6


def _row(name: str, per_hour: float, nodes: float | None, of_request: float | None) -> Document:
    return {
        "commitment": name,
        "per_hour": per_hour,
        "per_month": per_hour * HOURS_A_MONTH,
        "nodes_per_hour": nodes,
        "break_even_rate": None if not of_request else per_hour / 3600 / of_request,
    }
