"""Tuned modules behind the HTTP server: the answers of all tasks at once, compared with those of the training code.

The server is a process of its own with a prefill engine for each task and one shared decode engine, or an engine with a
decoder of its own for each task. Clients send the prompts of all tasks mixed, so that a decode step has sequences of
several tasks.
"""

from __future__ import annotations

import http.client
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from live.adaptation.forward import ForwardPass, Modules
from live.adaptation.runs import Document, read_size
from live.adaptation.tasks import draw
from live.adaptation.text_lessons import Pair, pair_lesson
from live.adaptation.weights import read_model, rounded
from live.models.config import read_config
from live.models.linear import Rounding
from live.models.weights import model_bytes
from live.streamed import HOST, completion_events
from workloads.errors import BadInput, TwinError

SCHEMA = "twin.served-modules/1"

SCENARIO = """\
schema: twin.scenario/1
kind: serving
name: served-modules
workload:
  requests: 1
  prefill: {{distribution: fixed, mean: 8}}
  decode: {{distribution: fixed, mean: 8}}
  arrivals: {{process: poisson, rate: 1}}
  models: {{count: {models}}}
engine: {{num_gpu_blocks: 1024, max_num_seqs: 64, max_num_batched_tokens: 512, enable_prefix_caching: false}}
step_time: {{source: linear, overhead: 0.001}}
system: {{layout: disaggregated, decode: {decode}, link: {{bandwidth: 1.0e+9, bytes_per_token: 1024}}}}
"""
"""The topology of the server; lengths, rate, step times and link are not used."""

TIMEOUT = 60.0
"""Time limit for an answer, seconds."""


@dataclass(frozen=True)
class ServedModules:
    """The base, which all share, rounded to `bits`, and each task's module; `isolated`: they decode by themselves."""

    base: Path
    modules: Mapping[str, Path]
    bits: int | None = None
    isolated: bool = False


@dataclass(frozen=True)
class Answer:
    """One streamed answer: its tokens, and seconds from the request to the first and to the last of them."""

    tokens: list[int]
    first: float
    last: float


def measure_served(served: ServedModules, prompts: int, concurrency: int, seed: int) -> Document:
    """Serve modules, and ask for the answers to `prompts` of each task that no training draws.

    By task, exact match of the served and of the training code's answers, and the share of equal answers; of all
    together tokens a second, seconds to the first token and per further token, the decode modules' bytes, and decode
    steps by the number of tasks in them.
    """
    if len(served.modules) < 2:
        raise BadInput("expected two modules or more", field="--module", value=len(served.modules))
    pairs = {task: _pairs(served.base, task, prompts, seed) for task in served.modules}
    offline = {task: _offline(served, task, pairs[task]) for task in served.modules}
    names = {task: f"model-{i}" for i, task in enumerate(served.modules)}
    mixed = [(task, pairs[task][i]) for i in range(prompts) for task in served.modules if i < len(pairs[task])]
    with _server(served, names) as port, ThreadPoolExecutor(concurrency) as pool:
        _ask(port, names[mixed[0][0]], mixed[0][1])  # the first request warms up
        begin = time.perf_counter()
        answers = list(pool.map(lambda row: _ask(port, names[row[0]], row[1]), mixed))
        seconds = time.perf_counter() - begin
        steps = _steps_by_models(port, len(names))
    tasks = {}
    for task in served.modules:
        expected = [pair.answer for pair in pairs[task]]
        served_answers = [answer.tokens for answer, (name, _) in zip(answers, mixed, strict=True) if name == task]
        tasks[task] = {
            "exact_match_served": _share(served_answers, expected),
            "exact_match_offline": _share(offline[task], expected),
            "equal_answers": _share(served_answers, offline[task]),
        }
    rounding = None if served.bits is None else Rounding(served.bits)
    decoder_bytes = model_bytes(read_config(served.base), torch.float32, rounding)
    gaps = [(answer.last - answer.first) / max(len(answer.tokens) - 1, 1) for answer in answers]
    return {
        "schema": SCHEMA,
        "decode": "isolated" if served.isolated else "shared",
        "bits": served.bits,
        "prompts": prompts,
        "concurrency": concurrency,
        "seed": seed,
        "tasks": tasks,
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / seconds,
        "ttft_mean": statistics.mean(answer.first for answer in answers),
        "tpot_mean": statistics.mean(gaps),
        "decoder_bytes": decoder_bytes * (len(served.modules) if served.isolated else 1),
        "decode_steps_by_models": steps,
    }


