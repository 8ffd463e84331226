"""Records what every command prints and predicts, so that two commits can be compared.

    python -m benchmarks.golden record FOLDER [--only PATTERN] [--jobs 2]
    python -m benchmarks.golden compare OLD NEW

`record` writes a JSON file for each case: exit code, document and messages of a command, step times of random batches
for each source, and the answers of a live server. Times, paths and versions are left out, since they differ from run to
run. `compare` prints every difference, a line each, and ends with 1 if there is one. A change of structure should leave
none; a corrected number or a renamed field should be the only difference. Not part of the product.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import io
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
VLLM = DATA / "measured/vllm_0.19_rtxpro6000_llama31_8b"

VOLATILE = {
    "run", "date", "created", "commit", "versions", "python", "platform", "host", "command", "wall", "cpu_seconds",
    "wall_seconds", "seconds_taken", "elapsed", "duration_seconds", "machine", "id", "started", "finished",
}  # fmt: skip
"""Fields of documents that differ from run to run."""

VERBS = (
    "adapt", "adapt base", "adapt compensate", "adapt diagnose", "adapt evaluate", "adapt measure", "adapt prefill",
    "adapt quantise", "adapt serve", "adapt text", "calibrate", "calibrate fit", "calibrate import", "calibrate refine",
    "calibrate roofline", "calibrate run", "init", "observe", "page", "plan", "replay", "report", "reproduce",
    "serve-live", "simulate", "sweep", "validate",
)  # fmt: skip

SIMULATED = {
    "autoscaling": 6000, "chat-sessions": 400, "kv-offloading": 400, "many-models-h100": 400,
    "mixed-pools-llama-8b": 400, "pd-tiny-cpu": 100, "pipeline-l40s-llama-70b": 100, "plan-two-gpus": 200,
    "prelude-judges": 600, "prelude-rubric": 600, "roofline-h200-llama-70b": 200, "spear-slo": 100,
    "speculative-h200-llama-70b": 200, "sun-isolated": None, "sun-shared": None, "tenants": 600,
    "tiny-llama-cpu": 100, "vllm-rtxpro6000-llama31-8b": None,
}  # fmt: skip
"""Serving examples, with the requests that each is reduced to."""

BUNDLES = ("afd-azure", "afd-deepseek-v3", "afd-h200-llama-70b", "afd-tiny-cpu")

PLAN = (
    "plan --model llama-3.1-8b --gpu h100 --rate 20 --prompt-tokens 1000 --answer-tokens 200 --slo ttft_p99=1s "
    "--slo tpot_p99=30ms --tensor-parallel 1 --layout colocated --chunk 2048 --brief --json --no-figures --jobs 1"
)

CHAT = [{"role": "user", "content": "count"}]
QUESTIONS: list[tuple[str, dict[str, Any] | None]] = [
    ("/v1/models", None),
    ("/health", None),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "temperature": 0}),
    ("/v1/completions", {"prompt": [[1, 2], [3, 4, 5]], "max_tokens": 4, "ignore_eos": True, "temperature": 0, "n": 1}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True, "seed": 7, "temperature": 0.8, "n": 2}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "logprobs": 2, "ignore_eos": True}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "stream": True, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "text without a tokenizer", "max_tokens": 3}),
    ("/v1/completions", {"prompt": [1, 2], "max_tokens": -1}),
    ("/v1/completions", {"prompt": [10**9], "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}),
    ("/v1/embeddings", {"input": [1, 2, 3]}),
    ("/v1/nothing", {"a": 1}),
    ("/v1/completions", {"prompt": [1], "unknown_field": 1, "max_tokens": 2, "seed": 1}),
]


# -- cases -------------------------------------------------------------------------------------------------------------


def cases() -> dict[str, Callable[[], Any]]:
    """All cases by name."""
    table: dict[str, Callable[[], Any]] = {"help/twin": partial(command, "--help", raw=True)}
    table |= {f"help/{verb.replace(' ', '-')}": partial(command, f"{verb} --help", raw=True) for verb in VERBS}
    for name, requests in SIMULATED.items():
        size = "" if requests is None else f" --set workload.requests={requests}"
        line = f"simulate examples/{name}.yaml --json{size}"
        if name == "plan-two-gpus":
            continue
        table[f"simulate/{name}"] = partial(command, line + " --jobs 1", pages=name in ("tenants", "kv-offloading"))
        table[f"table/{name}"] = partial(command, line.replace(" --json", " --no-figures") + " --jobs 1", raw=True)
    short = "examples/roofline-h200-llama-70b.yaml --set workload.requests=60 --json --jobs 1"
    table["simulate/replications"] = partial(command, f"simulate {short} --replications 3 --draws 24", pages=True)
    table["sweep/serving"] = partial(command, f"sweep {short} --set workload.arrivals.rate=2,4", pages=True)
    for name in BUNDLES:
        ratio = "" if name == "afd-tiny-cpu" else " --ratio 1,4,8"
        ratio += f" --trace {DATA}/traces/azure_llm_2023_conv.csv.gz" if name == "afd-azure" else ""
        table[f"sweep/{name}"] = partial(command, f"sweep examples/{name}.yaml{ratio} --json --jobs 1", pages=True)
    table["plan/small"] = partial(command, PLAN)
    table["plan/file"] = partial(command, "plan examples/plan-two-gpus.yaml --brief --json --jobs 1", pages=True)
    for paper in ("afd", "sun", "spear", "prelude", f"fastafd --data {DATA}/measured/afd_gb200"):
        table[f"reproduce/{paper.split()[0]}"] = partial(command, f"reproduce {paper} --json --jobs 1", pages=True)
    table["calibrate/roofline"] = partial(
        command, "calibrate roofline --model deepseek-v3 --hardware h200-sxm", raw=True
    )
    table["calibrate/refine"] = partial(
        command, f"calibrate refine examples/vllm-rtxpro6000-llama31-8b.yaml --run {VLLM} --first 60 -o r.yaml --json"
    )
    table["init"] = partial(command, "init --model llama-3.1-8b --gpu h100-sxm", raw=True)
    table["server"] = server
    for name in [name for name in SIMULATED if name != "plan-two-gpus"]:
        table[f"steps/{name}"] = partial(steps, name)
    table |= {f"refusals/{name}": partial(refusals, name) for name in ("tenants", "kv-offloading", "sun-shared")}
    return table


def command(line: str, *, raw: bool = False, pages: bool = False) -> Any:
    """Run `twin` in a folder with the examples: its exit code, document (or text) and messages.

    With `pages`, also every number in the text of the HTML page that the run leaves.
    """
    with workplace() as folder:
        run = run_twin(line.split(), folder)
        code, text, messages = run.returncode, run.stdout, stable(run.stderr, folder)
        document: Any = stable(text, folder)
        if not raw and code in (0, 3, 4):
            document = without_volatile(json.loads(text))
        result = {"code": code, "document": document, "messages": messages}
        if pages:
            result["numbers_of_page"] = sorted({number for page in folder.rglob("*.html") for number in numbers(page)})
            result["files"] = sorted({path.name for path in (folder / "runs").rglob("*") if path.is_file()})
    return result


def refusals(name: str) -> Any:
    """Return what is said of a hundred bad values of an example's fields."""
    document = yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text())
    fields = list(leaves(document))
    rng = random.Random(name)
    bad = [-1, 1e308, "x", None, [], {}, [1, "a"], True, float("nan"), {"policy": 3}, "", 0]
    result = {}
    with workplace() as folder:
        for number in range(100):
            field, value = rng.choice(fields), rng.choice(bad)
            path = folder / "examples" / "bad.yaml"
            path.write_text(yaml.safe_dump(with_field(document, field, value)))
            code, messages = in_process(["simulate", str(path), "--json", "--no-figures", "--jobs", "1", "--set",
                                         "workload.requests=3"], folder)  # fmt: skip
            result[f"{number:03} {field}={value!r}"] = [code, stable(messages, folder)]
    return result


