"""Forty questions of a capacity planner: the answer of `twin plan`, or its refusal, beside AIConfigurator's.

    python -m benchmarks.plan_questions [--aiconfigurator EXECUTABLE] [--answers FOLDER] [--package FOLDER]
        [--only TEXT] [--out FILE] [--page PAGE]

Eight models, each with five pairs of a GPU and a load with goals. `twin plan` has 60 CPU seconds for each; `stop` is
what it has decided by then. AIConfigurator, which has as long as it takes, searches with the same lengths and rate, and
with the same goals, of which its own are means; its answers are kept in a folder. `claimed` are its GPUs, and
`simulated` is what our simulation says of that deployment, at the best estimate of the step times.

`measured`: GPUs of the best deployment of the package's measured rows (`aiconfigurator_core`) whose means meet the
goals, with the published weights and lengths within a factor of 1.35, at the rate of their closed loop by Little's law.
Rows that do not state how many workers they have do not count.
Percentiles need more.

A file that is there is continued, also with answers of AIConfigurator that it lacks; a row has the commit that answered
it. `--page` writes the table.
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
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from benchmarks.error_board.rows import Row, read_rows
from benchmarks.provenance import provenance
from latency_models.deployment.models import load_model
from reports.run_directory import commit
from twin.api.plan import catalogue_question, deployments_of_file
from twin.executors.executor import Processes
from twin.planning.catalogue import CatalogueQuestion
from twin.planning.evaluation import Evaluator
from twin.planning.family_estimates import estimate_families, horizon
from twin.planning.given import BEST
from twin.planning.windows import Simulations
from workloads.errors import BadInput

CPU_SECONDS = 60

TO_END = 2
"""CPU seconds of these that a plan has after its limit, to write its answer."""

ALIKE = 1.35
"""Largest ratio of the lengths of a question and of a measured row."""

ANSWERED = "answered.json"
"""File in the folder of an answer of AIConfigurator."""

MARK = "<!-- forty questions: generated -->"
"""What stands before the table of the page."""

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


def twins(question: Question) -> dict[str, Any]:
    """The answer of `twin plan`."""
    rate, prompt, answer, ttft, tpot = LOADS[question.load]
    command = [sys.executable, "-m", "twin", "plan", "--model", question.model, "--gpu", question.gpu]
    command += ["--rate", f"{rate}", "--prompt-tokens", f"{prompt}", "--answer-tokens", f"{answer}", "--brief"]
    command += ["--slo", f"ttft_p99={ttft}", "--slo", f"tpot_p99={tpot}", "--jobs", "1", "--no-figures", "--fresh"]
    command += ["--cpu-limit", f"{CPU_SECONDS - TO_END}"]
    before = _cpu_of_children()
    with tempfile.TemporaryDirectory() as runs:
        stated = [*command, "--json", "--runs", runs]
        ran = subprocess.run(stated, capture_output=True, text=True, check=False)
    result: dict[str, Any] = {"cpu": round(_cpu_of_children() - before, 1)}
    if ran.returncode not in (0, 3, 5):
        return {**result, "refused": ran.stderr.strip().splitlines()[-1]}
    document = json.loads(ran.stdout)
    best, estimate, stop = document["recommendation"], document["by_best_estimate"], document["stop"]
    incumbent = stop and stop["incumbent"]
    return {
        **result, "gpus": best and best["gpus"], "devices": best and best["devices"], "sure": best and best["sure"],
        "by_estimate": estimate and estimate["gpus"], "answer": document["answer"],
        "stop": stop and {"least_gpus": stop["least_gpus"], "undecided": stop["undecided"],
                          "incumbent": incumbent and {key: incumbent[key] for key in ("gpus", "devices", "sure")}},
    }  # fmt: skip


def aiconfigurators(executable: Path | None, question: Question, folder: Path) -> dict[str, Any]:
    """GPUs of AIConfigurator's cheapest deployment at the rate; the reason where it has none."""
    rate, prompt, answer, ttft, tpot = LOADS[question.load]
    answered = folder / ANSWERED
    if not answered.exists():
        command = [str(executable), "cli", "default", "--model-path", MODELS[question.model], "--save-dir", str(folder)]
        command += ["--system", SYSTEMS[question.gpu], "--total-gpus", "64", "--backend", "vllm", "--isl", str(prompt)]
        command += ["--osl", str(answer), "--ttft", str(1000 * float(ttft.removesuffix("s"))), "--no-color"]
        before = _cpu_of_children()
        stated = [*command, "--tpot", tpot.removesuffix("ms"), "--strict-sla"]
        ran = subprocess.run(stated, capture_output=True, text=True, check=False)
        lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if "rror" in line] or ["no answer"]
        cpu = round(_cpu_of_children() - before, 1)
        folder.mkdir(parents=True, exist_ok=True)
        answered.write_text(json.dumps({"cpu": cpu, "problem": lines[-1][-200:]}))
    result = json.loads(answered.read_text())
    gpus = []
    for file in folder.rglob(BEST):
        for row in csv.DictReader(file.read_text().splitlines()):
            gpus.append(math.ceil(rate / float(row["seq/s"]) - 1e-9) * int(float(row["num_total_gpus"])))
    if not gpus:
        return {"cpu": result["cpu"], "refused": result["problem"]}
    return {"cpu": result["cpu"], "claimed": min(gpus), "simulated": simulated(question, folder)}


