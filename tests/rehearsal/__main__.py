"""Rehearses what runs on a GPU; one line of JSON for each piece.

    python -m tests.rehearsal [PIECE ...] [--sm 90] [--compile] [--record FILE]

graphs, replays: captured and replayed. waits: of the host, by kind. launches: kinds of them. refused: those that Triton
makes no code for, with why. Exit code 4 if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.rehearsal.gpu import PretendedGPU
from tests.rehearsal.launches import Launch, Launches, error_of, misfit_of


def main(arguments: list[str]) -> int:
    """The command."""
    gpu = PretendedGPU()
    launches = Launches(gpu)
    from tests.rehearsal.pieces import PIECES  # what it imports is to see the pretended device

    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal")
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"default: all of {', '.join(PIECES)}")
    parser.add_argument("--sm", type=int, default=90, help="compute capability that code is made for")
    parser.add_argument("--compile", action="store_true", help="all of the way, which takes a second a kind of launch")
    parser.add_argument("--record", type=Path, help="file for the launches, which benchmarks.gpu_turn compiles")
    options = parser.parse_args(arguments)
    for name in options.pieces:
        if name not in PIECES:
            parser.error(f"unknown piece {name}; expected one of {', '.join(PIECES)}")
    failed, check = False, misfit_of if options.compile else error_of
    recorded: set[Launch] = set()
    for name in options.pieces or PIECES:
        gpu.forget()
        launches.seen.clear()
        PIECES[name](gpu)
        recorded |= launches.seen.keys()
        with torch._C.DisableTorchFunction():
            refused = {str(launch): why for launch in launches.seen if (why := check(launch, options.sm))}
        waits = Counter(re.sub(r" ?\[.*\]", "", launch) for launch in gpu.waits)
        document = {"piece": name, "graphs": gpu.captured, "replays": gpu.replayed, "waits": dict(waits)}
        print(json.dumps(document | {"launches": len(launches.seen), "refused": refused}), flush=True)
        failed |= bool(refused)
    if options.record:
        lines = sorted(json.dumps(launch.document()) + "\n" for launch in recorded)
        options.record.write_text("".join(lines), encoding="utf-8")
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
