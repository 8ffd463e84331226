"""Types what the tutorial and the how-to guides tell the reader to type, follows all links, and reads the architecture.

A ```python block is run as it is. In a ```console block, `$ twin …` is run in process, `$ python FILE` as a program,
and `$ jq …` in a shell if jq is there. Lines below a command must be among those it printed, … standing for anything;
`$ echo $?` states its exit code, otherwise 0. The scenarios in examples/ are made smaller for it. ```text tables are
of the full size: their headlines and their cheapest row are computed again at that size and must be the same; `python
tests/docs/refresh_tables.py` prints them anew.
"""

from __future__ import annotations

import contextlib
import doctest
import gzip
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from pathlib import Path

import pytest

from reports import svg
from tests.installed.guides import Block, blocks, pages, write_traces
from twin.afd import plan
from twin.cli import run

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
AZURE = ROOT.parent / "shared" / "data" / "traces" / "azure_llm_2023_conv.csv.gz"
AZURE_NAME = "AzureLLMInferenceTrace_conv.csv"

GUIDES = pages()
SLOW = (
    "autoscale", "compensate-a-model", "measure-on-a-gpu", "more-than-one-machine", "offload-kv-blocks",
    "own-hardware", "plan", "tune-a-prefill-module", "validate-on-your-machine",
)  # fmt: skip
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])


@dataclass(frozen=True)
class Command:
    """One line that a reader types, and what the page says comes of it."""

    line: str
    shown: list[str]
    code: int


def commands(text: str) -> list[Command]:
    """The commands of a console block; `$ echo $?` and the number below it belong to the one before."""
    blocks_of_page: list[Command] = []
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        line, *output = part.splitlines()
        if line == "echo $?":
            blocks_of_page[-1] = Command(blocks_of_page[-1].line, blocks_of_page[-1].shown, int(output[0]))
        else:
            blocks_of_page.append(Command(line, output, 0))
    return blocks_of_page