def in_process(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in this process: its exit code and messages."""
    from twin.cli import run

    messages, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(io.StringIO()):
            code = run(arguments)
    except BaseException as error:
        return -1, f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    return code, messages.getvalue()


def steps(name: str) -> Any:
    """Step times of ten thousand random batches by the source of an example: a digest, a sum, and every hundredth."""
    from twin.api.inputs import load
    from twin.serving.plan.plan import make_plan

    scenario = load(ROOT / f"examples/{name}.yaml")
    spec: Any = scenario.spec
    trace = spec.workload.read_trace(ROOT / "examples")
    times = make_plan(spec, ROOT / "examples", trace).pools[0].step_time
    seconds = [times.seconds(batch) for batch in random_batches(10_000)]
    runs = [value for n in (1, 7, 64) for value in times.decode_seconds(n, 900 * n, 2000, 50)]
    digest = hashlib.sha256(" ".join(value.hex() for value in (*seconds, *runs)).encode()).hexdigest()
    return {"digest": digest, "sum": sum(seconds), "some": seconds[::100], "runs": runs[::10]}


def random_batches(count: int) -> Iterator[Any]:
    """Batches of decodes and prompt chunks."""
    from schedulers.batches import Chunk, DecodeBatch, MixedBatch
    from schedulers.sequence import Sequence
    from workloads.request import Request

    rng = random.Random(11)
    anyone = Sequence(Request(0, 0.0, 2000, 100), 0, False)
    for _ in range(count):
        contexts = [rng.randint(1, 4000) for _ in range(rng.choice((0, 1, 3, 30, 200)))]
        lengths = [rng.randint(1, 2000) for _ in range(rng.choice((0, 0, 1, 2)) or (not contexts))]
        chunks = [Chunk(anyone, length, rng.choice((0, 0, 512)), rng.random() < 0.5) for length in lengths]
        kind = MixedBatch if chunks else DecodeBatch
        yield kind(chunks, [anyone] * len(contexts), sum(contexts), max(contexts, default=0))


def server() -> Any:
    """The answers of `twin serve-live` with random weights to fixed requests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with workplace() as folder:
        line = f"serve-live --model examples/models/tiny-llama.json --random-weights --port {port} --num-gpu-blocks 200"
        process = subprocess.Popen([sys.executable, "-m", "twin", *line.split()], cwd=folder, env=environment(),
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
        try:
            _wait(port, process)
            return {f"{n:02} {path}": ask(port, path, body) for n, (path, body) in enumerate(QUESTIONS)}
        finally:
            process.terminate()
            process.wait(30)


def _wait(port: int, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(process.stderr.read() if process.stderr else "ended")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise TimeoutError("the server did not start")


def ask(port: int, path: str, body: dict[str, Any] | None) -> Any:
    """Status and answer of one request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if body and body.get("stream"):
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        return [status, [without_volatile(json.loads(event)) for event in events]]
    return [status, without_volatile(json.loads(text)) if text.startswith(("{", "[")) else text]


# -- helpers -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A folder with the examples, and the shared data where the examples expect it."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve() / "place"
        shutil.copytree(ROOT / "examples", folder / "examples")
        if DATA.exists():
            (folder.parent / "shared").symlink_to(DATA.parent)
        yield folder


def environment() -> dict[str, str]:
    """This process's, with this checkout on the path and 100 columns."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def run_twin(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line of this checkout."""
    return subprocess.run(
        [sys.executable, "-m", "twin", *arguments], cwd=folder, env=environment(), capture_output=True, text=True
    )


def stable(text: str, folder: Path) -> str:
    """A text without paths, names of runs, and times."""
    text = text.replace(str(folder), "PLACE").replace(str(ROOT), "ROOT").replace(str(DATA), "DATA")
    text = re.sub(r"runs/[\w.-]+", "runs/RUN", text)
    text = re.sub(r"\b\d{4}-\d\d-\d\d[T \d:.+Z-]*", "DATE", text)
    lines = [line for line in text.splitlines() if not re.search(r"\[\d+(/\d+)?[],]|\(?\d+ of \d+|it/s|\r", line)]
    return "\n".join(lines)


def without_volatile(value: Any) -> Any:
    """A document without what differs from run to run."""
    if isinstance(value, dict):
        return {key: without_volatile(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [without_volatile(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(/[\w.+-]+)+/(?=[\w.-]+)", "", value)
    return value


def numbers(page: Path) -> set[str]:
    """The numbers in a page's text, without those of scripts and styles."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"\d\d:\d\d:\d\d[.\d]*", " ", text)
    return set(re.findall(r"(?<![\w.#-])-?\d+\.\d{2,}(?![\w.])", re.sub(r"<[^>]*>", " ", text)))


def with_field(document: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A copy of the document with one field changed."""
    changed: dict[str, Any] = json.loads(json.dumps(document))
    *path, last = field.split(".")
    section = changed
    for name in path:
        section = section[name]
    section[last] = value
    return changed


def leaves(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{prefix}{key}"
            yield from leaves(inner, f"{prefix}{key}.")


# -- commands ----------------------------------------------------------------------------------------------------------


def record_one(folder: Path, name: str) -> str:
    """Record one case."""
    try:
        result = cases()[name]()
    except Exception as error:  # a case that cannot be made is a difference, too
        result = {"failed": f"{type(error).__name__}: {error}"[:500]}
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, sort_keys=True))
    return name + (f": {result['failed']}" if isinstance(result, dict) and "failed" in result else "")


def differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """The differences of two documents, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys(), key=str):
            if key not in new or key not in old:
                yield f"{where}.{key}: only {'before' if key in old else 'now'}"
            else:
                yield from differences(old[key], new[key], f"{where}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{where}[{index}]")
    elif old != new and not (old != old and new != new):
        yield f"{where}: {str(old)[:300]!r} -> {str(new)[:300]!r}"


def compare(old: Path, new: Path) -> int:
    """Print the differences of two recordings."""
    names = {path.relative_to(folder) for folder in (old, new) for path in folder.rglob("*.json")}
    count = 0
    for name in sorted(names):
        if not ((old / name).exists() and (new / name).exists()):
            lines = [f"{name}: only {'before' if (old / name).exists() else 'now'}"]
        else:
            before, after = (json.loads((folder / name).read_text()) for folder in (old, new))
            lines = list(differences(before, after, str(name.with_suffix(""))))
        count += len(lines)
        for line in lines[:40]:
            print(line)
        if len(lines) > 40:
            print(f"{name}: {len(lines) - 40} more")
    print(f"{len(names)} cases, {count} differences")
    return 1 if count else 0


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--only", default="*")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.action == "compare":
        return compare(*options.folders)
    names = [name for name in cases() if fnmatch.fnmatch(name, options.only)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in pool.map(partial(record_one, options.folders[0].resolve()), names):
            print(name, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
