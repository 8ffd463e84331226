"""Pooling endpoints: embeddings, scores, rankings, classes. Each prompt is one forward pass and produces no tokens."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from live.server.asgi import HttpExchange
from live.server.contracts import read_contract
from live.server.errors import bad_request
from live.server.identifiers import response_id, unix_time
from live.server.protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from live.server.replies import Classes, Embeddings, Pooling, PromptUsage, Ranking, Scores
from live.server.service import Service

Vector = npt.NDArray[np.float32]


async def embeddings(service: Service, request: EmbeddingRequest, exchange: HttpExchange) -> Embeddings:
    """Embeddings: last hidden states, scaled to length 1."""
    if service.model.labels:
        raise bad_request(
            "model", f"{service.model.name} is a classification model and has no embeddings; /pooling gives its logits"
        )
    _check_size(request, service.model.hidden_size)
    prompts = await service.offload.run(exchange.size, partial(service.prompts, request.input, "input"))
    vectors = await _run(service, prompts, "embed", exchange)
    return {
        "id": response_id("embd"),
        "object": "list",
        "created": unix_time(),
        "model": service.model.name,
        "data": [
            {"index": i, "object": "embedding", "embedding": _encoded(_unit(vector), request)}
            for i, vector in enumerate(vectors)
        ],
        "usage": _usage(prompts),
    }


async def pooling(service: Service, request: EmbeddingRequest, exchange: HttpExchange) -> Pooling:
    """Unscaled results of prompts: the logits of the labels if the model has any, else the last hidden state."""
    _check_size(request, len(service.model.labels) or service.model.hidden_size)
    prompts = await service.offload.run(exchange.size, partial(service.prompts, request.input, "input"))
    vectors = await _run(service, prompts, "classify" if service.model.labels else "embed", exchange)
    return {
        "id": response_id("pool"),
        "object": "list",
        "created": unix_time(),
        "model": service.model.name,
        "data": [{"index": i, "object": "pooling", "data": _encoded(each, request)} for i, each in enumerate(vectors)],
        "usage": _usage(prompts),
    }


async def classify(service: Service, request: ClassifyRequest, exchange: HttpExchange) -> Classes:
    """The probability of each label."""
    if not service.model.labels:
        raise bad_request("model", f"{service.model.name} has no classification head")
    prompts = await service.offload.run(exchange.size, partial(service.prompts, request.input, "input"))
    probabilities = [_probabilities(logits) for logits in await _run(service, prompts, "classify", exchange)]
    return {
        "id": response_id("classify"),
        "object": "list",
        "created": unix_time(),
        "model": service.model.name,
        "data": [
            {
                "index": i,
                "label": service.model.labels[int(np.argmax(each))],
                "probs": each.tolist(),
                "num_classes": len(service.model.labels),
            }
            for i, each in enumerate(probabilities)
        ],
        "usage": _usage(prompts),
    }


async def score(service: Service, request: ScoreRequest, exchange: HttpExchange) -> Scores:
    """The similarity of texts, pair by pair."""
    left = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    right = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(left) not in (1, len(right)):
        raise bad_request("text_1", f"expected 1 text or as many as text_2 has ({len(right)}), found {len(left)}")
    pairs = list(zip(left * (len(right) // len(left)), right, strict=True))
    scores, tokens = await _scores(service, pairs, ("text_1", "text_2"), "score", exchange)
    return {
        "id": response_id("score"),
        "object": "list",
        "created": unix_time(),
        "model": service.model.name,
        "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
        "usage": tokens,
    }


async def rerank(service: Service, request: RerankRequest, exchange: HttpExchange) -> Ranking:
    """Documents sorted by relevance to a query, the most relevant first; equal ones keep their order."""
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    pairs = [(request.query, text) for text in texts]
    scores, tokens = await _scores(service, pairs, ("query", "documents"), "rerank", exchange)
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    return {
        "id": response_id("rerank"),
        "model": service.model.name,
        "usage": tokens,
        "results": [
            {"index": i, "document": {"text": texts[i]}, "relevance_score": scores[i]}
            for i in order[: request.top_n or None]
        ],
    }


async def _scores(
    service: Service, pairs: Sequence[tuple[str, str]], names: tuple[str, str], task: str, exchange: HttpExchange
) -> tuple[list[float], PromptUsage]:
    """Scores by the classification head, which reads both texts as one prompt; else cosines of embeddings."""
    if len(service.model.labels) > 1:
        raise bad_request(
            "model",
            f"{service.model.name} has {len(service.model.labels)} classes, expected a classification head with one",
        )
    service.check_capacity(len(pairs))
    if service.model.labels:
        prompts = await service.offload.run(exchange.size, partial(_joined, service, pairs, names))
        logits = await _run(service, prompts, task, exchange)
        return [float(_probabilities(each)[0]) for each in logits], _usage(prompts)
    index_of, prompts = await service.offload.run(exchange.size, partial(_distinct, service, pairs, names))
    vectors = [_unit(vector) for vector in await _run(service, prompts, task, exchange)]
    cosines = [float(np.dot(vectors[index_of[left]], vectors[index_of[right]])) for left, right in pairs]
    return cosines, _usage(prompts)


def _joined(service: Service, pairs: Sequence[tuple[str, str]], names: tuple[str, str]) -> list[list[int]]:
    """One prompt for each pair, of both its texts."""
    inputs = service.inputs
    lefts = {text: inputs.encode(text, names[0]) for text in dict.fromkeys(left for left, _ in pairs)}
    rights = ((lefts[left], inputs.encode(right, names[1], special=False)) for left, right in pairs)
    return [inputs.check_prompt([*left, *right], names[1]) for left, right in rights]


def _distinct(
    service: Service, pairs: Sequence[tuple[str, str]], names: tuple[str, str]
) -> tuple[dict[str, int], list[list[int]]]:
    """One prompt for each different text, and each text's index among them."""
    name_of: dict[str, str] = {}
    for pair in pairs:
        for text, name in zip(pair, names, strict=True):
            name_of.setdefault(text, name)
    prompts = [service.inputs.prompts(text, name)[0] for text, name in name_of.items()]
    return {text: i for i, text in enumerate(name_of)}, prompts


async def _run(service: Service, prompts: list[list[int]], task: str, exchange: HttpExchange) -> list[Vector]:
    """The pooled output of each prompt."""
    service.check_capacity(len(prompts))
    contract = read_contract(exchange, None, service.config.classes)
    with service.async_engine.group(exchange) as group:
        for prompt in prompts:
            group.submit(service.generations.pool(prompt, task, contract))
        await group.finished()
    found = [state.generation.pooled_output for state in group.states]
    return [vector for vector in found if vector is not None]


def _check_size(request: EmbeddingRequest, size: int) -> None:
    if request.dimensions not in (None, size):
        raise bad_request("dimensions", f"not served, expected the model's own {size}, found {request.dimensions}")


def _unit(vector: Vector) -> Vector:
    wide = vector.astype(np.float64)
    return np.asarray(wide / max(float(np.linalg.norm(wide)), 1e-12), dtype=np.float32)


def _encoded(vector: Vector, request: EmbeddingRequest) -> list[float] | str:
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _probabilities(logits: Vector) -> npt.NDArray[np.float64]:
    """Softmax over labels; of a single label the logistic function."""
    wide = logits.astype(np.float64)
    if len(wide) == 1:
        return np.exp(-np.logaddexp(0.0, -wide))
    powers = np.exp(wide - wide.max())
    return np.asarray(powers / powers.sum())


def _usage(prompts: list[list[int]]) -> PromptUsage:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
