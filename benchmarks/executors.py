"""The cost of executors on points of a serving sweep, and of preparing 2,000 of them.

    python -m benchmarks.executors [SCENARIO] [--points 400] [--executor local,dask]
    python -m benchmarks.executors [SCENARIO] --prepare

The first runs the same points in one process, then in two processes or workers of each executor. Each runs half of the
points and all of them, so that the cost of starting is left out: `cpu` is what a further point takes in all processes
together, `wall` the time until it is done, `speed-up` that of one process in place of two. On a machine with other work
`cpu` is still true: its `ceiling`, 2 x cpu of one process / cpu, is the speed-up that two idle cores would allow.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

from scenarios.reading import combinations, read_scenario
from twin.api.inputs import choose_executor
from twin.sweeps.serving_sweep import ServingSweep, prepare

SCENARIO = Path("examples/tiny-llama-cpu.yaml")
SEQUENCES = 40
"""Values of engine.max_num_seqs; those of max_num_batched_tokens make up the number of points."""


def cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def prepared(scenario: Path, points: int) -> ServingSweep:
    """A sweep of this many points."""
    fields: dict[str, list[Any]] = {
        "engine.max_num_seqs": list(range(1, SEQUENCES + 1)),
        "engine.max_num_batched_tokens": [64 * (i + 1) for i in range(points // SEQUENCES)],
    }
    return prepare(read_scenario(scenario, "serving"), scenario, list(combinations(fields)))


def run(scenario: Path, points: int, executor: str, jobs: int) -> tuple[float, float]:
    """CPU and wall seconds of a sweep, with its executor's start and end."""
    sweep = prepared(scenario, points)
    begin, before = time.perf_counter(), cpu()
    with choose_executor(executor, jobs).start() as started:
        for _ in sweep.run({}, lambda key, point: None, started):
            pass
    return cpu() - before, time.perf_counter() - begin


def further_point(scenario: Path, points: int, executor: str, jobs: int) -> tuple[float, float]:
    """CPU and wall seconds of a point, without the executor's start and end."""
    half, whole = (run(scenario, size, executor, jobs) for size in (points // 2, points))
    return (whole[0] - half[0]) / (points - points // 2), (whole[1] - half[1]) / (points - points // 2)


def main() -> None:
    """Print the table, or the CPU time of a preparation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", type=Path, nargs="?", default=SCENARIO)
    parser.add_argument("--points", type=int, default=400, help=f"a multiple of {2 * SEQUENCES}")
    parser.add_argument("--executor", default="local,dask")
    parser.add_argument("--prepare", action="store_true")
    arguments = parser.parse_args()
    if arguments.prepare:
        before = cpu()
        sweep = prepared(arguments.scenario, 2000)
        tasks, _ = len(sweep.tasks), sweep.fingerprint("")
        print(f"{tasks} points of {arguments.scenario.name} are prepared in {cpu() - before:.2f} s of CPU time")
        return
    kinds = [("local", 1), *((executor, 2) for executor in arguments.executor.split(","))]
    baseline: tuple[float, float] | None = None
    print("executor  jobs   cpu/point  wall/point  speed-up  ceiling")
    for executor, jobs in kinds:
        used, wall = further_point(arguments.scenario, arguments.points, executor, jobs)
        baseline = baseline or (used, wall)
        ratios = f"{baseline[1] / wall:8.2f} {jobs * baseline[0] / used:8.2f}"
        print(f"{executor:8} {jobs:5} {1e3 * used:8.2f} ms {1e3 * wall:8.2f} ms {ratios}", flush=True)


if __name__ == "__main__":
    main()
