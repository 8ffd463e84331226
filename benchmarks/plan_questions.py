"""Forty questions of a capacity planner: the answer of `twin plan`, or its refusal, beside AIConfigurator's.

    python -m benchmarks.plan_questions [--aiconfigurator EXECUTABLE] [--only TEXT] [--out FILE]

Eight models, each with five pairs of a GPU and a load with goals. `twin plan` has 60 CPU seconds for each; `over` says
that they were not enough. AIConfigurator, which has as long as it takes, searches with the same lengths and rate, and
with the same goals, of which its own are means. `claimed` are its GPUs; `given_meets` says if its deployment meets
the goals here. A file that is there is continued.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from twin.planning.aiconfigurator import BEST

CPU_SECONDS = 60

MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.3-70b": "meta-llama/Meta-Llama-3.1-70B",  # has its shapes
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B-FP8",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "minimax-m2.5": "MiniMaxAI/MiniMax-M2.5",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
"""Models, and their names on Hugging Face."""

SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200", "l40s": "l40s"}

LOADS = {
    "chat": (10.0, 1000, 200, "1s", "40ms"),
    "summary": (5.0, 4000, 300, "2s", "50ms"),
    "long": (5.0, 8000, 1000, "3s", "50ms"),
    "fast": (2.0, 2000, 500, "1s", "15ms"),
}
"""Requests per second, mean tokens of prompts and answers, and limits of the P99 of TTFT and TPOT."""

PLACES = {
    "small": (("l40s", "chat"), ("h100", "chat"), ("h100", "summary"), ("h200", "long"), ("h100", "fast")),
    "large": (("h200", "chat"), ("h200", "long"), ("b200", "long"), ("gb200", "long"), ("h200", "fast")),
}
"""GPUs and loads of small and of large models."""

SMALL = ("llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b")


@dataclass(frozen=True)
class Question:
    """A model on a GPU under a load."""

    model: str
    gpu: str
    load: str


def questions() -> list[Question]:
    """All forty."""
    return [Question(model, *place) for model in MODELS for place in PLACES["small" if model in SMALL else "large"]]


def twins(question: Question, candidate: Path | None) -> dict[str, Any]:
    """The answer of `twin plan`, with another planner's deployment in its table where there is one."""
    rate, prompt, answer, ttft, tpot = LOADS[question.load]
    command = [sys.executable, "-m", "twin", "plan", "--model", question.model, "--gpu", question.gpu]
    command += [
        "--rate",
        str(rate),
        "--prompt-tokens",
        str(prompt),
        "--answer-tokens",
        str(answer),
        "--brief",
        "--json",
    ]
    command += ["--slo", f"ttft_p99={ttft}", "--slo", f"tpot_p99={tpot}", "--jobs", "1", "--no-figures", "--fresh"]
    command += [] if candidate is None else ["--candidate", str(candidate)]
    before = _cpu_of_children()
    with tempfile.TemporaryDirectory() as runs:
        ran = subprocess.run([*command, "--runs", runs], capture_output=True, text=True, preexec_fn=_limit, check=False)
    result: dict[str, Any] = {"cpu": round(_cpu_of_children() - before, 1)}
    if ran.returncode < 0:
        return {**result, "over": True}
    if ran.returncode not in (0, 3):
        return {**result, "refused": ran.stderr.strip().splitlines()[-1]}
    document = json.loads(ran.stdout)
    best, estimate = document["recommendation"], document["by_best_estimate"]
    given = [row["meets"] for row in document["rows"] if row["role"] == "given"]
    return {
        **result, "gpus": best and best["gpus"], "devices": best and best["devices"], "sure": best and best["sure"],
        "by_estimate": estimate and estimate["gpus"], "answer": document["answer"],
        "given_meets": any(given) if given else None,
    }  # fmt: skip


def aiconfigurators(executable: Path, question: Question, folder: Path) -> dict[str, Any]:
    """GPUs of AIConfigurator's cheapest deployment at the rate; the reason where it has none."""
    rate, prompt, answer, ttft, tpot = LOADS[question.load]
    command = [str(executable), "cli", "default", "--model-path", MODELS[question.model], "--save-dir", str(folder)]
    command += ["--system", SYSTEMS[question.gpu], "--total-gpus", "64", "--backend", "vllm", "--isl", str(prompt)]
    command += ["--osl", str(answer), "--ttft", str(1000 * float(ttft.removesuffix("s"))), "--no-color"]
    before = _cpu_of_children()
    stated = [*command, "--tpot", tpot.removesuffix("ms"), "--strict-sla"]
    ran = subprocess.run(stated, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"cpu": round(_cpu_of_children() - before, 1)}
    gpus = []
    for file in folder.rglob(BEST):
        for row in csv.DictReader(file.read_text().splitlines()):
            gpus.append(math.ceil(rate / float(row["seq/s"]) - 1e-9) * int(float(row["num_total_gpus"])))
    if not gpus:
        lines = (ran.stdout + ran.stderr).strip().splitlines()
        return {**result, "refused": lines[-1][-200:] if lines else f"exit code {ran.returncode}"}
    return {**result, "claimed": min(gpus)}


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Ask what is not in the file yet, write it after each answer, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=Path, default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["questions"]
    answered = {(row["model"], row["gpu"], row["load"]) for row in rows}
    for question in questions():
        name = (question.model, question.gpu, question.load)
        if name in answered or arguments.only not in " ".join(name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            peer = None
            if arguments.aiconfigurator is not None:
                peer = aiconfigurators(arguments.aiconfigurator, question, Path(folder))
            candidate = Path(folder) if peer is not None and "claimed" in peer else None
            own = twins(question, candidate)
            if "refused" in own and candidate is not None:
                own = {**twins(question, None), "given_refused": own["refused"]}
        rows.append({**asdict(question), "twin": own, "aiconfigurator": peer})
        print(json.dumps(rows[-1]), flush=True)
        if arguments.out is not None:
            result = {"provenance": provenance("twin.benchmark-plan-questions/1"), "questions": rows}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
