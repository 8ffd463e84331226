"""Runs a turn on a GPU. See `benchmarks.gpu_turn`; exit code 4 if a stage failed or had no time."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.gpu_turn.runner import Turn
from benchmarks.gpu_turn.stages import STAGES
from benchmarks.provenance import provenance
from live.device import device_name, versions

INCOMPLETE = 4


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_turn", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files, at most eight")
    parser.add_argument("--state", type=Path, required=True, help="folder that lets the next call go on")
    parser.add_argument("--seconds", type=float, default=540.0, help="time of this call (default: 540)")
    parser.add_argument("--stages", nargs="+", choices=[stage.name for stage in STAGES], help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, with --device cpu")
    options = parser.parse_args(arguments)
    if options.tiny != (options.device == "cpu"):
        parser.error("--tiny: expected it with --device cpu, and not without")
    head = provenance("")
    about = {"commit": head["commit"], "device": device_name(options.device), "versions": versions()}
    turn = Turn(options.out, options.state, about, time.monotonic() + options.seconds, options.tiny)
    rows = turn.run([stage for stage in STAGES if stage.name in (options.stages or [each.name for each in STAGES])])
    for row in rows:
        print(f"{row['stage']:12} {row['status']:24} {row['seconds']:7.1f} s")
    complete = all(row["status"] in ("done", "needs a GPU") or "not installed" in row["status"] for row in rows)
    return 0 if complete else INCOMPLETE


if __name__ == "__main__":
    sys.exit(main())
