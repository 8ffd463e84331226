"""The versions that a worker must have in common with this process, so that it computes the same bits."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

PACKAGES = ("workloads", "schedulers", "latency_models", "scenarios", "reports", "twin")
"""The project's packages of which a worker runs something."""

LIBRARIES = ("numpy", "scipy", "simpy", "pydantic")
"""Libraries whose versions may change a result, or the bytes in which a task travels."""


@functools.cache  # the code of a process does not change
def versions() -> str:
    """The version of the project with a digest of its sources, those of libraries, and Python's, in words."""
    package = f"serving-twin {import_module('twin').__version__} ({_digest(_sources())})"
    libraries = (f"{name} {import_module(name).__version__}" for name in LIBRARIES)
    major, minor, _ = platform.python_version_tuple()
    return ", ".join([package, *libraries, f"Python {major}.{minor}"])


def difference(actual: str, expected: str) -> str:
    """Those versions of `actual` that `expected` does not have, beside what is expected in their place, in words."""
    pairs = zip(actual.split(", "), expected.split(", "), strict=False)
    differences = [(one, there) for one, there in pairs if one != there] or [(actual, expected)]
    return f"{', '.join(one for one, _ in differences)} in place of {', '.join(there for _, there in differences)}"


def _sources() -> Iterable[Path]:
    """The modules of the packages. Where they were compiled, their sources stand beside them."""
    for package in PACKAGES:
        folder = Path(str(import_module(package).__file__)).parent
        yield from sorted(folder.rglob("*.py"))


def _digest(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()[:8]
