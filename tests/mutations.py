"""Mutation testing: does any test notice when one operator of the simulator is wrong?

    python -m tests.mutations [--count 40] [--seed 0] [--skip 0] [--jobs 1] [--others] [--list]

Draws single changes of the source (a comparison, a sign, a constant, a condition) and applies each to a copy of the
tree. One process runs the tests nearest to the file, those of its room, and stops at the first failure; with --others
it goes on with all that could notice it. Forty take some twenty minutes of one core.
Prints one line a mutation, and how many were noticed. The tests are run once without a mutation before that, since a
test that fails anyway notices everything. Not part of the test suite.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).resolve().parent.parent
MUTATED = ("schedulers", "twin/serving", "twin/afd", "twin/theory", "workloads", "reports/metrics.py")

BY_HAND = ["tests/twin/serving/test_*_by_hand.py", "tests/twin/serving/test_utilisation.py"]
BUNDLE = ["tests/twin/test_bundle_*.py", "tests/twin/test_sweep_summary.py", "tests/golden", "tests/twin/test_afd_*.py"]
THEORY = ["tests/theory/test_gaps.py", "tests/theory/test_cycle.py", "tests/theory/test_load.py"]
STORIES = ["tests/schedulers/test_engine_story.py", "tests/schedulers/test_one_shot.py"]
RANDOM_STORIES = ["tests/vllm_parity/test_decisions.py", "tests/schedulers/test_engine_properties.py"]
RULES = [f"tests/schedulers/test_{name}.py" for name in ("scheduler_rules", "other_engines", "pipeline")]

NEAREST = {
    "schedulers/bundle_slots.py": ["tests/schedulers/test_bundle_slots.py", *BUNDLE],
    "schedulers/step_policies.py": ["tests/schedulers/test_chunking.py"],
    "schedulers/routing.py": ["tests/schedulers/test_routing.py", "tests/extending/test_plugins.py"],
    "schedulers": [*STORIES, "tests/schedulers/test_[dkw]*.py", *BY_HAND, *RANDOM_STORIES, *RULES],
    "twin/serving/results": ["tests/theory/test_overload.py", "tests/twin/serving", "tests/reports/serving"],
    "twin/serving": [*BY_HAND, "tests/twin/serving", "tests/parity/test_fast_forward_serving.py"],
    "twin/afd/role": ["tests/live/topologies/test_bundle.py", "tests/twin/test_role_times.py"],
    "twin/afd": [*BUNDLE, "tests/parity/test_fast_forward.py", *THEORY, "tests/twin/test_cli_sweep.py"],
    "twin/theory": [*THEORY, "tests/theory/test_paper.py", "tests/golden", "tests/theory/test_queueing.py"],
    "workloads": ["tests/workloads"],
    "reports/metrics.py": [*BY_HAND, "tests/reports/test_statistics.py", *BUNDLE],
}
"""Tests to begin with, cheap ones first, by the longest prefix of the mutated file's path that is listed.

A module's own tests come before these: `tests/ROOM/test_NAME.py`.
"""

OTHERS = ["tests/schedulers", "tests/workloads", "tests/twin", "tests/golden", "tests/parity", "tests/theory"]
"""Tests that could notice a mutation of any file, in the order in which they run, with `--others`."""

SLOW = ["tests/theory/test_agreement.py", "tests/theory/test_serving_queues.py", "tests/twin/validation"]
"""Tests left out, each above 20 s of processor time."""

RUN_TESTS = """\
import sys
import pytest

