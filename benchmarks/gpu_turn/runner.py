"""Runs stages as processes with limits of their own, skips those that are done, and writes the files of a turn."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_turn.stages import ROOT, Stage

RESERVE = 10.0
"""Seconds at the end of a turn that no stage takes: for writing and packing its files."""

LAST_LINES = 12
"""Lines of a stage's output that the summary repeats."""

CLOCKS = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"

Row = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """The folders and the time of one call.

    Attributes:
        out: gets the result files, at most eight. state: keeps what has been done, from call to call.
        about: what results belong to: commit, versions and device. ends: on `time.monotonic`.
    """

    out: Path
    state: Path
    about: dict[str, Any]
    ends: float
    tiny: bool

    @property
    def work(self) -> Path:
        """The folder for the documents and the output of stages."""
        return self.state / "work"

    def run(self, stages: Sequence[Stage]) -> list[Row]:
        """Run the stages that are not done and for which there is time; returns a row for each stage."""
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        results = self.results()
        with _clocks(self.work / "clocks.csv"):
            for stage in stages:
                row = results.get(stage.name)
                if row is None or row["about"] != self.about or row["status"] != "done":
                    results[stage.name] = self._run(stage)
                    self._keep(results)
                    self.write(results.values())
        return [results[stage.name] for stage in stages]

    def results(self) -> dict[str, Row]:
        """The latest row of each stage that an earlier call has run."""
        file = self.state / "state.json"
        rows: dict[str, Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return rows

    def _keep(self, results: dict[str, Row]) -> None:
        file = self.state / "state.json"
        new = file.with_suffix(".new")
        new.write_text(json.dumps(results), encoding="utf-8")
        new.replace(file)

    def _run(self, stage: Stage) -> Row:
        """Run one stage, if there is time for it."""
        row: Row = {"stage": stage.name, "about": self.about, "status": "", "seconds": 0.0, "code": None}
        if self.tiny and not stage.tiny:
            return row | {"status": "needs a GPU"}
        if stage.tool and shutil.which(stage.tool[0]) is None:
            return row | {"status": f"{stage.tool[0]} is not installed"}
        limit = min(stage.seconds, self.ends - RESERVE - time.monotonic())
        if limit < stage.seconds / 2:
            return row | {"status": "no time left"}
        document, log = self.work / f"{stage.name}.json", self.work / f"{stage.name}.log"
        document.unlink(missing_ok=True)
        begin = time.monotonic()
        print(f"gpu_turn: {stage.name}, at most {limit:.0f} s", flush=True)
        command = stage.command(tiny=self.tiny, document=document, work=self.work)
        code = _run_process(command, log, limit, one_thread=self.tiny)
        row |= {"seconds": round(time.monotonic() - begin, 1), "code": code}
        row["status"] = "out of time" if code is None else "done" if code in (0, 4, 5) else "failed"
        row["last_lines"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        if document.exists():
            row["document"] = json.loads(document.read_text(encoding="utf-8"))
        return row

    def write(self, rows: Iterator[Row] | Any) -> None:
        """Write the result files: results.jsonl, summary.md, and what stages left, packed."""
        rows = list(rows)
        lines = [json.dumps(row) for row in rows]
        (self.out / "results.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (self.out / "summary.md").write_text(summary(self.about, rows), encoding="utf-8")
        for name in ("tests.xml", "clocks.csv"):
            if (self.work / name).exists():
                shutil.copyfile(self.work / name, self.out / name)
        with gzip.open(self.out / "log.gz", "wt", encoding="utf-8") as log:
            for file in sorted(self.work.glob("*.log")):
                log.write(f"==== {file.stem}\n{file.read_text(encoding='utf-8', errors='replace')}\n")
        with tarfile.open(self.out / "runs.tar.gz", "w:gz") as archive:
            for path in sorted(self.work.iterdir()):
                if path.suffix not in (".log", ".xml", ".csv"):
                    archive.add(path, arcname=path.name)


def _run_process(command: list[str], log: Path, limit: float, *, one_thread: bool) -> int | None:
    """Run a command; its exit code, or None if it was killed at its limit, with all that it has started.

    `one_thread`: of PyTorch and OpenBLAS, whose further threads would spin on a CPU that others use, too.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if one_thread:
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


@contextmanager
def _clocks(file: Path) -> Iterator[None]:
    """Record clocks, power and temperature of the GPU once a second, where there is nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    with file.open("a", encoding="utf-8") as output:
        command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv", "--loop=1"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def summary(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """The turn as a page: a table of stages, and the last lines that each has printed."""
    parts = [f"# A turn on {about['device']}", "", f"Commit {about['commit']}, {about['versions']}.", ""]
    parts += ["| stage | status | exit code | seconds |", "|---|---|---|---|"]
    parts += [f"| {row['stage']} | {row['status']} | {row['code']} | {row['seconds']} |" for row in rows]
    for row in rows:
        if row.get("last_lines"):
            parts += ["", f"## {row['stage']}", "", "```", *row["last_lines"], "```"]
    return "\n".join(parts) + "\n"
