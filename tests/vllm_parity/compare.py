"""Compares `EngineCore` with the installed vLLM: `python -m tests.vllm_parity.compare [--family NAME] [--count N]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from schedulers.engine_config import SCHEDULER_VERSIONS
from tests.vllm_parity import recorded
from tests.vllm_parity.replay import OurScheduler, VllmScheduler, decisions, difference
from tests.vllm_parity.workloads import FAMILIES, make_workload
from twin.serving.engine.installed_vllm import vllm_version


def scheduler_for(version: str) -> str:
    """The newest rules that are not newer than a version of vLLM."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    names = {tuple(int(part) for part in name.removeprefix("vllm-").split(".")): name for name in SCHEDULER_VERSIONS}
    return names[max((known for known in names if known <= numbers), default=min(names))]


def main() -> int:
    """Print the share of equal workloads in each family, and the first differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, action="append", help="a family of workloads (default: all)")
    parser.add_argument("--count", type=int, default=100, help="workloads a family (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first workload (default: %(default)s)")
    parser.add_argument("--show", type=int, default=2, help="differences shown a family (default: %(default)s)")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="store vLLM's decisions in this folder")
    arguments = parser.parse_args()
    version = vllm_version()
    scheduler = scheduler_for(version)
    print(f"vLLM {version} and our scheduler {scheduler}")
    all_equal = True
    digests: dict[tuple[str, int], list[int]] = {}
    for family in arguments.family or FAMILIES:
        differences: list[str] = []
        for seed in range(arguments.first, arguments.first + arguments.count):
            workload = make_workload(family, seed).for_version(scheduler)
            expected = decisions(workload, VllmScheduler(workload))
            digests[family, seed] = [decision.digest() for decision in expected]
            result = difference(expected, decisions(workload, OurScheduler(workload)))
            if result is not None:
                differences.append(f"  {workload.name} (depth {workload.depth}): {result}")
        print(f"{family}: {arguments.count - len(differences)} of {arguments.count} equal in every step", flush=True)
        print(*differences[: arguments.show], sep="\n", end="\n" if differences[: arguments.show] else "")
        all_equal = all_equal and not differences
    if arguments.record:
        recorded.write(scheduler, digests, arguments.record)
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
