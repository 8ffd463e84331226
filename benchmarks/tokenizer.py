"""Cost of text: encoding a prompt, rendering a conversation, and streaming an answer.

    python -m benchmarks.tokenizer --tokenizer DIR [--repeat 15] [--json] [--out FILE]

DIR is a model's directory with tokenizer.json. Texts are windows of this repository's documentation, one by one. The
baseline is `tokenizers` on the same texts, for streaming its `DecodeStream`; both take turns in this process, and a
ratio is the median over turns of that turn's ratio, above 1 where ours is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from benchmarks.provenance import provenance
from benchmarks.scheduling_decision import in_turns
from live.server.input_processor import ChatTemplate
from live.server.request_state import StopStrings, TextStream
from live.tokenizer import FILE, Tokenizer
from workloads.errors import BadInput

DOCUMENTATION = Path(__file__).parent.parent / "docs"
LENGTHS = (128, 2048)
CALLS = 40
"""Calls of one turn."""

STOPS = ("\n\nUser:", "</answer>", "<|stop|>", "END")


def windows(tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """Pieces of documentation of a fixed number of token ids."""
    text = "\n".join(file.read_text() for file in sorted(DOCUMENTATION.rglob("*.md")))
    ids = tokenizer.encode(text, special=False)
    return [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]


def each_call(call: Callable[[Any], object], items: list[Any]) -> Callable[[], float]:
    """A function that returns the mean seconds of `CALLS` calls, each with the next item."""
    following = cycle(items)

    def measure() -> float:
        texts = [next(following) for _ in range(CALLS)]
        start = time.perf_counter()
        for item in texts:
            call(item)
        return (time.perf_counter() - start) / CALLS

    return measure


def streamed(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...] = ()) -> None:
    """Stream an answer, token by token."""
    stream = TextStream(tokenizer, StopStrings(stops) if stops else None)
    for token in ids:
        stream.push(token)
    stream.finish()


def streamed_by_peer(peer: tokenizers.Tokenizer, ids: list[int]) -> None:
    """Stream an answer by `tokenizers`."""
    stream = DecodeStream(skip_special_tokens=True)
    for token in ids:
        stream.step(peer, token)


def row(operation: str, tokens: int, seconds: list[list[float]], per: int = 1) -> dict[str, Any]:
    """Median seconds; with a second list, also those of the baseline, and the ratio."""
    entry: dict[str, Any] = {"operation": operation, "tokens": tokens, "seconds": statistics.median(seconds[0]) / per}
    if len(seconds) > 1:
        entry["tokenizers"] = statistics.median(seconds[1]) / per
        entry["ratio"] = statistics.median(peer_seconds / ours for ours, peer_seconds in zip(*seconds, strict=True))
    return entry


def measured(directory: Path, repeat: int) -> dict[str, Any]:
    """Measure every operation."""
    start = time.perf_counter()
    tokenizer = Tokenizer(directory)
    loading = time.perf_counter() - start
    peer, template = tokenizers.Tokenizer.from_file(str(directory / FILE)), ChatTemplate.read(directory)
    rows = []
    for tokens in LENGTHS:
        texts = [tokenizer.decode(ids) for ids in windows(tokenizer, tokens)]
        pair = [each_call(tokenizer.encode, texts), each_call(lambda text: peer.encode(text).ids, texts)]
        rows.append(row("encode", tokens, in_turns(repeat, pair)))
        if template:
            talks = [[{"role": "user", "content": text}] for text in texts]
            rows.append(row("chat template", tokens, in_turns(repeat, [each_call(template.render, talks)])))
    answers = windows(tokenizer, LENGTHS[0])
    peer_calls = each_call(lambda ids: streamed_by_peer(peer, ids), answers)
    for name, stops in (("push", ()), (f"push, {len(STOPS)} stops", STOPS)):
        ours = each_call(lambda ids, stops=stops: streamed(tokenizer, ids, stops), answers)
        rows.append(row(name, 1, in_turns(repeat, [ours, peer_calls]), per=LENGTHS[0]))
    return {"fast": tokenizer.fast, "loading": loading, "operations": rows}


def show(document: dict[str, Any]) -> None:
    """Print a table in microseconds."""
    print(f"{document['machine']['device']}, Python {document['python']}, medians of {document['repeat']} turns")
    encoder = "fastokens" if document["fast"] else "tokenizers (no other encoder agrees or is installed)"
    print(f"loaded in {document['loading']:.2f} s, encoding with {encoder}")
    for operation in document["operations"]:
        line = f"{operation['operation']:>14}, {operation['tokens']:>4} tokens: {1e6 * operation['seconds']:8.2f} µs"
        if "ratio" in operation:
            line += f", tokenizers {1e6 * operation['tokenizers']:8.2f} µs, × {operation['ratio']:.1f}"
        print(line)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="a directory with tokenizer.json")
    parser.add_argument("--repeat", type=int, default=15, help="turns")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat: expected at least 1, found {options.repeat}")
    try:
        results = measured(options.tokenizer, options.repeat)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    document = {
        **provenance("twin.benchmark-tokenizer/1"),
        "repeat": options.repeat,
        **results,
    }
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        show(document)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
