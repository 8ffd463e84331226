"""Requests from vLLM's OpenTelemetry spans (`vllm serve --otlp-traces-endpoint`), in the files of a collector.

A file is one OTLP-JSON document, or one a line: `resourceSpans`, `scopeSpans`, `spans`. A span named `llm_request`
begins when the request arrives, and has attributes in seconds:

    gen_ai.latency.time_to_first_token   from the arrival to the first token
    gen_ai.latency.e2e                   from the arrival to the last
    gen_ai.latency.time_in_queue, …time_in_model_prefill   from the queue to the first token, in vLLM's V1 engine
    gen_ai.usage.prompt_tokens, gen_ai.usage.completion_tokens
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latency_models.io.files import read_text
from twin.recording.run_writer import RunWriter
from workloads.errors import BadInput

Document = dict[str, Any]

SPAN = "llm_request"
TTFT, E2E = "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"
QUEUE, PREFILL = "gen_ai.latency.time_in_queue", "gen_ai.latency.time_in_model_prefill"
PROMPT, ANSWER = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"


def record_spans(file: Path, output: Path) -> RunWriter:
    """Write a run folder from a file of spans, those without times as skipped; returns the closed writer."""
    spans = [span for span in _spans(file) if span.get("name") == SPAN]
    if not spans:
        raise BadInput(f"expected spans named {SPAN}, as vLLM exports them", file=file)
    writer = RunWriter(output, {"source": "OpenTelemetry spans", "times": "engine"})
    for span in spans:
        fields = _attributes(span)
        identity = str(fields.get("gen_ai.request.id") or span.get("spanId"))
        arrival = int(span["startTimeUnixNano"]) / 1e9
        missing = [name for name in (TTFT, E2E, PROMPT, ANSWER) if not isinstance(fields.get(name), int | float)]
        if missing or not 0 < fields[TTFT] <= fields[E2E] or fields[ANSWER] < 1:
            why = f"no {missing[0]}" if missing else "no token came, or its times are out of order"
            writer.skip(identity, arrival, why)
            continue
        first = arrival + fields[TTFT]
        inside = fields[QUEUE] + fields[PREFILL] if {QUEUE, PREFILL} <= fields.keys() else fields[TTFT]
        writer.add_row({
            "request_id": identity, "input_toks": fields[PROMPT], "output_toks": fields[ANSWER],
            "arrival_time": arrival, "queued_ts": first - min(inside, fields[TTFT]), "first_token_ts": first,
            "last_token_ts": arrival + fields[E2E],
        })  # fmt: skip
    writer.close()
    return writer


def _spans(file: Path) -> Iterator[Document]:
    for number, document in _documents(file):
        try:
            for resource in document["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    yield from scope["spans"]
        except (KeyError, TypeError):
            expected = "expected OTLP-JSON: resourceSpans, each with scopeSpans, each with spans"
            raise BadInput(expected, file=file, line=number) from None


def _documents(file: Path) -> Iterator[tuple[int | None, Document]]:
    """The documents of a file, each with its line where there is one a line."""
    text = read_text(file)
    try:
        yield None, json.loads(text)
        return
    except (ValueError, RecursionError):
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            raise BadInput("expected a JSON document, or one a line", file=file, line=number) from None
        yield number, document


def _attributes(span: Document) -> Document:
    """Attributes by name. OTLP-JSON writes 64-bit integers as text."""
    attributes: Document = {}
    for entry in span.get("attributes", []):
        ((kind, value),) = entry["value"].items()
        attributes[entry["key"]] = int(value) if kind == "intValue" else value
    return attributes