def simulated(question: Question, folder: Path) -> str:
    """The verdict of our simulation on the smallest deployment of an answer."""
    rate, prompt, answer, ttft, tpot = LOADS[question.load]
    goals = {"ttft_p99": ttft, "tpot_p99": tpot}
    stated = CatalogueQuestion(
        question.model, [question.gpu], goals, rate, prompt_tokens=prompt, answer_tokens=answer
    )  # fmt: skip
    try:
        asked = catalogue_question(stated, {})
        smallest = min(deployments_of_file(folder, asked), key=lambda deployment: deployment.gpus)
        families, refused = estimate_families(asked, [smallest])
        if all(family.family is not smallest.family for family in families):
            return next(family.reason for family in refused if family.family is smallest.family)
        simulations = Simulations({}, lambda key, window: None, Processes(1))
        (trial,) = Evaluator(asked, horizon(asked, families), simulations).settle([smallest])
    except BadInput as error:
        return str(error)
    return f"{smallest.gpus} GPUs: {'meets the goals' if trial.meets else trial.reason}"


def measured(question: Question, rows: list[Row]) -> int | None:
    """The fewest GPUs of measured deployments whose means meet the goals; None without such rows."""
    rate, prompt, answer, ttft, tpot = LOADS[question.load]
    limits, gpus = (float(ttft.removesuffix("s")), float(tpot.removesuffix("ms")) / 1000), []
    published = load_model(question.model).checkpoints[0].formats.experts
    for row in rows:
        alike = max(row.isl / prompt, prompt / row.isl, row.osl / answer, answer / row.osl) <= ALIKE
        same = row.precision == ("fp4" if published == "mxfp4" else published)
        same = same and not row.refusal and not row.assumption
        if not alike or not same or (row.model, row.system) != (question.model, SYSTEMS[question.gpu]):
            continue
        if row.ttft <= limits[0] and row.tpot <= limits[1]:
            devices = sum(workers.count * workers.devices for workers in (row.prefill, row.decode) if workers)
            served = row.in_flight / (row.ttft + (row.osl - 1) * row.tpot)
            gpus.append(math.ceil(rate / served - 1e-9) * devices)
    return min(gpus, default=None)


def table(rows: list[dict[str, Any]]) -> str:
    """The answers as a table of the page."""
    lines = [
        "| model | GPU, load | ours: GPUs (best estimate) | CPU s | AIConfigurator: claimed | simulated | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own, peer = row["twin"], row["aiconfigurator"] or {}
        answer = own.get("refused") or _gpus(own)
        claimed, verdict = peer.get("claimed", "no answer"), _brief(peer.get("simulated", ""))
        cells = [row["model"], f"{row['gpu']}, {row['load']}", answer, own["cpu"], claimed, verdict]
        if not row["aiconfigurator"]:
            cells[4] = "not asked"
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, row.get("measured") or ""]) + " |")
    return "\n".join(lines)


def _gpus(own: dict[str, Any]) -> str:
    """GPUs of the recommendation, and by the best estimate; else bounds, or the sentence of an answer without one."""
    if "over" in own:  # in a file of before plans had a limit
        return "**over 60 s**"
    if own["gpus"] is None and own.get("stop") is not None:
        incumbent = own["stop"]["incumbent"]
        text = f"**≥ {own['stop']['least_gpus']}**"
        if incumbent is None or incumbent["gpus"] < own["stop"]["least_gpus"]:  # in files of before, as estimated
            return f"{text} ({own['by_estimate']})"
        sure = "as estimated" if incumbent["sure"] is None else f"{100 * incumbent['sure']:.0f} % sure, not confirmed"
        return f"{text}; {incumbent['devices']} {sure}"
    if own["gpus"] is None:
        return str(own["answer"]).partition(". ")[0].partition(";")[0]
    return f"{own['devices']}" + (f" ({own['by_estimate']})" if own["by_estimate"] else "")


def _brief(verdict: str) -> str:
    """A verdict without the queue of a saturated system, and without the goal, which the load states."""
    head, saturated, _ = verdict.partition("saturated")
    text = (head + saturated).partition(", goal")[0]
    return text.replace(" GPUs:", ":").replace(" is at least ", " ≥ ").replace(" is ", " ")


def _in_order(rows: dict[tuple[str, ...], dict[str, Any]]) -> list[dict[str, Any]]:
    return [rows[name] for name in map(astuple, questions()) if name in rows]


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Ask what is not in the file yet, write it after each answer, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=Path, default=None)
    parser.add_argument("--answers", type=Path, default=Path("aiconfigurator-answers"))
    parser.add_argument("--package", type=Path, default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--page", type=Path, default=None)
    arguments = parser.parse_args()
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    if arguments.out is not None and arguments.out.exists():
        answered = json.loads(arguments.out.read_text())["questions"]
        rows = {(row["model"], row["gpu"], row["load"]): row for row in answered}
    silicon = [] if arguments.package is None else read_rows(arguments.package)
    for question in questions():
        name = (question.model, question.gpu, question.load)
        folder, row = arguments.answers / "-".join(name), rows.get(name)
        unknown = row is None or row["aiconfigurator"] is None
        peers = arguments.aiconfigurator is not None or (folder / ANSWERED).exists()
        if arguments.only not in " ".join(name) or not (row is None or (unknown and peers)):
            continue
        if row is None:
            row = {**asdict(question), "twin": twins(question), "measured": measured(question, silicon)}
        peer = aiconfigurators(arguments.aiconfigurator, question, folder) if peers else None
        rows[name] = row | {"aiconfigurator": peer, "commit": row.get("commit", commit())}
        print(json.dumps(rows[name]), flush=True)
        if arguments.out is not None:
            result = {"provenance": provenance("twin.benchmark-plan-questions/1"), "questions": _in_order(rows)}
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.page is not None:
        before = arguments.page.read_text().partition(MARK)[0]
        arguments.page.write_text(f"{before}{MARK}\n\n{table(_in_order(rows))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
