"""Prefill modules and compensators for a model directory and a text of one's own: checkpoints and tokenizers of
transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="trainings need the extra [live]")
transformers = pytest.importorskip("transformers", reason="checkpoints are written by transformers")

from live.adaptation.compensation import text_quality  # noqa: E402
from live.adaptation.language_model import is_held_out  # noqa: E402
from live.adaptation.text_lessons import pair_lesson  # noqa: E402
from live.adaptation.weights import read_model  # noqa: E402
from live.loaded_model import LoadedModel, ModelSource  # noqa: E402
from live.tokenizer import Tokenizer  # noqa: E402
from tests.live.adaptation.typed import adapt, refused  # noqa: E402
from tests.live.conftest import LLAMA3  # noqa: E402
from tests.live.text.making import write_byte_level  # noqa: E402
from workloads.errors import BadInput  # noqa: E402

SIZES = {
    "vocab_size": 330, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"Llama": {"rope_parameters": LLAMA3}, "Qwen3": {"tie_word_embeddings": True}}
FAST = ("--learning-rate", "0.01")


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model with a tokenizer and an end token: Llama 3.1's in shards, Qwen3's in one file.

    All answers of its two tasks begin alike, so that the decode module needs the prompt's cache.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **FAMILIES[request.param])
    directory = tmp_path / "model"
    shard = "40KB" if request.param == "Llama" else "5GB"
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(directory, max_shard_size=shard)
    write_byte_level(directory)
    monkeypatch.chdir(tmp_path)
    for file, codes in (("first.jsonl", "123"), ("second.jsonl", "231")):
        code = dict(zip(("red", "green", "blue"), codes, strict=True))
        write(
            file, *({"prompt": f"{c} {n}:", "answer": f"0{code[c]}{code[c]}", "id": n} for n in range(50) for c in code)
        )
    return directory


def write(file: str, *rows: object) -> None:
    Path(file).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize("model", ["Qwen3"], indirect=True)
@pytest.mark.slow
def test_a_tuned_module_suits_the_frozen_decode_module_better_than_naive_sharing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, second = ("--method", "full", *FAST), ("--data", "second.jsonl")
    adapt(capsys, "prefill", "model", "base", "--data", "first.jsonl", *whole, "--steps", "40")
    sun = adapt(capsys, "prefill", "base", "sun", *second, *FAST, "--steps", "20")
    adapt(capsys, "prefill", "base", "full", *second, *whole, "--steps", "20")
    pairs = [("sun", "base"), ("full", "base"), ("base", "base")]
    measured, naive, untuned = (
        adapt(capsys, "evaluate", "--prefill", prefill, "--decode", decode, *second) for prefill, decode in pairs
    )
    assert sum(sun["losses"][-5:]) < 0.7 * sum(sun["losses"][:5])
    assert measured["perplexity"] == sun["perplexity"]["second.jsonl"] < naive["perplexity"] < untuned["perplexity"]
    assert measured["exact_match"] == 1 > untuned["exact_match"]
    prompts = [json.loads(line)["prompt"] for line in Path("second.jsonl").read_text().splitlines()]
    assert measured["prompts"] == sum(map(is_held_out, prompts)) > 0
    assert adapt(capsys, "prefill", "base", "sun", *second, *FAST, "--steps", "20") == sun  # nothing is trained again
    loaded = LoadedModel(ModelSource(Path("sun"), random=False, dtype="float32", device="cpu", threads=1))
    assert loaded.decoder.config == read_model(model)[0]
    assert Tokenizer(Path("sun")).end_tokens == Tokenizer(model).end_tokens
    served = adapt(capsys, "serve", "base", "--module", "second.jsonl=sun", "--module", "first.jsonl=base")
    rows = served["tasks"]
    assert [rows[task]["equal_answers"] for task in ("first.jsonl", "second.jsonl")] == [1, 1]
    assert rows["second.jsonl"]["exact_match_served"] == 1


def test_the_perplexity_of_held_out_answers_is_that_of_transformers(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that this project has written, whose prompts have several lengths, answer by answer."""
    adapt(capsys, "prefill", "model", "base", "--data", "first.jsonl", "--method", "full", *FAST, "--steps", "3")
    document = adapt(capsys, "evaluate", "--prefill", "base", "--decode", "base", "--data", "second.jsonl")
    theirs = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    losses = []
    for row in map(json.loads, Path("second.jsonl").read_text().splitlines()):
        if is_held_out(row["prompt"]):
            prompt = tokenizer.encode(row["prompt"])
            answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="none"))
    assert document["perplexity"] == pytest.approx(float(torch.cat(losses).double().mean().exp()), rel=1e-5)


