"""/tokenize and /detokenize."""

from __future__ import annotations

from live.server.errors import bad_request
from live.server.exchange import Exchange
from live.server.protocol import DetokenizeRequest, TokenizeChat, TokenizeText
from live.server.replies import Prompt, Tokens
from live.server.service import Service


async def tokenize(service: Service, asked: TokenizeText | TokenizeChat, exchange: Exchange) -> Tokens:
    """A text's or a chat's token ids; as many as there are."""
    words = service.words
    if isinstance(asked, TokenizeText):
        ids = words.encode(asked.prompt, asked.add_special_tokens is not False)
    else:
        ids = service.rendered(asked)
    pieces = [words.piece(token) for token in ids] if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.contexts, "tokens": ids, "token_strs": pieces}


async def detokenize(service: Service, asked: DetokenizeRequest, exchange: Exchange) -> Prompt:
    """The text of token ids."""
    words = service.words
    if asked.tokens and max(asked.tokens) >= words.size:
        raise bad_request("tokens", f"expected token ids below {words.size}, found {max(asked.tokens)}")
    return {"prompt": words.decode(asked.tokens, asked.skip_special_tokens is True)}
