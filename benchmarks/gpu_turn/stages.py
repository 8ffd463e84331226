"""The stages of a turn on a GPU: what is new or was mended first, then what no turn has reached, then the rest."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DOCUMENT = "{document}"
WORK = "{work}"
"""In a command: the file for the stage's JSON document, and the folder of the turn's files."""

LAUNCHES = f"{WORK}/../launches.jsonl"
"""Launches that a rehearsal has recorded, if they came along."""

NO_TESTS_OF_COMPILATION = ("--deselect", "tests/kernels/test_ahead_of_time.py")
PLAIN_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "addopts=")
LENIENT = ("-o", "filterwarnings=default")


@dataclass(frozen=True)
class Stage:
    """One process of a turn.

    Attributes:
        arguments: of Python. tiny: the same on a CPU, small; empty: the stage needs a GPU.
        seconds: its limit, after which it is killed.
        tool: a program that Python runs under, such as compute-sanitizer.
    """

    name: str
    seconds: int
    arguments: tuple[str, ...]
    tiny: tuple[str, ...] = ()
    tool: tuple[str, ...] = ()

    def command(self, *, tiny: bool, document: Path, work: Path) -> list[str]:
        """The command line."""
        arguments = self.tiny if tiny else self.arguments
        filled = [part.replace(DOCUMENT, str(document)).replace(WORK, str(work)) for part in arguments]
        return [*self.tool, sys.executable, *filled]


def stage_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of this package's modules."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--tiny", action="store_true", help="small shapes and models, and few of them")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def own(module: str, *arguments: str) -> tuple[str, ...]:
    """The arguments of a module of this package, which writes a document."""
    return ("-m", f"benchmarks.gpu_turn.{module}", *arguments, "--out", DOCUMENT)


CUDA = ("--device", "cuda")
CPU = ("--device", "cpu", "--tiny")
MODEL = "examples/models/tiny-llama.json"
VALIDATE = ("-m", "twin", "validate")
RUNS = ("--runs", WORK, "--no-figures", "--json")


def validation(name: str, seconds: int, model: str) -> Stage:
    """A small validation of a model at half load, of which only the measurement is made."""
    settings = (f"model.path=examples/models/{model}.json", "workload.requests=300", "loads=[0.5]")
    changes = tuple(part for setting in settings for part in ("--set", setting))
    scenario = ("examples/validate-h200-turn.yaml", "--backend", "cuda", "--measure-only", "--repeats", "2")
    return Stage(name, seconds, (*VALIDATE, *scenario, *changes, *RUNS))


STAGES = [
    Stage("environment", 40, own("environment", *CUDA), own("environment", *CPU)),
    Stage("precompile", 90, own("precompile", LAUNCHES), own("precompile", LAUNCHES)),
    Stage(
        "tests", 100,
        (*PLAIN_PYTEST, *LENIENT, "-m", "not slow", "-n", "8", "--junitxml", f"{WORK}/tests.xml", "tests/kernels",
         "tests/live/test_graphs.py", "tests/live/topologies/test_gpu.py", *NO_TESTS_OF_COMPILATION),
        (*PLAIN_PYTEST, "-p", "no:xdist", "--junitxml", f"{WORK}/tests.xml", "tests/kernels/silu_mul"),
    ),
    Stage("numbers", 70, own("numbers", *CUDA), own("numbers", *CPU)),
    Stage("variants", 70, own("variants", *CUDA), own("variants", *CPU)),
    Stage(
        "live", 110,
        ("-m", "benchmarks.live", *CUDA, "--mode", "graphs, a step ahead", "--repeats", "3", "--out", DOCUMENT),
        ("-m", "benchmarks.live", *CPU, "--mode", "graphs, a step ahead", "--repeats", "1", "--only", "with comp",
         "--out", DOCUMENT),
    ),
    Stage(
        "packed", 110,
        ("-m", "benchmarks.kernels", *CUDA, "--parts", "four_bits", "compensators", "--out", DOCUMENT),
    ),
    validation("validate", 150, "qwen3-0.6b"),
    Stage("http", 60, own("http", *CUDA), own("http", *CPU)),
    Stage(
        "topologies", 70,
        ("-m", "benchmarks.topologies", *CUDA, "--output", "32", "--repeats", "1", "--out", DOCUMENT),
        ("-m", "benchmarks.topologies", "--device", "cpu", "--model", MODEL, "--batch-size", "2", "--prompt", "8",
         "--output", "3", "--repeats", "1", "--out", DOCUMENT),
    ),
    Stage(
        "calibrate", 160,
        ("-m", "twin", "calibrate", "run", *CUDA, "--model", "examples/models/qwen3-0.6b.json", "--coarse",
         "--ops", "layers,attention,head,overhead", "--no-figures", "-o", f"{WORK}/qwen3-0.6b.calibration.yaml"),
    ),
    validation("validate 4B", 150, "qwen3-4b"),
    *(
        Stage(tool, 45, own("numbers", *CUDA, "--tiny"), tool=("compute-sanitizer", "--tool", tool))
        for tool in ("memcheck", "racecheck")
    ),
    Stage("nodes", 50, own("nodes", *CUDA), own("nodes", *CPU)),
    Stage(
        "kernels", 110,
        ("-m", "benchmarks.kernels", *CUDA, "--parts", "attention", "sampling", "elementwise", "--out", DOCUMENT),
        ("-m", "benchmarks.kernels", "--device", "cpu", "--parts", "attention", "elementwise", "--out", DOCUMENT),
    ),
]  # fmt: skip
