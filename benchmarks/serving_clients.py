"""Runs published load generators against the server, offline, and counts failed requests.

    python -m benchmarks.serving_clients --model DIR [--guidellm PATH] [--genai-bench PATH] [--out FILE]

A server of the model is started on a free port, and each generator is run against it with the tokenizer in DIR and
nothing fetched. Give them as paths of commands, or have them on the PATH. Install each into an environment of its own
(`pip install guidellm genai-bench`), since they need many packages. Exit code 4 when a request or a generator failed,
2 when neither generator is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

NAME = "served"
START, RUN = 120, 600
"""Time limits for the start of a server and for a run of a generator, seconds."""

TASKS = {
    "text-to-text": ("openai", "D(64,16)"),
    "text-to-embeddings": ("openai", "E(64)"),
    "text-to-rerank": ("vllm", "R(32,32)"),
}
"""Tasks of genai-bench: its name for the server, and the sizes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a generator. fault: the reason why there are no numbers, or ""."""

    client: str
    version: str
    task: str
    requests: int = 0
    failed: int = 0
    fault: str = ""

    @property
    def good(self) -> bool:
        """True if it ran and no request failed."""
        return not self.fault and self.requests > 0 and self.failed == 0


@contextlib.contextmanager
def server(model: Path) -> Iterator[str]:
    """Run a server; yields its address."""
    command = [sys.executable, "-m", "live.server", "--model", str(model), "--port", "0", "--served-model-name", NAME]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _address(running)
    finally:
        running.terminate()
        running.wait(60)


def _address(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    until, output = time.monotonic() + START, ""
    while time.monotonic() < until and (line := running.stdout.readline()):
        output += line
        if match := re.match(r"(http://\S+) serves", line):
            return match[1]
    raise SystemExit(f"expected a server, found: {output.strip() or 'nothing'}")


def drive_guidellm(command: str, address: str, tokenizer: Path, folder: Path) -> list[Outcome]:
    """Run guidellm: forty chats, four at once."""
    report = folder / "guidellm.json"
    version = _version(command, "guidellm")
    fault = _run(
        [
            command, "run", "--backend", f"kind=openai_http,target={address}", "--profile", "kind=concurrent,streams=4",
            "--constraint", "kind=max_requests,count=40", "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--disable-progress",
            "--output", f"kind=json,path={report}",
        ],
        folder,
    )  # fmt: skip
    if fault or not report.exists():
        return [Outcome("guidellm", version, "text-to-text", fault=fault or "no report")]
    document = json.loads(report.read_text())["benchmarks"][0]["requests"]
    failed = len(document["errored"]) + len(document["incomplete"])
    return [Outcome("guidellm", version, "text-to-text", len(document["successful"]) + failed, failed)]


def drive_genai_bench(command: str, address: str, tokenizer: Path, folder: Path) -> list[Outcome]:
    """Run genai-bench: each task for at most a minute, four requests at once."""
    version = _version(command, "genai-bench")
    outcomes = []
    for task, (backend, sizes) in TASKS.items():
        fault = _run(
            [
                command, "benchmark", "--api-backend", backend, "--api-base", address, "--api-key", "none",
                "--task", task, "--api-model-name", NAME, "--model-tokenizer", str(tokenizer),
                "--traffic-scenario", sizes, "--num-concurrency", "4", "--max-time-per-run", "1",
                "--max-requests-per-run", "40", "--experiment-base-dir", str(folder),
                "--experiment-folder-name", task,
            ],
            folder,
        )  # fmt: skip
        outcomes.append(_genai_bench_outcome(folder / task, task, version, fault))
    return outcomes


def _genai_bench_outcome(folder: Path, task: str, version: str, fault: str) -> Outcome:
    documents = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    totals = [document["aggregated_metrics"] for document in documents if "aggregated_metrics" in document]
    if fault or not totals:
        return Outcome("genai-bench", version, task, fault=fault or "no report")
    requests, failed = (sum(document[name] for document in totals) for name in ("num_requests", "num_error_requests"))
    return Outcome("genai-bench", version, task, requests, failed)


def _run(command: list[str], folder: Path) -> str:
    """Run a command; returns the reason of its failure in one line, or ""."""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        process = subprocess.run(command, cwd=folder, env=offline, capture_output=True, text=True, timeout=RUN)
    except subprocess.TimeoutExpired:
        return f"not done after {RUN} s"
    lines = (process.stdout + process.stderr).strip().splitlines()
    return "" if process.returncode == 0 else f"exit code {process.returncode}: {lines[-1].strip() if lines else ''}"


def _version(command: str, name: str) -> str:
    """The version of a package in the environment of a command."""
    homes = Path(command).resolve().parent.parent.glob("lib/python*/site-packages")
    versions = [
        distribution.version for distribution in metadata.distributions(name=name, path=[str(home) for home in homes])
    ]
    return versions[0] if versions else "unknown"


def main() -> int:
    """Start a server, run the generators, and count failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a model with a tokenizer")
    parser.add_argument("--guidellm", default=shutil.which("guidellm"), metavar="PATH")
    parser.add_argument("--genai-bench", default=shutil.which("genai-bench"), metavar="PATH")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args()
    drivers = {drive_guidellm: options.guidellm, drive_genai_bench: options.genai_bench}
    if not any(drivers.values()):
        parser.error("expected --guidellm, --genai-bench, or one of them on the PATH")
    if not (options.model / "tokenizer.json").exists():
        parser.error(f"--model: expected a directory with tokenizer.json, found {options.model}")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder, server(options.model) as address:
        for drive, command in drivers.items():
            if command:
                outcomes += drive(str(Path(command).absolute()), address, options.model.absolute(), Path(folder))
    for outcome in outcomes:
        verdict = outcome.fault or f"{outcome.failed} of {outcome.requests} failed"
        print(f"{outcome.client} {outcome.version}, {outcome.task}: {verdict}")
    if options.out:
        document: dict[str, Any] = {
            **provenance("twin.benchmark-serving-clients/1"),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(outcome.good for outcome in outcomes) else 4


if __name__ == "__main__":
    sys.exit(main())
