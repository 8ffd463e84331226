"""The files of a recorded run: a line for each request as it is answered, in order of arrival in the end.

They are also written from vLLM's OpenTelemetry spans (`vllm serve --otlp-traces-endpoint`), in a collector's files, and
a step log of vLLM is kept as a run. A file of spans is one OTLP-JSON document, or one a line: `resourceSpans`,
`scopeSpans`, `spans`. A span named `llm_request` begins when the request arrives, and has attributes in seconds:

    gen_ai.latency.time_to_first_token   from the arrival to the first token
    gen_ai.latency.e2e                   from the arrival to the last
    gen_ai.latency.time_in_queue, …time_in_model_prefill   from the queue to the first token, in vLLM's V1 engine
    gen_ai.usage.prompt_tokens, gen_ai.usage.completion_tokens
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latency_models.io.files import read_text
from latency_models.sources.vllm_step_log.step_log import FILE, LoggedSteps, read_logged_steps
from workloads.errors import BadInput

REQUESTS, META, SKIPPED = "requests.jsonl", "meta.json", "skipped.jsonl"


def require_empty(folder: Path, flag: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput("expected a folder that is empty or not there", field=flag, value=str(folder))


class CompletionStream:
    """A stream of server-sent events from `/v1/completions` or `/v1/chat/completions`.

    `first`, `last`: when chunks with a token came, on the clock of `feed`; `chunks`: their number. `usage`: the
    server's counts of tokens. `hide_usage`: do not pass on the last chunk, which has these and no choices.
    """

    def __init__(self, *, hide_usage: bool = False) -> None:
        self._hide = hide_usage
        self._rest = b""
        self.first: float | None = None
        self.last: float | None = None
        self.chunks = 0
        self.usage: dict[str, Any] = {}
        self.error = ""

    def feed(self, data: bytes, now: float) -> bytes:
        """Read bytes that came at `now`, seconds; returns the bytes to pass on, whole events only."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return b"".join(event + b"\n\n" for event in events if self._read(event, now))

    def end(self) -> bytes:
        """Bytes that were no whole event."""
        remainder = self._rest
        self._rest = b""
        return remainder

    def _read(self, event: bytes, now: float) -> bool:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            try:
                document = json.loads(line[5:])
            except ValueError:
                continue
            if not isinstance(document, dict):
                continue
            if "error" in document:
                self.error = str(document["error"])[:200]
            choices, usage = document.get("choices"), document.get("usage")
            if isinstance(usage, dict):
                self.usage = usage
            if choices:
                if any(map(_has_token, choices)):
                    self.first = now if self.first is None else self.first
                    self.last = now
                    self.chunks = self.chunks + 1
            elif usage is not None and self._hide:
                return False
        return True

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None where the server did not count them."""
        return self._count("prompt_tokens")

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer, by the server's count; the number of chunks without one; None if there were none."""
        return self._count("completion_tokens") or self.chunks or None

    def _count(self, name: str) -> int | None:
        value = self.usage.get(name)
        return value if isinstance(value, int) and value >= 0 else None


def _has_token(choice: Any) -> bool:
    """True for a choice with a token, which may have no text of its own, such as a part of a character."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "text" in choice
    parts = {name: value for name, value in delta.items() if name != "role"}
    return any(parts.values()) or ("role" not in delta and "content" in delta)


class RunWriter:
    """A run folder, empty at first. Lines are written whole and at once: a killed program leaves what it has.

    `skipped`: requests without times, written with the reason to `skipped.jsonl`.
    """

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        require_empty(folder, "--output")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.written = 0
        self.skipped = 0
        self._lock = threading.Lock()
        self._write_meta(meta)
        self._requests = (folder / REQUESTS).open("a", encoding="utf-8")

    def add(self, identity: str, arrival: float, queued: float, stream: CompletionStream, **fields: Any) -> None:
        """Write a streamed request, or why it has no times; `arrival`: seconds since 1970, `queued`: on the stream's
        clock.
        """
        why = stream.error or ("" if stream.first is not None else "no token came")
        if not why and stream.prompt_tokens is None:
            why = "the server did not count its prompt's tokens (usage)"
        if why:
            self.skip(identity, arrival, why)
            return
        self.add_row({
            "request_id": identity, "input_toks": stream.prompt_tokens, "output_toks": stream.output_tokens,
            "arrival_time": arrival, "queued_ts": queued, "first_token_ts": stream.first,
            "last_token_ts": stream.last, **fields,
        })  # fmt: skip

    def skip(self, identity: str, arrival: float, why: str) -> None:
        """Write that a request has no times."""
        with self._lock:
            self.skipped += 1
            with (self.folder / SKIPPED).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"request_id": identity, "arrival_time": arrival, "why": why}) + "\n")

    def close(self) -> None:
        """Put the lines in order of arrival."""
        with self._lock:
            self._requests.close()
            file = self.folder / REQUESTS
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            ordered = sorted(rows, key=lambda row: row["arrival_time"])
            aside = file.with_suffix(".sorted")
            aside.write_text("".join(json.dumps(row) + "\n" for row in ordered), encoding="utf-8")
            aside.replace(file)

    def add_row(self, row: dict[str, Any]) -> None:
        """Write a request whose times are known."""
        with self._lock:
            if self._requests.closed:
                return
            self._requests.write(json.dumps(row) + "\n")
            self._requests.flush()
            self.written += 1

    def _write_meta(self, meta: dict[str, Any]) -> None:
        (self.folder / META).write_text(json.dumps({"schema_version": 1, "times": "client", **meta}, indent=1) + "\n",
                                        encoding="utf-8")  # fmt: skip


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


def record_step_log(log: Path, output: Path) -> LoggedSteps:
    """Check a log (`BadInput`), and copy it into a run's folder, with `meta.json`."""
    steps = read_logged_steps(log)
    if (output / FILE).exists():
        raise BadInput(f"expected a folder without {FILE}", field="--output", value=str(output))
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(steps.source, output / FILE)
    meta = {"source": "twin observe", "model": steps.model, "clock": steps.clock}
    (output / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return steps


def seen(steps: LoggedSteps) -> list[str]:
    """Lines on the batches that a log has, and on those that it lacks."""
    rows = [step for stretch in steps.stretches for step in stretch]
    kinds = {
        "decodes alone": [step for step in rows if not step.chunks],
        "prompts beside decodes": [step for step in rows if step.chunks and step.decodes],
        "prompts alone": [step for step in rows if step.chunks and not step.decodes],
    }
    lines = [
        f"{len(rows)} steps of {steps.model}, {sum(step.seconds for step in rows):.1f} s by the {steps.clock} clock"
    ]
    for kind, part in kinds.items():
        if not part:
            lines.append(f"not seen: {kind}")
            continue
        most = max(step.rows for step in part)
        lines.append(f"{kind}: {len(part)} steps of up to {most} tokens and {max(s.decodes for s in part)} decodes")
    decodes = {step.decodes for step in rows}
    missing = [count for count in range(1, max(decodes) + 1) if count not in decodes]
    if missing:
        lines.append(f"not seen: {', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''} decodes")
    return lines
