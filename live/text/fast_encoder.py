"""An optional encoder that is many times faster than `tokenizers`, used if it gives the same ids."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

HAND_WRITTEN = [
    "",
    " ",
    "Hello, world! It's what they'd've said: we'll, I'M, she'S.",
    "def f(x):\n\treturn {'a': [1, 2.5e-3], \"b\": None}  # done\r\n\r\n",
    "#include <vector>\nint main() { return a->b << 3 | ~0xFFu; }\n",
    "https://example.org/a%20b?c=d&e=f#g user@example.org",
    "1234567890 3.14159 1,000,000 ١٢٣ ⅷ ½ ²",
    "今日は良い天気です。東京タワー、ＡＢＣ１２３",
    "中文分词与英文 mixed 在一起，没有空格。",
    "안녕하세요 세계 각",
    "Привет, мир! Ёлка",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया ไทยแลนด์",
    "👩‍🚀👍🏽🇫🇷❤️‍🔥🧑‍🤝‍🧑",
    "e\u0301 o\u0308 a\u0301\u0302\u0303 \u1e9b\u0323 ﬁ Å Ω",
    "\u00a0\u2003\u200b\u200d\ufeff\u2028\u3000x\u00ad",
    "\t\t  \n \n\n   x  \r\n\r \x0b\x0c\x1f\x00\x7f",
]
"""Cases on which tokenizers are known to disagree."""

ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz ABC",
    "0123456789 .,",
    " \t\n\r",
    "(){}[]<>=+-*/\\'\"`~!@#$%^&|;:?_",
    "'stredvml SLT",
    "éèüßñçøåžđŁıİſ ",
    "的一是不了人我在有他这为之大来以个中上们",
    "あいうえおカキクケコ一二三ー。",
    "абвгдежзийклмн ",
    "\u0300\u0301\u0308\u0323\u0327aeiouAEO ",
    "👍🏽❤️\u200d👩🚀🇫🇷 ",
]
"""Characters to draw random texts from: each alphabet alone, and all together."""


def fast_encoder(document: str, trusted: tokenizers.Tokenizer) -> Any | None:
    """fastokens' tokenizer, checked on a few hundred texts; None, with a reason in the log, unless it agrees."""
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


def check_texts(added: Sequence[str], seed: int = 0) -> list[str]:
    """A few hundred texts, the same each time. `added`: added tokens, which also appear inside texts."""
    draw = random.Random(seed)
    texts = list(HAND_WRITTEN)
    texts += [a + b for a in HAND_WRITTEN[2:] for b in HAND_WRITTEN[2:] if draw.random() < 0.2]
    texts += [_drawn(draw, alphabet) for alphabet in [*ALPHABETS, "".join(ALPHABETS)] for _ in range(12)]
    texts += ["".join(chr(_scalar(draw)) for _ in range(draw.randint(1, 40))) for _ in range(60)]
    texts += [character * length for character in " \na1.今" for length in (2, 3, 17, 300)]
    for token in draw.sample(list(added), min(24, len(added))):
        texts += [token, f"a{token}b", f"  {token}\n{token}{token} x", token[:-1], token.upper()]
    return texts


def _drawn(draw: random.Random, alphabet: str) -> str:
    return "".join(draw.choice(alphabet) for _ in range(draw.randint(1, 120)))


def _scalar(draw: random.Random) -> int:
    """Any code point except surrogates; the lower planes more often than their size."""
    point = draw.randrange(draw.choice((0x100, 0x3000, 0x10000, 0x110000)))
    return point if not 0xD800 <= point < 0xE000 else point - 0x800
