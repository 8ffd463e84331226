"""Runs each command of README as a user has it: installed from a wheel, in a folder without the checkout.

    python -m tests.installed.verbs [WHEEL]

The wheel, or one of this checkout, is installed into an environment of its own, which borrows the dependencies of this
interpreter's. Sizes are reduced by flags where there are some. A command passes if it writes no traceback and exits
with 0, or with 4 or 5 where it compares measurements with a goal, which a busy machine misses.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "examples/models/tiny-llama.json"
MISSED, UNDECIDED = 4, 5

COMMANDS: tuple[tuple[str, ...], ...] = (
    (
        "plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--rate", "20", "--prompt-tokens", "1000",
        "--answer-tokens", "200", "--slo", "ttft_p99=1s", "--slo", "tpot_p99=30ms",
    ),
    ("simulate", "examples/sun-shared.yaml", "--set", "workload.requests=200"),
    (
        "sweep", "examples/prelude-judges.yaml", "--set", "workload.requests=200", "--set", "engine.max_num_seqs=32,64",
        "--runs", "swept",
    ),
    ("report",),
    ("ablate", "examples/chat-sessions.yaml", "--set", "workload.requests=100", "--replications", "2"),
    ("init", "-o", "scenario.yaml"),
    ("simulate", "scenario.yaml", "--set", "workload.requests=50"),
    ("sweep", "examples/afd-deepseek-v3.yaml", "--ratio", "1,2", "--set", "batch_size=64"),
    ("reproduce", "afd"),
    ("calibrate", "run", "--device", "cpu", "--model", MODEL, "-o", "mine.calibration.yaml", "--quick"),
    ("adapt", "base", "base", "--steps", "30"),
    ("adapt", "prefill", "base", "sun", "--task", "reverse_add_one", "--steps", "20"),
    (
        "validate", "examples/validate-cpu.yaml", "--set", f"model.path={MODEL}", "--set", "workload.requests=12",
        "--set", "loads=[0.5]", "--set", "profiling.rounds=12", "--repeats", "2", "--tolerance", "1000",
    ),
)  # fmt: skip
"""Those that end by themselves and need no server."""


def main() -> None:
    """Install, run everything, and exit with 1 if something failed."""
    with tempfile.TemporaryDirectory(prefix="installed-") as folder:
        wheel = sys.argv[1] if len(sys.argv) > 1 else str(ROOT)
        twin, place = install(wheel, Path(folder, "environment")), Path(folder, "place")
        shutil.copytree(ROOT / "examples", place / "examples")
        runs = Commands(twin, place)
        runs.check("--version", expected=r"\(compiled\)")
        for command in COMMANDS:
            runs.check(*command, *([str(max((place / "swept").iterdir()))] if command == ("report",) else []))
        with runs.server("page", "--port", "0", "--no-browser") as address:
            runs.fetch(address)
        (place / "trace.csv").write_text(TRACE)
        with (
            runs.server("serve-live", "--model", MODEL, "--random-weights", "--port", "0") as engine,
            runs.server("observe", "--upstream", engine, "--port", "0", "-o", "observed") as proxy,
        ):
            runs.check("replay", "trace.csv", "--url", proxy, "-o", "replayed", "--vocabulary", "500")
            runs.check("adopt", engine, "--into", "adopted", *ADOPTED)
        recorded = re.search(r"```jsonl\n(.*?)```", (ROOT / "docs" / "how-to" / "refine.md").read_text(), re.DOTALL)
        (place / "requests.jsonl").write_text(recorded[1])
        scenario = "examples/roofline-h200-llama-70b.yaml"
        runs.check("calibrate", "refine", scenario, "--run", "requests.jsonl", "--first", "6", "-o", "refined.yaml")
        missing = verbs_of_readme() - runs.verbs
    for name in sorted(missing):
        print(f"FAILED {name}: a command of README that is not run here")
    sys.exit(1 if runs.failed or missing else 0)


ADOPTED = (
    "--gpu", "cpu", "--replay", "5", "--rate", "8", "--prompt-tokens", "24", "--answer-tokens", "12",
    "--vocabulary", "500", "--set", "engine.max_num_seqs=32",
)  # fmt: skip

TRACE = "arrival,prompt_tokens,output_tokens\n" + "".join(f"{0.1 * i:.1f},{24 + i},{8 + i % 5}\n" for i in range(40))


def install(wheel: str, folder: Path) -> Path:
    """Install a wheel into a new environment; returns its `twin`."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (libraries,) = folder.glob("lib/python*/site-packages")
    (libraries / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [folder / "bin" / "pip", "install", "-q", "--no-deps", wheel], check=True,
        env={**os.environ, "SERVING_TWIN_COMPILE": "1"},
    )  # fmt: skip
    return folder / "bin" / "twin"