def typed(line: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one line; `> FILE` at its end and * in its words are heeded."""
    *words, arrow, target = ["", "", *shlex.split(line)]
    if arrow != ">":
        words, target = [*words, arrow, target], ""
    program, *arguments = [word for word in words if word]
    assert program == "twin", line
    spread = [word_ for word in arguments for word_ in _expand(word)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(spread)
        except SystemExit as stop:
            code = int(stop.code or 0)
    if target:
        Path(target).write_text(out.getvalue())
    return code, out.getvalue(), err.getvalue()


def _program(line: str) -> tuple[int, str, str]:
    """The same of `[NAME=VALUE …] python FILE`, which needs torch."""
    pytest.importorskip("torch")
    *settings, program, file = shlex.split(line)
    assert program == "python", line
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(setting.split("=", 1) for setting in settings)
    process = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True)
    return process.returncode, process.stdout, process.stderr


def _expand(word: str) -> list[str]:
    return sorted(str(path) for path in Path().glob(word)) if "*" in word else [word]


def check(command: Command) -> None:
    if command.line.startswith("jq "):
        if shutil.which("jq"):
            subprocess.run(command.line, shell=True, check=True, capture_output=True)
        return
    code, out, err = _program(command.line) if " python " in f" {command.line}" else typed(command.line)
    assert code == command.code, err
    printed = (out + err).splitlines()
    for line in command.shown:
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert any(re.fullmatch(pattern, line_) for line_ in printed), f"{line!r} is not in {printed}"


def save(block: Block, *, smaller: bool = False) -> None:
    if block.file is not None:
        shrink = smaller and block.file.endswith(".yaml")
        Path(block.file).write_text(_smaller(block.text) if shrink else block.text)


@pytest.mark.usefixtures("own_registries")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in SLOW else ())
        for page in GUIDES
        if page.stem not in ("validate-vllm", "adopt", "watch")  # they need vLLM, or a running server
    ],
)
def test_a_guide_can_be_followed_from_top_to_bottom(
    page: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CURVE_POINTS", 4)
    if page.parent.name != "tutorial":  # figures are slow, and the tutorial draws all there are
        monkeypatch.setattr(svg, "figures", lambda blocks: {})
    for file in sorted(workplace.glob("examples/afd-*.yaml")):
        file.write_text(_smaller(file.read_text()))
    chats = workplace / "examples" / "chat-sessions.yaml"
    chats.write_text(chats.read_text().replace("requests: 3000", "requests: 100"))
    write_traces(workplace)
    tried = 0
    for block in blocks(page):
        save(block, smaller=True)
        if block.language == "python" and block.file is None:  # a file is a plug-in, which a command imports
            exec(compile(block.text, str(page), "exec", dont_inherit=True), {"__name__": "__main__"})
        for command in commands(block.text) if block.language == "console" else []:
            check(command)
            tried += 1
    assert tried > 0


def _smaller(scenario: str) -> str:
    """The scenario with fewer requests, smaller batches and shorter answers."""
    text, changed = re.subn(r"^requests_per_instance: \d+", "requests_per_instance: 100", scenario, flags=re.M)
    assert changed == 1
    text = re.sub(r"^batch_size: \d+", "batch_size: 16", text, flags=re.M)
    return re.sub(r"(decode: .*mean:) \d+", r"\1 20", text)


@pytest.mark.parametrize(
    ("page", "examples"),
    [
        ("explanation/latency-models.md", 18),
        ("explanation/from-microbenchmark-to-step-time.md", 20),
        ("reference/calibration-file.md", 10),
        ("reference/traces.md", 8),
    ],
)
def test_the_examples_of_a_page_give_what_it_says(page: str, examples: int, workplace: Path) -> None:
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted >= examples
    assert result.failed == 0


def test_the_python_of_the_readme_runs(workplace: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    exec(compile(block.text, "README.md", "exec", dont_inherit=True), {"__name__": "__main__"})


def tables() -> Iterator[tuple[Path, str, str]]:
    """(page, command, text block below it) for every printed table."""
    for page in GUIDES:
        for block, below in pairwise(blocks(page)):
            if block.language == "console" and below.language == "text":
                yield page, commands(block.text)[-1].line, below.text


@pytest.mark.parametrize(("page", "line", "table"), sorted(tables()), ids=lambda value: getattr(value, "stem", ""))
def test_a_printed_table_is_what_the_command_prints(
    page: Path, line: str, table: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(page):
        save(block)
    for block in blocks(page):
        for command in commands(block.text) if block.language == "console" else []:
            if command.line.startswith("twin calibrate") and command.code == 0:
                check(command)
    if AZURE_NAME in line:
        if not AZURE.exists():
            pytest.skip("the Azure trace is not here")
        Path(AZURE_NAME).write_bytes(gzip.decompress(AZURE.read_bytes()))
    line = re.sub(r"(--set \S+=)\S+,", r"\1", line)  # the last value only, and its table
    table = table[table.rindex("r* =") :]
    cheapest = min(re.findall(r"^ *([\d.]+) +\d+A-\d+F ", table, re.M), key=float)
    again = re.sub(r" --ratio \S+", "", line) + f" --ratio {cheapest} --no-figures"
    monkeypatch.setattr(plan, "CURVE_POINTS", 4)
    code, out, err = typed(again)
    assert code == 0, err
    compare = _theory if AZURE_NAME in line else str.split  # the draws from a trace differ with its path
    computed = [compare(row) for row in out.splitlines()]
    stable_rows = [row for row in table.splitlines() if "A-" not in row or row.split()[0] == cheapest]
    for row in stable_rows:
        if "r* =" in row:
            assert any(row.split(";")[0] in line_ for line_ in out.splitlines()), row
        else:
            assert compare(row) in computed, f"{row}: see tests/docs/refresh_tables.py"
    assert sum("A-" in row for row in stable_rows) == 1


def _theory(row: str) -> list[str]:
    """The cells of a table row that do not depend on chance: r, bundle, theory, barrier."""
    words = row.split()
    return [words[index] for index in (0, 1, 5, 6)] if "A-" in row else words


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def test_the_readme_has_at_most_700_words() -> None:
    assert 300 < len(prose(ROOT / "README.md").split()) <= 700


def anchors(page: Path) -> set[str]:
    """The targets of links into a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_have_at_most_120_characters_and_links_resolve(page: Path) -> None:
    assert [line for line in prose(page).splitlines() if len(line) > 120 and not line.startswith("|")] == []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_on_the_map() -> None:
    text = (DOCS / "index.md").read_text()
    linked = {(DOCS / target.split("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    for page in PAGES:
        if page.parent.name in {"tutorial", "how-to", "reference", "explanation"}:
            assert page in linked, page


ARCHITECTURE = (DOCS / "explanation" / "architecture.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = PROJECT["tool"]["importlinter"]


def test_the_page_of_architecture_names_every_package_and_part_of_the_twin_and_no_file_that_is_not_there() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks"}
    assert [name for name in sorted(packages) if f"\n| `{name}` |" not in ARCHITECTURE] == []
    folders = {f"`twin/{path.parent.name}/`" for path in ROOT.glob("twin/*/*.py")}
    modules = {f"`twin/{path.name}`" for path in ROOT.glob("twin/*.py") if not path.name.startswith("__")}
    assert [part for part in sorted(folders | modules) if part not in ARCHITECTURE] == []
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", ARCHITECTURE))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_a_request_has_at_most_ten_steps_and_each_names_a_file_for_either_backend() -> None:
    steps = re.findall(r"^\| \d+\. .*$", ARCHITECTURE, re.M)
    assert 5 <= len(steps) <= 10
    for step in steps:
        _, _, twin, live, _ = step.split("|")
        assert re.search(r"`[\w/]+\.py`", twin)
        assert re.search(r"`[\w/]+\.py`", live) or live.strip() == "the same"


def test_the_page_says_what_each_dependency_is_for() -> None:
    names = [re.split(r"\W*>", requirement)[0] for requirement in PROJECT["project"]["dependencies"]]
    rows = dict(re.findall(r"^- \*\*([\w-]+)\*\*: (.+)$", ARCHITECTURE, re.M))
    assert {name for name in names if not rows.get(name)} == set()


@pytest.mark.parametrize("contract", CONTRACTS["contracts"], ids=lambda contract: contract["name"])
def test_the_table_allows_no_import_that_a_contract_forbids(contract: dict[str, list[str]]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", ARCHITECTURE, re.M)
    allowed = {package: set(re.findall(r"`(\w+)`", cell)) & set(CONTRACTS["root_packages"]) for package, cell in rows}
    if contract["type"] == "independence":
        pairs = list(permutations(contract["modules"], 2))
    else:
        pairs = list(product(contract.get("source_modules", []), contract.get("forbidden_modules", [])))
    assert [(package, forbidden) for package, forbidden in pairs if forbidden in allowed[package]] == []
