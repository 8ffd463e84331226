"""The endpoints that need no engine: tokenization, and the server's health, models, version and metrics."""

from __future__ import annotations

from collections.abc import Mapping

from live.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from live.server.replies import Models, Prompt, Status, Tokens, Version, bad_request
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
                "id": name,
                "object": "model",
                "created": service.started,
                "owned_by": "serving-twin",
                "root": name,
                "max_model_len": service.inputs.max_model_len,
            }
            for name in service.names
        ],
    }


def version(service: Service, request: None, headers: Mapping[str, str]) -> Version:
    """The version of this program."""
    return {"version": service.version}


def metrics(service: Service, request: None, headers: Mapping[str, str]) -> bytes:
    """Metrics in Prometheus' text format."""
    return service.exporter.text()
