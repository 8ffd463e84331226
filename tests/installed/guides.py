"""Runs the lines of the tutorial and the how-to guides as they stand, installed from a wheel as `verbs.py` does.

    python -m tests.installed.guides [WHEEL [PAGE ...]]

Each line of a fenced block that begins with `twin` is run by a shell, in the order of its page, in a folder with what
the page tells the reader to have. `REDUCED` adds flags to those that take more than a minute, `PLACEHOLDERS` has the
words by which a line is known that cannot run here. A line is run if no table has it, so a new one that fails is
noticed; so is an entry that no line needs.
"""

from __future__ import annotations

import gzip
import re
import shlex
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tests.installed.verbs import ADOPTED, MISSED, MODEL, ROOT, TRACE, UNDECIDED, Commands, install

SERVER = "http://127.0.0.1:8000"

PLACEHOLDERS = {
    "path/to/": "weights of the reader's own",
    "--model DIR": "weights of the reader's own",
    "SCENARIO": "a scenario of the reader's own",
    "RUN": "a run of the reader's own",
    "spans.json": "a collector's file",
    "planner.example": "other machines",
    "steps.csv": "a vLLM with a recording scheduler",
    "kernels": "aiconfigurator-core",
}

SHORT = "--set workload.requests=12 --set loads=[0.5] --set profiling.rounds=12 --repeats 2 --tolerance 1000"

REDUCED: dict[str, str] = {
    "twin adopt": " ".join(ADOPTED),
    "twin replay observed": "--vocabulary 500",
    "--metrics .* --every 60": "--every 1 --duration 4",
    "--refined new.yaml": "--once",
    "twin serve-live": "--port 0",
    "twin ablate": "--set workload.requests=60",
    "--day profile": "--set workload.arrivals.rate=2 --set workload.requests=7200",
    "validate-autoscaling-cpu.yaml$": "--set workload.requests=200 --repeats 2 --tolerance 1000",
    "validate-cpu.yaml$": f"{SHORT} --set model.path={MODEL}",
    "validate-speculation-cpu.yaml$": f"{SHORT} --set profiling.max_steps=12 --set profiling.answers=4",
    "validate-(sessions|tp|pd)-cpu.yaml$": f"{SHORT} --set profiling.max_steps=12",
    "validate-sun-cpu.yaml": f"{SHORT} --set profiling.max_steps=12",
    "--ratio 1:8$": "--set requests=16 --repeats 2 --tolerance 1000",
}
"""Flags for lines that a pattern is found in: the first that fits."""

BEFORE = {"watch": "adopt"}
"""Pages that begin where another ends."""


def main() -> None:
    """Install, run the pages, and exit with 1 if something failed."""
    wheel, *names = sys.argv[1:] or [str(ROOT)]
    failed = False
    with tempfile.TemporaryDirectory(prefix="guides-") as folder:
        twin = install(wheel, Path(folder, "environment"))
        for page in pages():
            if not names or page.stem in names:
                print(f"{page.stem}:", flush=True)
                place = Path(folder, page.stem)
                prepare(place)
                runs = Commands(twin, place)
                follow(page, runs, place)
                failed = failed or runs.failed
    for words in unused():
        print(f"FAILED {words!r}: an entry of a table that no line needs")
        failed = True
    sys.exit(1 if failed else 0)


class Line(NamedTuple):
    """A command line and the exit codes that it may have."""

    text: str
    codes: tuple[int, ...]


class Block(NamedTuple):
    """A fenced block of a page, and the file that it is to be saved as."""

    file: str | None
    language: str
    text: str


def pages() -> list[Path]:
    """The tutorial and the how-to guides."""
    return sorted([*(ROOT / "docs" / "tutorial").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md")])


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    fence = re.compile(r"(?:Save this as `([\w.-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
    return [Block(*match.groups()) for match in fence.finditer(page.read_text())]


def lines(text: str) -> list[Line]:
    """The commands of a block; `$ echo $?` and the number below it say the exit code of the one before."""
    commands: list[Line] = []
    previous = ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = line.removeprefix("$ ")
        if words.startswith("twin ") or " && twin " in words:
            measured = words.startswith(("twin validate", "twin calibrate run"))
            codes = (0, MISSED, UNDECIDED) if measured else (0, UNDECIDED) if words.startswith("twin watch") else (0,)
            commands.append(Line(words, codes))
        elif previous == "$ echo $?":
            commands[-1] = Line(commands[-1].text, (int(line),))
        previous = line
    return commands


def unused() -> list[str]:
    """Entries of the tables that no line needs."""
    everything = [line.text for page in pages() for block in blocks(page) for line in lines(block.text)]
    return [words for words in (*PLACEHOLDERS, *REDUCED) if not any(re.search(words, line) for line in everything)]


def shortened(line: str) -> str:
    """The line with the flags that make it shorter, in place of its own `--every` and `--duration`."""
    flags = next((flags for pattern, flags in REDUCED.items() if re.search(pattern, line)), "")
    return (re.sub(r" --(every|duration) \d+", "", line) if "--every" in flags else line) + f" {flags}".rstrip()


def follow(page: Path, runs: Commands, place: Path) -> None:
    """Run the lines of a page in a folder. Lines that name a server get the address of one that is started for them."""
    with ExitStack() as servers:
        for earlier in (page.with_stem(BEFORE[page.stem]), page) if page.stem in BEFORE else (page,):
            for block in blocks(earlier):
                if block.file is not None:
                    (place / block.file).write_text(block.text)
                elif block.language == "python":
                    runs.shell(f"python -c {shlex.quote(block.text)}", (0,))
                for line in lines(block.text):
                    if not any(words in line.text for words in PLACEHOLDERS):
                        run(line, runs, servers)


def run(line: Line, runs: Commands, servers: ExitStack) -> None:
    """Run one line, or start the server that it starts, and send requests through a recording one."""
    text = shortened(line.text)
    if SERVER in text:
        server = runs.server("serve-live", "--model", MODEL, "--random-weights", "--port", "0")
        text = text.replace(SERVER, servers.enter_context(server))
    if line.codes == (0,) and (" serve-live " in text or " --upstream " in text):
        with runs.server(*shlex.split(text)[1:]) as address:
            if " --upstream " in text:
                runs.shell(f"twin replay trace.csv --url {address} -o sent --vocabulary 500", (0,))
    else:
        runs.shell(text, line.codes)


def prepare(place: Path) -> None:
    """Put into a folder what pages take for granted: the examples, and traces of the reader's own."""
    shutil.copytree(ROOT / "examples", place / "examples")
    (place / "trace.csv").write_text(TRACE)
    write_traces(place)


def write_traces(folder: Path) -> None:
    """Write short traces under the names of public ones."""
    rows = "".join(f"2023-11-16 18:{n:02}:00.0000000,{90 * n + 50},{20 + n}\n" for n in range(60))
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(azure)
    (folder / "azure_llm_2023_conv.csv.gz").write_bytes(gzip.compress(azure.encode()))
    turns = "".join(f"s{n % 4},0,{n}.0,{640 + n},20,1.0,2.0,1-{10 + n // 64}\n" for n in range(40))
    (folder / "agents.csv").write_text("trace,agent,t,in,out,api_time,think_time,block_ids\n" + turns)


if __name__ == "__main__":
    main()