def _pairs(model: Path, task: str, prompts: int, seed: int) -> Sequence[Pair]:
    """Prompts of a task that no training draws, at most `prompts`, with their answers."""
    if task.endswith(".jsonl"):
        return pair_lesson(Path(task), model, read_config(model), seed).evaluation[:prompts]
    rows = draw((task,), read_size(model).digits, prompts, seed, 0, "evaluation")
    return [Pair(prompt, answer) for prompt, answer in zip(*(tensor.tolist() for tensor in rows), strict=True)]


def _offline(served: ServedModules, task: str, pairs: Sequence[Pair]) -> list[list[int]]:
    """The training code's answers; prompts of one length are computed together."""
    config, prefill = read_model(served.modules[task])
    decode = rounded(prefill if served.isolated else read_model(served.base)[1], served.bits)
    modules, longest = Modules(ForwardPass(config), prefill, decode), max(len(pair.answer) for pair in pairs)
    answers: dict[int, list[int]] = {}
    for size in {len(pair.prompt) for pair in pairs}:
        rows = [row for row, pair in enumerate(pairs) if len(pair.prompt) == size]
        generated = modules.generate(torch.tensor([pairs[row].prompt for row in rows]), longest).tolist()
        answers |= dict(zip(rows, generated, strict=True))
    return [answers[row][: len(pair.answer)] for row, pair in enumerate(pairs)]


def _share(answers: Sequence[list[int]], expected: Sequence[list[int]]) -> float:
    return statistics.mean(float(answer == right) for answer, right in zip(answers, expected, strict=True))


@contextmanager
def _server(served: ServedModules, names: Mapping[str, str]) -> Iterator[int]:
    """A server of the modules; gives its port."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", errors="replace") as errors:
        scenario = Path(folder) / "scenario.yaml"
        decode = "isolated" if served.isolated else "shared"
        scenario.write_text(SCENARIO.format(models=len(names), decode=decode), encoding="utf-8")
        command = [
            sys.executable, "-m", "live.server", "--model", str(served.base), "--scenario", str(scenario),
            "--in-process", "--port", "0",
        ]  # fmt: skip
        for task, name in names.items():
            command += ["--module", f"{name}={served.modules[task]}"]
        if served.bits is not None:
            command += ["--decoder-bits", str(served.bits)]
        # A file takes all that the server logs; a pipe that nobody reads would be full at 64 KiB, and block it.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if not line.startswith("http://"):
                    process.wait()
                    errors.seek(0)
                    log = errors.read().splitlines()
                    raise TwinError(f"the server has not started: {log[-1] if log else 'no reason given'}")
                yield int(line.split()[0].rpartition(":")[2])
            finally:
                process.terminate()


def _ask(port: int, model: str, pair: Pair) -> Answer:
    body = {
        "model": model, "prompt": pair.prompt, "max_tokens": len(pair.answer), "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    begin = time.perf_counter()
    token_ids: list[int] = []
    first = last = 0.0
    for event in completion_events(port, body, TIMEOUT):
        last = time.perf_counter() - begin
        first = first or last
        for choice in event.get("choices", ()):
            token_ids += choice.get("token_ids") or ()
    return Answer(token_ids, first, last)


def _steps_by_models(port: int, models: int) -> list[int]:
    """Decode steps with sequences of 1, 2, … models, from the server's metrics."""
    with closing(http.client.HTTPConnection(HOST, port, timeout=TIMEOUT)) as connection:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    name = "serving_twin:models_per_decode_step_bucket"
    cumulative = [float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)][:models]
    return [int(count - before) for count, before in zip(cumulative, [0.0, *cumulative], strict=False)]
