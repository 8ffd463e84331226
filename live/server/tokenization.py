"""/tokenize and /detokenize."""

from __future__ import annotations

from functools import partial

from live.server.asgi import HttpExchange
from live.server.errors import bad_request
from live.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from live.server.replies import Prompt, Tokens
from live.server.service import Service

MAX_TOKENS = 1 << 18
"""Maximum number of token ids of a text or a request, unless the model's context is longer."""


async def tokenize(service: Service, request: TokenizeText | TokenizeChat, exchange: HttpExchange) -> Tokens:
    """The token ids of a text or a chat, and their number. A text may have more than a prompt."""
    return await service.offload.run(exchange.size, partial(_tokenized, service, request))


def _tokenized(service: Service, request: TokenizeText | TokenizeChat) -> Tokens:
    tokenizer = service.inputs.require_tokenizer()
    if isinstance(request, TokenizeText):
        ids = service.inputs.encode(request.prompt, "prompt", request.add_special_tokens is not False)
        _check_count(service, "prompt", len(ids))
    else:
        ids = service.inputs.chat(request)
    texts = [tokenizer.token_text(token) for token in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.model.max_model_len, "tokens": ids, "token_strs": texts}


async def detokenize(service: Service, request: DetokenizeRequest, exchange: HttpExchange) -> Prompt:
    """The text of token ids."""
    tokenizer = service.inputs.require_tokenizer()
    _check_count(service, "tokens", len(request.tokens))
    if request.tokens and max(request.tokens) >= tokenizer.size:
        raise bad_request("tokens", f"expected token ids below {tokenizer.size}, found {max(request.tokens)}")
    decode = partial(tokenizer.decode, request.tokens, request.skip_special_tokens is True)
    return {"prompt": await service.offload.run(exchange.size, decode)}


def _check_count(service: Service, field: str, count: int) -> None:
    max_tokens = max(MAX_TOKENS, service.model.max_model_len)
    if count > max_tokens:
        raise bad_request(field, f"expected at most {max_tokens} tokens, found {count}")
