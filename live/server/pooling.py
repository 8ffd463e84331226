"""Requests that want no tokens: embeddings, scores, rankings, classes. Each prompt is one pass."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from live.server.errors import bad_request
from live.server.exchange import Exchange
from live.server.protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from live.server.replies import Classes, Embeddings, Pooling, PromptUsage, Ranking, Scores
from live.server.service import Service, identifier, now

Vector = npt.NDArray[np.float32]


async def embeddings(service: Service, asked: EmbeddingRequest, exchange: Exchange) -> Embeddings:
    """Last states, scaled to length 1."""
    if service.labels:
        raise bad_request("model", f"{service.name} tells classes and has no embeddings; /pooling gives its logits")
    _check_size(asked, service.hidden)
    prompts = service.prompts(asked.input, "input")
    vectors = await _run(service, prompts, "embed", exchange)
    return {
        "id": identifier("embd"),
        "object": "list",
        "created": now(),
        "model": service.name,
        "data": [
            {"index": i, "object": "embedding", "embedding": _numbers(_unit(vector), asked)}
            for i, vector in enumerate(vectors)
        ],
        "usage": _usage(prompts),
    }


async def pooling(service: Service, asked: EmbeddingRequest, exchange: Exchange) -> Pooling:
    """What prompts come to, unscaled: the logits of the labels where the model has any, else the last state."""
    _check_size(asked, len(service.labels) or service.hidden)
    prompts = service.prompts(asked.input, "input")
    vectors = await _run(service, prompts, "classify" if service.labels else "embed", exchange)
    return {
        "id": identifier("pool"),
        "object": "list",
        "created": now(),
        "model": service.name,
        "data": [{"index": i, "object": "pooling", "data": _numbers(each, asked)} for i, each in enumerate(vectors)],
        "usage": _usage(prompts),
    }


async def classify(service: Service, asked: ClassifyRequest, exchange: Exchange) -> Classes:
    """The probability of each label."""
    if not service.labels:
        raise bad_request("model", f"{service.name} has no classification head")
    prompts = service.prompts(asked.input, "input")
    found = [_probabilities(logits) for logits in await _run(service, prompts, "classify", exchange)]
    return {
        "id": identifier("classify"),
        "object": "list",
        "created": now(),
        "model": service.name,
        "data": [
            {
                "index": i,
                "label": service.labels[int(np.argmax(each))],
                "probs": each.tolist(),
                "num_classes": len(service.labels),
            }
            for i, each in enumerate(found)
        ],
        "usage": _usage(prompts),
    }


async def score(service: Service, asked: ScoreRequest, exchange: Exchange) -> Scores:
    """How well texts go together, pair by pair."""
    left = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    right = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    if len(left) not in (1, len(right)):
        raise bad_request("text_1", f"expected 1 text or as many as text_2 has ({len(right)}), found {len(left)}")
    pairs = list(zip(left * (len(right) // len(left)), right, strict=True))
    scores, used = await _scores(service, pairs, ("text_1", "text_2"), "score", exchange)
    return {
        "id": identifier("score"),
        "object": "list",
        "created": now(),
        "model": service.name,
        "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(scores)],
        "usage": used,
    }


async def rerank(service: Service, asked: RerankRequest, exchange: Exchange) -> Ranking:
    """Documents by how well they go with a query, the best first; of equals the earlier."""
    texts = [each if isinstance(each, str) else each.text for each in asked.documents]
    pairs = [(asked.query, text) for text in texts]
    scores, used = await _scores(service, pairs, ("query", "documents"), "rerank", exchange)
    order = sorted(range(len(texts)), key=lambda i: -scores[i])
    return {
        "id": identifier("rerank"),
        "model": service.name,
        "usage": used,
        "results": [
            {"index": i, "document": {"text": texts[i]}, "relevance_score": scores[i]}
            for i in order[: asked.top_n or None]
        ],
    }


async def _scores(
    service: Service, pairs: Sequence[tuple[str, str]], names: tuple[str, str], task: str, exchange: Exchange
) -> tuple[list[float], PromptUsage]:
    """By the model's head, which reads both texts one after the other; else the cosine of their embeddings."""
    if len(service.labels) > 1:
        raise bad_request("model", f"{service.name} tells {len(service.labels)} classes, a score wants a head of one")
    if service.labels:
        prompts = [_joined(service, pair, names) for pair in pairs]
        logits = await _run(service, prompts, task, exchange)
        return [float(_probabilities(each)[0]) for each in logits], _usage(prompts)
    places: dict[str, int] = {}
    prompts = []
    for pair in pairs:
        for text, name in zip(pair, names, strict=True):
            if text not in places:
                places[text] = len(prompts)
                prompts += service.prompts(text, name)
    vectors = [_unit(vector) for vector in await _run(service, prompts, task, exchange)]
    cosines = [float(np.dot(vectors[places[left]], vectors[places[right]])) for left, right in pairs]
    return cosines, _usage(prompts)


def _joined(service: Service, pair: tuple[str, str], names: tuple[str, str]) -> list[int]:
    words = service.words
    return service.checked([*words.encode(pair[0]), *words.encode(pair[1], special=False)], names[1])


async def _run(service: Service, prompts: list[list[int]], task: str, exchange: Exchange) -> list[Vector]:
    """What each prompt comes to."""
    service.check_room(len(prompts))
    with service.group(exchange) as group:
        for prompt in prompts:
            group.submit(service.one_shot(prompt, task))
        await group.done()
    found = [ticket.generation.pooled for ticket in group.tickets]
    return [vector for vector in found if vector is not None]


def _check_size(asked: EmbeddingRequest, size: int) -> None:
    if asked.dimensions not in (None, size):
        raise bad_request("dimensions", f"not served, expected the model's own {size}, found {asked.dimensions}")


def _unit(vector: Vector) -> Vector:
    wide = vector.astype(np.float64)
    return np.asarray(wide / max(float(np.linalg.norm(wide)), 1e-12), dtype=np.float32)


def _numbers(vector: Vector, asked: EmbeddingRequest) -> list[float] | str:
    if asked.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _probabilities(logits: Vector) -> npt.NDArray[np.float64]:
    """Softmax over labels; of a single one the logistic function."""
    wide = logits.astype(np.float64)
    if len(wide) == 1:
        return np.exp(-np.logaddexp(0.0, -wide))
    powers = np.exp(wide - wide.max())
    return np.asarray(powers / powers.sum())


def _usage(prompts: list[list[int]]) -> PromptUsage:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
