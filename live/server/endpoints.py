"""The endpoints besides completions: embeddings, scores, rankings, classes; tokenization; the server's own state.

Each prompt of a pooling endpoint is one forward pass and produces no tokens.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from live.server.protocol import (
    ClassifyRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeChat,
    TokenizeText,
)
from live.server.replies import Models, Prompt, Status, Tokens, Version, bad_request
from live.server.request_state import Response
from live.server.service import Service

MAX_TOKENS = 1 << 18
"""Maximum number of token ids of a text or a request, unless the model's context is longer."""


def tokenize(service: Service, request: TokenizeText | TokenizeChat, headers: Mapping[str, str]) -> Tokens:
    """The token ids of a text or a chat, and their number. A text may have more than a prompt."""
    inputs = service.inputs
    tokenizer = inputs.require_tokenizer()
    if isinstance(request, TokenizeText):
        ids = inputs.encode(request.prompt, "prompt", request.add_special_tokens is not False)
        _check_count(service, "prompt", len(ids))
    else:
        ids = inputs.chat(request)
    texts = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": inputs.max_model_len, "tokens": ids, "token_strs": texts}


def detokenize(service: Service, request: DetokenizeRequest, headers: Mapping[str, str]) -> Prompt:
    """The text of token ids."""
    tokenizer = service.inputs.require_tokenizer()
    _check_count(service, "tokens", len(request.tokens))
    if request.tokens and max(request.tokens) >= tokenizer.size:
        raise bad_request("tokens", f"expected token ids below {tokenizer.size}, found {max(request.tokens)}")
    return {"prompt": tokenizer.decode(request.tokens, request.skip_special_tokens is True)}


def _check_count(service: Service, field: str, count: int) -> None:
    max_tokens = max(MAX_TOKENS, service.inputs.max_model_len)
    if count > max_tokens:
        raise bad_request(field, f"expected at most {max_tokens} tokens, found {count}")


def health(service: Service, request: None, headers: Mapping[str, str]) -> Status:
    """The status of the server; 503 if the engine has failed or the server is shutting down."""
    service.check_available(None)
    return {"status": "ok"}


def models(service: Service, request: None, headers: Mapping[str, str]) -> Models:
    """The served models."""
    return {
        "object": "list",
        "data": [
            {
                "id": name, "object": "model", "created": service.started, "owned_by": "serving-twin", "root": name,
                "max_model_len": service.inputs.max_model_len,
            }
            for name in service.names
        ],
    }  # fmt: skip


def version(service: Service, request: None, headers: Mapping[str, str]) -> Version:
    """The version of this program."""
    return {"version": service.version}


def metrics(service: Service, request: None, headers: Mapping[str, str]) -> bytes:
    """Metrics in Prometheus' text format."""
    return service.exporter.text()


Headers: TypeAlias = Mapping[str, str]
Vector: TypeAlias = npt.NDArray[np.float32]
Pairs: TypeAlias = Sequence[tuple[str, str]]
Rows: TypeAlias = Callable[[list[Vector]], list[dict[str, Any]]]
"""Makes the rows of a response of pooled outputs, in the order of the prompts."""


class PoolingResponse(Response):
    """A response that is computed from the pooled output of each prompt.

    Args:
        task: of the requests. kind: begins the id of the response.
    """

    def __init__(
        self, service: Service, prompts: list[list[int]], task: str, kind: str, headers: Headers, rows: Rows
    ) -> None:
        self.states = service.poolings(prompts, task, headers)
        self._rows = rows
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
            "data": self._rows([vector for vector in outputs if vector is not None]),
            "usage": {"prompt_tokens": self._tokens, "total_tokens": self._tokens},
        }


def embeddings(service: Service, request: EmbeddingRequest, headers: Headers) -> Response:
    """Embeddings: last hidden states, scaled to length 1."""
    if service.labels:
        reason = f"{service.config.name} is a classification model and has no embeddings"
        raise bad_request("model", f"{reason}; /pooling gives its logits")
    prompts = _pooling_prompts(service, request, service.backend.config.shape.hidden)
    rows = _rows("embedding", "embedding", lambda vectors: [_encoded(_unit(vector), request) for vector in vectors])
    return PoolingResponse(service, prompts, "embed", "embd", headers, rows)


def pooling(service: Service, request: EmbeddingRequest, headers: Headers) -> Response:
    """Unscaled results of prompts: the logits of the labels if the model has any, else the last hidden state."""
    prompts = _pooling_prompts(service, request, len(service.labels) or service.backend.config.shape.hidden)
    rows = _rows("pooling", "data", lambda vectors: [_encoded(vector, request) for vector in vectors])
    return PoolingResponse(service, prompts, "classify" if service.labels else "embed", "pool", headers, rows)


def classify(service: Service, request: ClassifyRequest, headers: Headers) -> Response:
    """The probability of each label."""
    labels = service.labels
    if not labels:
        raise bad_request("model", f"{service.config.name} has no classification head")
    prompts = service.prompts(request.input, "input")

    def rows(vectors: list[Vector]) -> list[dict[str, Any]]:
        return [
            {"index": i, "label": labels[int(probs.argmax())], "probs": probs.tolist(), "num_classes": len(labels)}
            for i, probs in enumerate(map(_probabilities, vectors))
        ]

    return PoolingResponse(service, prompts, "classify", "classify", headers, rows)


def score(service: Service, request: ScoreRequest, headers: Headers) -> Response:
    """The similarity of texts, pair by pair."""
    firsts = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    seconds = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(firsts) not in (1, len(seconds)):
        raise bad_request("text_1", f"expected 1 text or as many as text_2 has ({len(seconds)}), found {len(firsts)}")
    pairs = list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
    prompts, scores = _scores(service, pairs, ("text_1", "text_2"))
    return PoolingResponse(service, prompts, "score", "score", headers, _rows("score", "score", scores))


class RankingResponse(PoolingResponse):
    """The response of /rerank, which has neither an object nor a time."""

    def document(self) -> Mapping[str, Any]:
        document = super().document()
        return {name: document[name] for name in ("id", "model", "usage")} | {"results": document["data"]}


def rerank(service: Service, request: RerankRequest, headers: Headers) -> Response:
    """Documents sorted by relevance to a query, the most relevant first; equal ones keep their order."""
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    prompts, scores = _scores(service, [(request.query, text) for text in texts], ("query", "documents"))

    def rows(vectors: list[Vector]) -> list[dict[str, Any]]:
        relevance = scores(vectors)
        order = sorted(range(len(texts)), key=lambda i: -relevance[i])[: request.top_n or None]
        return [{"index": i, "document": {"text": texts[i]}, "relevance_score": relevance[i]} for i in order]

    return RankingResponse(service, prompts, "rerank", "rerank", headers, rows)


def _pooling_prompts(service: Service, request: EmbeddingRequest, size: int) -> list[list[int]]:
    """The prompts of a request for vectors of this size."""
    if request.dimensions not in (None, size):
        raise bad_request("dimensions", f"not served, expected the model's own {size}, found {request.dimensions}")
    return service.prompts(request.input, "input")


def _rows(kind: str, field: str, values: Callable[[list[Vector]], Sequence[object]]) -> Rows:
    return lambda vectors: [{"index": i, "object": kind, field: value} for i, value in enumerate(values(vectors))]


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
    name_of: dict[str, str] = {}  # each text once, with the field where it comes first
    for pair in pairs:
        for text, name in zip(pair, names, strict=True):
            name_of.setdefault(text, name)
    prompts = [service.inputs.prompts(text, name)[0] for text, name in name_of.items()]
    index_of = {text: i for i, text in enumerate(name_of)}

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
