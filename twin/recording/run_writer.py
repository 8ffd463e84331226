"""The files of a recorded run: a line for each request as it is answered, in order of arrival in the end."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from twin.recording.upstream import CompletionStream
from workloads.errors import BadInput

REQUESTS, META, SKIPPED = "requests.jsonl", "meta.json", "skipped.jsonl"


def require_empty(folder: Path, flag: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput("expected a folder that is empty or not there", field=flag, value=str(folder))


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
