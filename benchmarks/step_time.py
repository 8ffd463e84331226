"""The cost of predicting a step time: kernel tables, with the α/β line as the baseline.

    python -m benchmarks.step_time --data ../shared/data [--repeat 15] [--out FILE]

The tables are LLMServingSim's of an RTX PRO 6000. Two calls are timed: one step of two prompts beside a hundred decodes
of two lengths, and one run of five hundred decode steps, divided by its steps. The third row is a whole simulation, the
loop alone: the recorded vLLM run of 300 requests, on its tables and on a line through three of their steps. Tables and
line alternate in this process; times are CPU seconds, and a ratio is the median of the ratios of each turn. At last the
command `twin simulate` on that run is timed as a process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.scheduling_decision import in_turns
from benchmarks.serving_accuracy import EXAMPLE, RUN
from benchmarks.serving_speed import SCENARIO, Timing, simulate
from latency_models.io.config_io import write_yaml
from latency_models.sources.linear import LinearSpec
from latency_models.step_time import StepTime
from scenarios.reading import read_scenario
from scenarios.serving import check_scenario
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from twin.serving.plan.plan import ServingPlan
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput
from workloads.request import Request

CALLS, RUNS, STEPS = 500, 10, 500
"""Single steps in each turn; runs of decode steps in each turn, and the steps of each run."""


def models(data: Path) -> tuple[StepTime, StepTime]:
    """The tables of the example, and the line of `benchmarks.serving_speed`.

    Raises:
        BadInput: tables that cannot be read.
    """
    settings = {"step_time.path": str((data / RUN / "kernels_tp1").absolute())}
    tables = check_scenario(read_scenario(EXAMPLE, "serving"), settings, EXAMPLE).step_time.build(EXAMPLE.parent)
    return tables, LinearSpec.model_validate(SCENARIO["step_time"]).build(EXAMPLE.parent)


def mixed_step() -> Batch:
    """Prompts of 700 tokens and of 300 after 128 cached ones, beside decodes on 1,000 and 2,000 tokens."""
    core = EngineCore(EngineConfig(num_gpu_blocks=100_000, max_num_batched_tokens=200_000, max_num_seqs=256))
    for number in range(100):
        core.submit(Request(number, 0.0, 1000 * (1 + number % 2), 100), 0.0)
    batch = core.begin_step(0.0)
    assert batch is not None
    core.end_step(batch, (), 0.0)
    for number, prompt in enumerate((700, 428)):
        core.submit(Request(100 + number, 0.0, prompt, 100), 0.0)
    batch = core.begin_step(0.0)
    assert batch is not None
    assert (batch.n_decodes, batch.prefill_tokens) == (100, 1128)
    return batch


def seconds_a_call(model: StepTime, batch: Batch) -> float:
    """Seconds of a call, averaged over `CALLS` calls."""
    seconds = model.seconds
    start = time.process_time()
    for _ in range(CALLS):
        seconds(batch)
    return (time.process_time() - start) / CALLS


def seconds_a_step(model: StepTime) -> float:
    """Seconds of a step, averaged over `RUNS` runs of decode steps."""
    start = time.process_time()
    for _ in range(RUNS):
        model.decode_seconds(100, 100_000, 2000, STEPS)
    return (time.process_time() - start) / RUNS / STEPS


def measure(tables: StepTime, line: StepTime, repeat: int) -> list[dict[str, Any]]:
    """Time both calls on both models."""
    batch = mixed_step()
    calls: dict[str, Callable[[StepTime], float]] = {
        "a mixed step": lambda model: seconds_a_call(model, batch),
        "a decode step of a run": seconds_a_step,
    }
    rows = []
    for name, call in calls.items():
        ours, baseline = in_turns(repeat, [lambda a=call: a(tables), lambda a=call: a(line)])  # type: ignore[misc]
        rows.append(row(name, ours, baseline))
    return rows


def simulations(tables: StepTime, data: Path, repeat: int) -> dict[str, Any]:
    """Time the loop of the example on its tables, and on a line of about the same step times."""
    runs = ((1, 1, 1), (100, 10**5, 10**3), (100, 2 * 10**5, 2 * 10**3))
    one, hundred, longer = (tables.decode_seconds(*run, 1)[0] for run in runs)
    per_kv = (longer - hundred) / 10**5
    line = {"overhead": one, "per_token": (hundred - one - per_kv * 10**5) / 99, "per_kv_token": per_kv}
    scenario = recorded(data)
    sections = (scenario["step_time"], {"source": "linear", **line})
    plans = [prepare({**scenario, "step_time": section}, EXAMPLE).cases[0].plan for section in sections]
    ours, baseline = in_turns(repeat, [lambda p=plan: seconds_of_a_loop(p) for plan in plans])  # type: ignore[misc]
    return row("a simulation of 300 requests", ours, baseline)


def recorded(data: Path) -> dict[str, Any]:
    """The scenario of the recorded run, with its files in `data`."""
    scenario = read_scenario(EXAMPLE, "serving")
    scenario["workload"]["trace"]["path"] = str((data / RUN / "workload.jsonl").absolute())
    scenario["step_time"]["path"] = str((data / RUN / "kernels_tp1").absolute())
    for name, file in scenario["measured"].items():
        scenario["measured"][name] = str((data / RUN / Path(file).name).absolute())
    return scenario


def command(data: Path, repeat: int) -> Timing:
    """Times of `twin simulate` on the recorded run as a process, median of the turns."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(write_yaml(recorded(data)))
        return simulate(file, repeat)


def seconds_of_a_loop(plan: ServingPlan) -> float:
    """Seconds of one simulation without its start-up."""
    start = time.process_time()
    Simulation(plan).run()
    return time.process_time() - start


def row(name: str, ours: list[float], baseline: list[float]) -> dict[str, Any]:
    """Medians of all turns."""
    return {
        "question": name,
        "tables": statistics.median(ours),
        "line": statistics.median(baseline),
        "ratio": statistics.median(a / b for a, b in zip(ours, baseline, strict=True)),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds measured/")
    parser.add_argument("--repeat", type=int, default=15, help="turns")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    arguments = parser.parse_args()
    if arguments.repeat < 1:
        parser.error(f"--repeat: expected at least 1, found {arguments.repeat}")
    try:
        tables, line = models(arguments.data)
        rows = measure(tables, line, arguments.repeat)
        rows.append(simulations(tables, arguments.data, arguments.repeat))
        whole = command(arguments.data, arguments.repeat)
    except BadInput as error:
        parser.error(str(error))
    for row in rows:
        text = f"tables {1e6 * row['tables']:8.2f} µs, line {1e6 * row['line']:8.2f} µs, × {row['ratio']:.1f}"
        print(f"{row['question']:>28}: {text}")
    print(f"{'the whole command':>28}: {whole.seconds:.2f} s, {whole.cpu:.2f} s of CPU time")
    if arguments.out:
        document = {
            **provenance("twin.benchmark-step-time/3"),
            "repeat": arguments.repeat,
            "rows": rows,
            "command": whole._asdict(),
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