def test_compensators_are_trained_for_any_directory_on_any_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("notes.jsonl", *({"text": f"The engine runs batch {n}, and batch {n} runs the engine."} for n in range(120)))
    flags = ("--sources", "notes.jsonl", "--bits", "4", "--sequences", "4", "--steps", "2", "--gate-steps", "2")
    document = adapt(capsys, "compensate", "model", "better", *flags, "--full-rank", "4")
    assert 300 < document["full"]["perplexity"] < 400  # of random weights: about the size of the vocabulary
    quality = text_quality([model, Path("better")], Path("notes.jsonl"))
    assert quality[1]["perplexity"] == pytest.approx(document["compensated"]["perplexity"], rel=1e-5)
    better = ModelSource(Path("better"), random=False, dtype="float32", device="cpu", threads=1).load().config
    assert replace(better, quantisation=None) == read_model(model)[0]
    assert Tokenizer(Path("better")).end_tokens == Tokenizer(model).end_tokens
    write("notes.jsonl", {"text": "The engine"}, {"text": 3})
    assert "notes.jsonl:2: row: got {'text': 3}, expected a text, or a prompt and an answer" in refused(
        capsys, "compensate", "model", "other", *flags
    )


@pytest.mark.parametrize("model", ["Qwen3"], indirect=True)
def test_what_does_not_fit_is_refused_with_its_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"prompt": "a", "answer": "b"}
    rows: dict[str, tuple[object, ...]] = {
        "wrong.jsonl:2: answer: expected a text": (good, {"prompt": "a"}),
        "wrong.jsonl:1: prompt: got 3, expected a text": ({"prompt": 3, "answer": "b"},),
        "wrong.jsonl:1: answer: got '', expected a text": ({"prompt": "a", "answer": ""},),
        "wrong.jsonl:3: row: got '[1]', expected a JSON object": (good, good, [1]),
        "wrong.jsonl:2: answer: got 135, expected at most 128 tokens": (good, {"prompt": "a", "answer": "0" * 133}),
        "wrong.jsonl:1: prompt: got 'a\\udc00', expected text without lone": ({"prompt": "a\udc00", "answer": "b"},),
        "wrong.jsonl: got '2 and 0', expected prompts to train on and to hold out": (good, good),
    }
    for message, lines in rows.items():
        write("wrong.jsonl", *lines)
        assert message in refused(capsys, "prefill", "model", "new", "--data", "wrong.jsonl")
        assert message in refused(
            capsys, "evaluate", "--prefill", "model", "--decode", "model", "--data", "wrong.jsonl"
        )
    flags = {
        (): "--task: expected it or --data, one of them",
        ("--data", "first.jsonl", "--task", "copy"): "--task: got 'copy', expected it or --data",
        ("--data", "nowhere.jsonl"): "nowhere.jsonl: expected a file",
        ("--task", "copy"): "model/training.json: expected a readable file",
    }
    for arguments, message in flags.items():
        assert message in refused(capsys, "prefill", "model", "new", *arguments)
    assert not Path("new").exists()
    line = refused(capsys, "prefill", "model", "model", "--data", "first.jsonl")
    assert "got 'model', expected another directory than the base model's" in line


@pytest.mark.parametrize("model", ["Qwen3"], indirect=True)
def test_a_tokenizer_of_another_model_is_refused(model: Path) -> None:
    config, _ = read_model(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"tokenizer.json: expected a readable file"):
        pair_lesson(Path("first.jsonl"), model, config, 0)
