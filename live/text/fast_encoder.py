"""An optional encoder that is many times faster than `tokenizers`, used if it gives the same ids."""

from __future__ import annotations

import logging
from typing import Any

import tokenizers

from live.text.tokenizer_check import check_texts

logger = logging.getLogger(__name__)


def fast_encoder(document: str, trusted: tokenizers.Tokenizer) -> Any | None:
    """fastokens' tokenizer of the same tokenizer.json, checked on a few hundred texts.

    None if fastokens is not installed, cannot read the document, or gives other ids than `trusted` for any of the
    texts. The log gives the reason.
    """
    try:
        import fastokens
    except ImportError:
        logger.info("encoding with tokenizers: fastokens is not installed")
        return None
    try:
        fast = fastokens.Tokenizer.from_json_str(document)
        without_limits(fast)
        difference = _first_difference(fast, trusted)
    except Exception as error:  # its exceptions have no common base class
        logger.warning("encoding with tokenizers: fastokens cannot use this tokenizer (%s)", error)
        return None
    if difference is not None:
        logger.warning("encoding with tokenizers: fastokens differs on %r", difference)
        return None
    return fast


def without_limits(tokenizer: Any) -> None:
    """Switch off padding and truncation, which some tokenizer files ask for."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def _first_difference(fast: Any, trusted: tokenizers.Tokenizer) -> str | None:
    added = [token.content for token in trusted.get_added_tokens_decoder().values()]
    for text in check_texts(added):
        for special in (True, False):
            if fast.encode(text, add_special_tokens=special).ids != _ids(trusted, text, special):
                return text
    return None


def _ids(trusted: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
    ids: list[int] = trusted.encode(text, add_special_tokens=special).ids
    return ids