def verbs_of_readme() -> set[str]:
    """The commands in README's table, such as `plan` and `calibrate run`."""
    cells = re.findall(r"^\| (`twin .*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    lines = [line for cell in cells for line in re.findall(r"`twin ([^`]*)`", cell)]
    return {verb(line.split()) for line in lines}


def verb(words: list[str]) -> str:
    """The command that a line begins with."""
    return " ".join(words[:2]) if words[0] in ("calibrate", "adapt") else words[0]


class Commands:
    """Runs commands in a folder, without the checkout on any path.

    Attributes:
        verbs: those that were run. failed: whether one of them failed.
    """

    def __init__(self, twin: Path, place: Path) -> None:
        self._twin = twin
        self._place = place
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environment["PATH"] = f"{twin.parent}{os.pathsep}{os.environ['PATH']}"
        self.verbs: set[str] = set()
        self.failed = False

    def check(self, *words: str, expected: str = "") -> None:
        """Run a command to its end, and judge it. `expected` is to be found in its output."""
        allowed = (0, MISSED, UNDECIDED) if verb(list(words)) in ("calibrate run", "validate") else (0,)
        self.shell(shlex.join(["twin", *words]), allowed, expected)

    def shell(self, line: str, codes: tuple[int, ...], expected: str = "") -> None:
        """Run a line in a shell, and judge it by its exit code, too."""
        begun = time.perf_counter()
        ended = subprocess.run(
            ["bash", "-c", line], cwd=self._place, env=self._environment, capture_output=True, text=True, check=False
        )
        good = ended.returncode in codes and re.search(expected, ended.stdout) is not None
        self._judge(shlex.split(line)[1:], good, ended.returncode, ended.stderr, time.perf_counter() - begun)

    @contextmanager
    def server(self, *words: str) -> Iterator[str]:
        """Start a server, hand over the address that it prints, end it with SIGTERM, and judge it."""
        begun = time.perf_counter()
        log = self._place / f"{words[0]}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [self._twin, *words], cwd=self._place, env=self._environment, stdout=errors, stderr=errors
            )
        try:
            yield self._address(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            self._judge(list(words), code == 0, code, log.read_text(), time.perf_counter() - begun)

    def fetch(self, address: str) -> None:
        """Get a page."""
        with urllib.request.urlopen(address, timeout=60) as response:
            self.failed = self.failed or response.status != 200

    def _address(self, process: subprocess.Popen[bytes], log: Path) -> str:
        """The address in a server's output, once it is there."""
        for _ in range(600):
            match = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
            if match is not None:
                return match[0]
            if process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"no address from {process.args}: {log.read_text()}")

    def _judge(self, words: list[str], good: bool, code: int, errors: str, seconds: float) -> None:
        self.verbs.add(verb(words))
        good = good and "Traceback" not in errors
        self.failed = self.failed or not good
        print(
            f"{'ok    ' if good else 'FAILED'} twin {' '.join(words)}  ({seconds:.0f} s, exit code {code})", flush=True
        )
        if not good:
            print(errors, flush=True)


if __name__ == "__main__":
    main()
