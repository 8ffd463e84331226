"""Small tokenizers in Hugging Face's format, trained on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SAMPLE = [
    "The engine runs a batch, and the batch runs the engine; what came out goes to whoever asked.",
    "def run(batch): return [step(each) for each in batch]  # 12345 67890",
    "Der Zug fährt über die Brücke. ¿Qué hora es? 今日は良い天気です。 Привет, мир! naïve café 👩‍🚀",
]
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
VOCABULARY = 320
"""Ids of `write_byte_level`: 256 bytes, 60 merges, four added tokens."""


def write_byte_level(directory: Path) -> None:
    """A tokenizer as Qwen's and Llama 3's: byte-level BPE with `VOCABULARY` ids.

    The last four are <|endoftext|>, <|im_start|>, <|im_end|>, which are special (the last one is the end-of-sequence
    token), and <think>, which is not. Its chat template is ChatML.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 4, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLE, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    assert tokenizer.get_vocab_size() == VOCABULARY
    settings = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    _write(directory, tokenizer, settings)


def write_byte_fallback(directory: Path) -> None:
    """A tokenizer as Llama 2's: characters and merges, bytes for what it has never seen, and <s> at the beginning."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _metaspaces()
    trained.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += sorted(model["vocab"], key=model["vocab"].get)
    vocabulary = {name: number for number, name in enumerate(names)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = _metaspaces()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _write(directory, tokenizer, {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"})


def _metaspaces() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _write(directory: Path, tokenizer: Tokenizer, settings: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
