"""Compiles the configurations that ship, in many processes, so that later stages find them in Triton's cache.

    python -m benchmarks.gpu_turn.precompile [OPERATION ...] [--processes 16] [--first] --out FILE

Exit code 4 if one does not compile or fit with this machine's versions, or has a hazard (`kernels.ahead_of_time`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
from pathlib import Path

from kernels.ahead_of_time import FAILED, Compiled, compile_shipped, operations, shipped

ARCH = 90


def compile_one(place: tuple[str, int]) -> Compiled:
    """Compile one configuration of an operation, by its number."""
    operation, number = place
    return compile_shipped(operation, shipped(operation)[number], ARCH)


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help="default: all")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--first", action="store_true", help="only the first configuration of each operation")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    names = options.operations or operations()
    places = [
        (name, number)
        for name in names
        for number, configuration in enumerate(shipped(name)[:1] if options.first else shipped(name))
        if configuration.least_arch <= ARCH
    ]
    if options.processes == 1:
        builds = [compile_one(place) for place in places]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            builds = pool.map(compile_one, places, chunksize=1)
    rows = [dataclasses.asdict(build) | {"fits": build.fits} for build in builds]
    document = {"schema": "twin.gpu-precompile/1", "kernels": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    misfits = [row for row in rows if not row["fits"]]
    print(f"{len(rows)} kernels, {len(misfits)} that do not fit")
    for row in misfits:
        print(f"{row['operation']} {row['name']}: {row['error'] or row['hazard'] or 'too large'}")
    return FAILED if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