class FirstFailure:
    def pytest_configure(self, config):
        from hypothesis import Phase, settings
        quick = {"phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False, "database": None}
        quick |= {"derandomize": True, "deadline": None, "max_examples": 60}
        settings.register_profile("mutations", **quick)
        settings.load_profile("mutations")

files, options = sys.argv[1].split(), ["-x", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]
for file in files:
    code = pytest.main([file, *options, "-o", "addopts=--import-mode=importlib"], plugins=[FirstFailure()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(code)
"""
"""Runs test files one after the other until one fails, so that only these are imported.

Hypothesis stops at the first failure in place of shrinking it.
"""

SECONDS, BYTES = 120, 6 << 30
"""Processor time and memory of one process of tests; a mutation that takes more is noticed."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """One change: the file, the position of the changed node, and its number among the changes of that node."""

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  ->  {self.after}"


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """Changed copies of a node; none for a node that is not mutated."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in COMPARISONS:
            yield ast.Compare(left, [COMPARISONS[type(op)]()], comparators)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS and not isinstance(left, ast.JoinedStr):
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in OPERATORS:
            yield ast.AugAssign(target, OPERATORS[type(op)](), value)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)) if value < 1000:
            yield ast.Constant(value + 1)
        case ast.If(test=test, body=body, orelse=orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)


def mutations_of(path: Path) -> Iterator[Mutation]:
    """Every mutation of a file, leaving out annotations, docstrings and messages of errors."""
    text = path.read_text()
    tree = ast.parse(text)
    quiet = {id(inner) for node in ast.walk(tree) for part in _unmutated(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in quiet or not isinstance(node, ast.expr | ast.stmt):
            continue
        for variant in variants(node):
            head = variant.test if isinstance(variant, ast.If) else variant
            condition = ast.unparse(node.test if isinstance(node, ast.If) else node)
            mutated = _replaced(text, node, variant)
            yield Mutation(str(path.relative_to(ROOT)), node.lineno, condition, ast.unparse(head), mutated)


def _unmutated(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of a node whose changes no test can notice."""
    match node:
        case ast.Raise() | ast.Assert():
            yield node
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield node
        case ast.FunctionDef(returns=returns, args=args):
            yield from [returns] if returns is not None else []
            yield from (
                argument.annotation
                for argument in ast.walk(args)
                if isinstance(argument, ast.arg) and argument.annotation
            )
        case ast.AnnAssign(annotation=annotation):
            yield annotation
        case ast.keyword(arg="strict" | "frozen" | "slots"):
            yield node


def _replaced(text: str, node: ast.expr | ast.stmt, variant: ast.AST) -> str:
    """The text with the node's own characters replaced, so that line numbers stay."""
    if isinstance(node, ast.If) and isinstance(variant, ast.If):
        return _replaced(text, node.test, variant.test)
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    raw = text.encode()
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    begin, end = offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset
    changed = ast.unparse(variant)
    if isinstance(node, ast.expr):
        changed = f"({changed})"
    return (raw[:begin] + changed.encode() + raw[end:]).decode()


def every_mutation() -> list[Mutation]:
    """All mutations of the rooms that are mutated, in the order of the files."""
    files = [path for place in MUTATED for path in _python_files(ROOT / place)]
    return [mutation for path in files for mutation in mutations_of(path)]


def _python_files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def nearest_first(file: str, *, others: bool) -> list[str]:
    """The test files to run: the module's own, those nearest to it, and then all `others` if they are to run."""
    prefix = max((name for name in NEAREST if file.startswith(name)), key=len)
    nearest = f"tests/{Path(file).parent}/test_{Path(file).stem}.py"
    places = [nearest, *NEAREST[prefix], *(OTHERS if others else [])]
    return list(dict.fromkeys(test for place in places for test in _test_files(place)))


def _test_files(place: str) -> list[str]:
    """Test files in a folder, or those that a pattern matches; without the slow ones."""
    folder = ROOT / place
    paths = folder.rglob("test_*.py") if folder.is_dir() else ROOT.glob(place)
    files = sorted(str(path.relative_to(ROOT)) for path in paths)
    return [file for file in files if not file.startswith(tuple(SLOW))]


def copy_tree(folder: str) -> Path:
    """A copy of the tree in `folder`, to be mutated."""
    tree = Path(folder) / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
    return tree


def first_failure(tree: Path, tests: Iterable[str], deselected: Iterable[str]) -> str | None:
    """The first test that fails in a copy of the tree, or what else ended the run; None if all pass.

    Raises:
        RuntimeError: pytest could not run them.
    """
    process = subprocess.run(
        [sys.executable, "-c", RUN_TESTS, " ".join(tests), *(f"--deselect={test}" for test in deselected)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        preexec_fn=_prepare_process,
        check=False,
    )
    if process.returncode in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise RuntimeError(process.stdout + process.stderr)
    if process.returncode == pytest.ExitCode.OK:
        return None
    failures = [line for line in process.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[-1] if failures else f"exit status {process.returncode}"


def _prepare_process() -> None:
    """Limit time and memory, and let interrupts through, which a shell's background processes ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def noticed(mutation: Mutation, tree: Path, tests: Iterable[str], deselected: Iterable[str]) -> str | None:
    """The first test that fails with the mutation applied to a copy of the tree, which is restored afterwards."""
    file, original = tree / mutation.file, ROOT / mutation.file
    try:
        _write(file, mutation.source)
        return first_failure(tree, tests, deselected)
    finally:
        _write(file, original.read_text())


def _write(file: Path, source: str) -> None:
    """Write a module, and drop its compiled form: that is told from another only by size and time in seconds."""
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def main() -> None:
    """Draw mutations, try each, and print what no test noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="mutations to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="mutations that are tried at once")
    parser.add_argument("--skip", type=int, default=0, help="drawn mutations that were tried before")
    parser.add_argument("--others", action="store_true", help="run the tests of other rooms, too")
    parser.add_argument("--deselect", action="append", default=[], help="a test to leave out, as pytest's option")
    parser.add_argument("--list", action="store_true", help="print the drawn mutations and stop")
    options = parser.parse_args()
    mutations = random.Random(options.seed).sample(every_mutation(), options.count)[options.skip :]
    if options.list:
        print(*mutations, sep="\n")
        return
    tests = {mutation.file: nearest_first(mutation.file, others=options.others) for mutation in mutations}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            trees.put(copy_tree(f"{folder}/{job}"))
        tree = trees.get()
        if failed := first_failure(tree, dict.fromkeys(itertools.chain(*tests.values())), options.deselect):
            sys.exit(f"without any mutation (--deselect leaves a test out): {failed}")
        trees.put(tree)

        def attempt(mutation: Mutation) -> str | None:
            tree = trees.get()
            try:
                return noticed(mutation, tree, tests[mutation.file], options.deselect)
            finally:
                trees.put(tree)

        results = []
        for mutation, failure in zip(mutations, pool.map(attempt, mutations), strict=True):
            print("noticed " if failure else "SURVIVED", mutation, f"({failure})" if failure else "", flush=True)
            results.append(failure is not None)
    print(f"{sum(results)} of {len(mutations)} mutations were noticed (seed {options.seed})")


if __name__ == "__main__":
    main()
