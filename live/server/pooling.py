"""Pooling endpoints: embeddings, scores, rankings, classes. Each prompt is one forward pass and produces no tokens."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from live.server.protocol import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from live.server.replies import bad_request
from live.server.request_state import Response
from live.server.service import Service

Headers: TypeAlias = Mapping[str, str]
Vector: TypeAlias = npt.NDArray[np.float32]
Pairs: TypeAlias = Sequence[tuple[str, str]]


class PoolingResponse(Response):
    """A response that is computed from the pooled output of each prompt.

    Args:
        task: of the requests. kind: begins the id of the response.
        content: the response's own fields, from the pooled outputs in the order of the prompts.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        task: str,
        kind: str,
        headers: Headers,
        content: Callable[[list[Vector]], dict[str, Any]],
    ) -> None:
        self.states = service.poolings(prompts, task, service.contract(headers))
        self._content = content
        self._model = service.config.name
        self._id = f"{kind}-{secrets.token_hex(16)}"
        self._tokens = sum(map(len, prompts))

    def document(self) -> Mapping[str, Any]:
        outputs = [state.generation.pooled_output for state in self.states]
        return {
            "id": self._id,
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            **self._content([vector for vector in outputs if vector is not None]),
            "usage": {"prompt_tokens": self._tokens, "total_tokens": self._tokens},
        }


def embeddings(service: Service, request: EmbeddingRequest, headers: Headers) -> Response:
    """Embeddings: last hidden states, scaled to length 1."""
    if service.labels:
        reason = f"{service.config.name} is a classification model and has no embeddings"
        raise bad_request("model", f"{reason}; /pooling gives its logits")
    _check_size(request, service.backend.config.shape.hidden)
    prompts = service.prompts(request.input, "input")

    def content(vectors: list[Vector]) -> dict[str, Any]:
        encoded = [_encoded(_unit(vector), request) for vector in vectors]
        return {"data": [{"index": i, "object": "embedding", "embedding": row} for i, row in enumerate(encoded)]}

    return PoolingResponse(service, prompts, "embed", "embd", headers, content)


def pooling(service: Service, request: EmbeddingRequest, headers: Headers) -> Response:
    """Unscaled results of prompts: the logits of the labels if the model has any, else the last hidden state."""
    _check_size(request, len(service.labels) or service.backend.config.shape.hidden)
    prompts = service.prompts(request.input, "input")

    def content(vectors: list[Vector]) -> dict[str, Any]:
        encoded = [_encoded(vector, request) for vector in vectors]
        return {"data": [{"index": i, "object": "pooling", "data": row} for i, row in enumerate(encoded)]}

    return PoolingResponse(service, prompts, "classify" if service.labels else "embed", "pool", headers, content)


def classify(service: Service, request: ClassifyRequest, headers: Headers) -> Response:
    """The probability of each label."""
    labels = service.labels
    if not labels:
        raise bad_request("model", f"{service.config.name} has no classification head")
    prompts = service.prompts(request.input, "input")

    def content(vectors: list[Vector]) -> dict[str, Any]:
        rows = [(int(np.argmax(probs)), probs.tolist()) for probs in map(_probabilities, vectors)]
        return {
            "data": [
                {"index": i, "label": labels[best], "probs": probs, "num_classes": len(labels)}
                for i, (best, probs) in enumerate(rows)
            ]
        }

    return PoolingResponse(service, prompts, "classify", "classify", headers, content)


def score(service: Service, request: ScoreRequest, headers: Headers) -> Response:
    """The similarity of texts, pair by pair."""
    firsts = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    seconds = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(firsts) not in (1, len(seconds)):
        raise bad_request("text_1", f"expected 1 text or as many as text_2 has ({len(seconds)}), found {len(firsts)}")
    pairs = list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
    prompts, scores = _scores(service, pairs, ("text_1", "text_2"))

    def content(vectors: list[Vector]) -> dict[str, Any]:
        return {"data": [{"index": i, "object": "score", "score": row} for i, row in enumerate(scores(vectors))]}

    return PoolingResponse(service, prompts, "score", "score", headers, content)


class RankingResponse(PoolingResponse):
    """The response of /rerank, which has neither an object nor a time."""

    def document(self) -> Mapping[str, Any]:
        document = super().document()
        return {name: document[name] for name in ("id", "model", "usage", "results")}


def rerank(service: Service, request: RerankRequest, headers: Headers) -> Response:
    """Documents sorted by relevance to a query, the most relevant first; equal ones keep their order."""
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    prompts, scores = _scores(service, [(request.query, text) for text in texts], ("query", "documents"))

    def content(vectors: list[Vector]) -> dict[str, Any]:
        relevance = scores(vectors)
        order = sorted(range(len(texts)), key=lambda i: -relevance[i])[: request.top_n or None]
        return {
            "results": [{"index": i, "document": {"text": texts[i]}, "relevance_score": relevance[i]} for i in order]
        }

    return RankingResponse(service, prompts, "rerank", "rerank", headers, content)


def _scores(
    service: Service, pairs: Pairs, names: tuple[str, str]
) -> tuple[list[list[int]], Callable[[list[Vector]], list[float]]]:
    """The prompts of pairs, and a function that computes the pairs' scores from the pooled outputs.

    With a classification head, which reads both texts as one prompt, a score is its probability; else the cosine of the
    embeddings.
    """
    labels = service.labels
    if len(labels) > 1:
        name = service.config.name
        raise bad_request("model", f"{name} has {len(labels)} classes, expected a classification head with one")
    service.check_capacity(len(pairs))
    if labels:
        return _joined(service, pairs, names), lambda logits: [float(_probabilities(row)[0]) for row in logits]
    index_of, prompts = _distinct(service, pairs, names)

    def cosines(vectors: list[Vector]) -> list[float]:
        units = [_unit(vector) for vector in vectors]
        return [float(np.dot(units[index_of[first]], units[index_of[second]])) for first, second in pairs]

    return prompts, cosines


def _joined(service: Service, pairs: Pairs, names: tuple[str, str]) -> list[list[int]]:
    """One prompt for each pair, of both its texts."""
    inputs = service.inputs
    firsts = {text: inputs.encode(text, names[0]) for text in dict.fromkeys(first for first, _ in pairs)}
    seconds = (inputs.encode(second, names[1], special=False) for _, second in pairs)
    return [inputs.check_prompt(firsts[first] + ids, names[1]) for (first, _), ids in zip(pairs, seconds, strict=True)]


def _distinct(service: Service, pairs: Pairs, names: tuple[str, str]) -> tuple[dict[str, int], list[list[int]]]:
    """One prompt for each different text, and each text's index among them."""
    name_of: dict[str, str] = {}
    for pair in pairs:
        for text, name in zip(pair, names, strict=True):
            name_of.setdefault(text, name)
    prompts = [service.inputs.prompts(text, name)[0] for text, name in name_of.items()]
    return {text: i for i, text in enumerate(name_of)}, prompts


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
