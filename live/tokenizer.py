"""The tokenizer of a model directory, read from its tokenizer.json, and the text of tokens that come one by one.

`fastokens`, many times faster than `tokenizers`, encodes where it is installed and gives the same ids.

Two kinds of vocabulary are supported, those of the model families that are served. In a byte-level vocabulary (Llama 3,
Qwen) each token stands for some bytes, and the output is all of them decoded together, so that a character may be
spread over several tokens. In a vocabulary with byte fallback (Llama 2) tokens are text, and characters that it lacks
are runs of one-byte tokens. Such a run is decoded when it is over; if it is not UTF-8, each of its bytes becomes a
replacement character. So the text of a run is unknown until the run ends.

`tokenizers.decoders.DecodeStream` does not serve here. It refuses most random outputs of a vocabulary with byte
fallback ("Invalid prefix encountered"), it sends text that later tokens change, and it decodes an unfinished run again
at each token.
"""

from __future__ import annotations

import codecs
import json
import logging
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers

from latency_models.deployment.model_config import ConfigFields, end_tokens
from workloads.errors import BadInput
from workloads.json_files import read_bounded_text, read_json_object

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


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Names: TypeAlias = Callable[[int], str | None]
"""A token's name in the vocabulary; None for an unknown id."""


class Vocabulary:
    """The bytes of tokens by their names.

    Without `space`, names are bytes, each written as one character. Else they are text with `space` for spaces (an
    output's first one may be stripped), or a byte such as <0x00>.
    """

    def __init__(self, names: Names, space: str = "", strips: bool = False) -> None:
        self._names = names
        self._space = space
        self._strips = strips
        self._cache: dict[int, tuple[bytes, bool] | None] = {}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, perhaps a part of a character, including a leading space; empty for an unknown id."""
        entry = self.entry(token)
        return entry[0] if entry else b""

    def entry(self, token: int) -> tuple[bytes, bool] | None:
        """The bytes of a token, and whether it is a byte of a run; None for an unknown id."""
        if token not in self._cache:
            name = self._names(token)
            self._cache[token] = None if name is None else self._from_name(name)
        return self._cache[token]

    def detokenizer(self) -> ByteLevelDetokenizer | ByteFallbackDetokenizer:
        """A detokenizer for one output that comes token by token."""
        return ByteFallbackDetokenizer(self, self._strips) if self._space else ByteLevelDetokenizer(self)

    def _from_name(self, name: str) -> tuple[bytes, bool]:
        if not self._space:
            try:
                return bytes(BYTES[character] for character in name), False
            except KeyError:  # an added token, whose name is its text
                return name.encode(), False
        text = name.replace(self._space, " ")
        byte = BYTE_NAME.fullmatch(text)
        return (bytes.fromhex(byte[1]), True) if byte else (text.encode(), False)


class ByteLevelDetokenizer:
    """Converts the tokens of one output to text, as soon as later tokens cannot change it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._token_bytes(token))

    def finish(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """The same for a vocabulary with byte fallback; a run of bytes waits for what ends it."""

    def __init__(self, vocabulary: Vocabulary, strips: bool) -> None:
        self._entry = vocabulary.entry
        self._strips = strips
        self._run = bytearray()

    def push(self, token: int) -> str:
        entry = self._entry(token)
        if entry is None:
            return ""
        value, in_run = entry
        if in_run:
            self._run += value
            return ""
        return self._stripped(self._read_run() + value.decode())

    def finish(self) -> str:
        return self._stripped(self._read_run())

    def _read_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        if text and self._strips:
            self._strips = False
            return text.removeprefix(" ")
        return text


def vocabulary_bytes(decoder: Any, names: Names) -> Vocabulary | None:
    """The vocabulary that the `decoder` of a tokenizer.json describes; None if it is of another kind than these two."""
    steps = _flat(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return Vocabulary(names)
    strips = kinds[3:] == ["Strip"]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or (kinds[3:] and not strips):
        return None
    space = steps[0].get("pattern", {}).get("String")
    if not space or steps[0].get("content") != " ":
        return None
    if strips and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) != (" ", 1, 0):
        return None
    return Vocabulary(names, space, strips)


def _flat(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder.get("decoders", []) for step in _flat(part)]


def _alphabet() -> dict[str, int]:
    """The byte for each character of byte-level names: visible Latin-1 stands for itself, the other bytes start at
    256.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTES = _alphabet()
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"

MAX_BYTES = 256 << 20
"""Limit for tokenizer.json, the largest file beside the weights: about 35 MB for a vocabulary of 256,000 tokens."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of special tokens that templates may use."""

LONG = 4096
"""Characters or ids from which `tokenizers` is called for a batch of one: only then do other threads run meanwhile."""


def read_text(file: Path) -> str:
    return read_bounded_text(file, MAX_BYTES)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_json_object(file) if file.exists() else {}


def special_tokens(directory: Path) -> dict[str, str]:
    """The texts of a directory's special tokens, by name; tokenizer_config.json precedes special_tokens_map.json."""
    tokens: dict[str, str] = {}
    for file in (directory / SETTINGS, directory / "special_tokens_map.json"):
        document = read_object(file)
        for name in NAMES:
            value = document.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is None:
                continue
            if not isinstance(text, str):
                raise BadInput("expected a token's text", field=name, value=value, file=file)
            tokens.setdefault(name, text)
    return tokens


class Tokenizer:
    """The tokenizer of a directory; `BadInput` if it cannot be used, or lacks its special tokens.

    `size`: number of ids; the vocabulary may be larger. `end_tokens`: `eos` and those of generation_config.json, each
    of which ends an output. `special`: ids that `decode` skips by default. `fast`: `fastokens` encodes.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / FILE
        document = read_text(file)
        try:
            self._trusted = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # tokenizers raises a plain Exception
            raise BadInput(f"expected a tokenizer ({error})", file=file) from None
        without_limits(self._trusted)
        fast = fast_encoder(document, self._trusted)
        self._encode: Any = (fast or self._trusted).encode
        self.fast = fast is not None
        self.size: int = self._trusted.get_vocab_size()
        self.special = frozenset(i for i, token in self._trusted.get_added_tokens_decoder().items() if token.special)
        self._vocabulary = self._read_vocabulary(file)
        names = special_tokens(directory)
        self.bos = self._id("bos_token", names, directory)
        self.eos = self._id("eos_token", names, directory)
        eos = frozenset[int]() if self.eos is None else frozenset({self.eos})
        self.end_tokens = eos | _end_tokens(directory / "generation_config.json")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text, in which names of special tokens become these.

        `special`: add what the tokenizer puts around a text, which a rendered chat already contains.
        """
        try:
            if self.fast or len(text) < LONG:
                ids: list[int] = self._encode(text, add_special_tokens=special).ids
            else:
                ids = self._trusted.encode_batch([text], add_special_tokens=special)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise BadInput("expected text without lone surrogates", field="text", value=text) from None
        return ids

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        """The text of ids. Unknown ids produce nothing."""
        if len(ids) < LONG:
            text: str = self._trusted.decode(ids, skip_special_tokens=skip_special)
        else:
            text = self._trusted.decode_batch([ids], skip_special_tokens=skip_special)[0]
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, perhaps a part of a character; empty for an unknown id."""
        return self._vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, with replacement characters for incomplete characters."""
        return self._vocabulary.token_bytes(token).decode(errors="replace")

    def detokenizer(self) -> ByteLevelDetokenizer | ByteFallbackDetokenizer:
        """A detokenizer for one output that comes token by token; it does not skip special tokens."""
        return self._vocabulary.detokenizer()

    def _read_vocabulary(self, file: Path) -> Vocabulary:
        configured = self._trusted.decoder
        decoder = configured and json.loads(configured.__getstate__())  # spares parsing the whole file again
        vocabulary = vocabulary_bytes(decoder, self._trusted.id_to_token)
        if vocabulary is None:
            expected = "expected ByteLevel, or Replace, ByteFallback, Fuse and perhaps Strip: others are not served"
            raise BadInput(expected, field="decoder", value=decoder, file=file)
        return vocabulary

    def _id(self, name: str, names: dict[str, str], directory: Path) -> int | None:
        if name not in names:
            return None
        token: int | None = self._trusted.token_to_id(names[name])
        if token is None:
            expected = f"expected a token of {FILE}"
            raise BadInput(expected, field=name, value=names[name], file=directory / SETTINGS)
        return token


def _end_tokens(file: Path) -> frozenset[int]:
    return frozenset(end_tokens(ConfigFields(read_object(file), file)))
