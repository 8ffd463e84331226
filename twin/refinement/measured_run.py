"""Times of the requests of a real engine, from the files that engines and load generators write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.errors import BadInput, readable
from workloads.json_files import number_lines
from workloads.trace import Trace

Floats = NDArray[np.float64]

REQUESTS, META = "requests.jsonl", "meta.json"

_NEEDED = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """Requests of one run, in columns of shape (n,), in order of arrival. Times are seconds of one clock.

    `start`: when the engine queued each request (or it was sent, where `by_client`, whose times contain the network).
    `first`, `last`: tokens. `meta`: the engine's settings beside the file.
    """

    source: Path
    start: Floats
    first: Floats
    last: Floats
    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    by_client: bool = False
    meta: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def ttft(self) -> Floats:
        """Seconds from the start to the first token."""
        return self.first - self.start

    @property
    def decoding(self) -> Floats:
        """Seconds from the first to the last token; 0 for answers of one token."""
        return self.last - self.first

    @property
    def trace(self) -> Trace:
        """Arrivals and lengths, as a workload."""
        return Trace(self.source.stem, self.start - self.start[0], self.prompts, self.answers)

    def in_order(self) -> MeasuredRun:
        order = np.argsort(self.start, kind="stable")
        return replace(
            self, start=self.start[order], first=self.first[order], last=self.last[order],
            prompts=self.prompts[order], answers=self.answers[order],
        )  # fmt: skip


def read_measured_run(path: Path) -> MeasuredRun:
    """Read a run: a folder with `requests.jsonl`, such a file, or the result of `vllm bench serve --save-detailed`.

    A line has input_toks, output_toks, queued_ts, first_token_ts, last_token_ts in seconds of one clock.
    """
    file = path / REQUESTS if path.is_dir() else path
    with readable(file):
        text = file.read_text(encoding="utf-8")
    document = _whole_document(text)
    run = _requests(file, text) if document is None else _benchmark(file, document)
    _check(run)
    return run.in_order()


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The settings in a run's `meta.json`; None if there is none."""
    file = folder / META
    if not file.is_file():
        return None
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"expected a JSON document ({error})", file=file) from None
    if not isinstance(document, dict):
        raise BadInput("expected a JSON object", file=file)
    return document


def _whole_document(text: str) -> dict[str, Any] | None:
    """The result of a benchmark, if the text is that and not a line for each request."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "input_lens" in document else None


def _requests(file: Path, text: str) -> MeasuredRun:
    rows: list[list[float]] = []
    for line, row in number_lines(file, text, _NEEDED):
        prompt, answer, queued, first, last = row
        if not (np.isfinite(row).all() and queued <= first <= last):
            raise BadInput("expected queued_ts, first_token_ts and last_token_ts in this order", file=file, line=line)
        if prompt < 0 or answer < 1 or not (prompt.is_integer() and answer.is_integer()):
            raise BadInput("expected input_toks of 0 or more and output_toks of 1 or more", file=file, line=line)
        rows.append(row)
    table = np.array(rows)
    prompts, answers = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    meta = read_meta(file.parent)
    by_client = bool(meta and meta.get("times") == "client")
    return MeasuredRun(file, table[:, 2], table[:, 3], table[:, 4], prompts, answers, by_client, meta)


def _benchmark(file: Path, document: dict[str, Any]) -> MeasuredRun:
    """The result of vLLM's benchmark: its client's times."""
    names = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
    for name in names:
        if not isinstance(document.get(name), list) or len(document[name]) != len(document["input_lens"]):
            expected = "expected a list with an entry for each request, as vllm bench serve --save-detailed writes it"
            raise BadInput(expected, file=file, field=name)
    if not document["input_lens"]:
        raise BadInput("expected at least one request", file=file, field="input_lens")
    for i, error in enumerate(document.get("errors") or []):
        if error:
            raise BadInput("expected no failed request", file=file, field=f"errors[{i}]", value=error)
    try:
        prompts, answers, starts, ttfts = (_column(document[name]) for name in names[:4])
        decoding = np.array([float(sum(gaps)) for gaps in document["itls"]])
    except (TypeError, ValueError):
        raise BadInput("expected numbers, and lists of numbers in itls", file=file) from None
    first = starts + ttfts
    return MeasuredRun(
        file, starts, first, first + decoding, prompts.astype(np.int64), answers.astype(np.int64), True,
        read_meta(file.parent),
    )  # fmt: skip


def _column(values: Sequence[Any]) -> Floats:
    return np.array([float(value) for value in values])


def _check(run: MeasuredRun) -> None:
    if not (np.isfinite(run.last).all() and (run.ttft > 0).all() and (run.decoding >= 0).all()):
        raise BadInput("expected first tokens after their requests, and finite times", file=run.source)
