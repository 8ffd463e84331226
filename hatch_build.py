"""Build hook: compile the simulator's hot modules to C extensions with mypyc.

The modules are listed in pyproject.toml. They stay ordinary Python, and the package works the same without a C
compiler, only slower. `SERVING_TWIN_COMPILE` chooses:

- `auto` (default): compile when a wheel is built and a C compiler is found; a failure leaves pure Python.
- `0`: never.
- `1`: always, also in place for an editable installation; a failure ends the build.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXTENSION: str = sysconfig.get_config_var("EXT_SUFFIX")

VARIABLE = "SERVING_TWIN_COMPILE"

GROUP = "serving_twin"
"""Name of the shared library that holds the code of all modules."""

MYPY_OPTIONS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--no-site-packages"]
"""Types are checked by the project's own settings elsewhere; here libraries may be absent.

Those that are installed are not read either, but for SimPy, whose classes the simulator's are made of: in an
environment with all extras that took nine minutes in place of ten seconds.
"""

EXACT = "-ffp-contract=off"
"""A fused multiply-add rounds once where Python rounds twice, and records would differ in the last bit."""


class CompileHook(BuildHookInterface[Any]):
    """Adds compiled modules to a wheel, or puts them beside their sources for an editable installation."""

    def dependencies(self) -> list[str]:
        """Requirements of the build besides hatchling: those of mypyc, unless nothing can be compiled.

        The hook is not told here whether the installation is editable, which `auto` does not compile.
        """
        return ["mypy[mypyc]>=1.18,<3", "simpy>=4.1"] if _may_compile() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless switched off. `version` is `editable` or `standard`."""
        compile_mode, editable = _wanted(), version == "editable"
        if not _may_compile() or (compile_mode == "auto" and editable):
            return
        root, modules = Path(self.root), self.config["modules"]
        built = root / "build" / f"compiled-{_digest(root, modules)}"
        try:
            if not built.exists():  # it does when pip asks for the wheel, since it has asked for metadata before
                _compile(root, modules, built)
        except (Exception, SystemExit) as error:
            if compile_mode == "1":
                raise
            self.app.display_warning(f"not compiled, the simulator will run as Python: {error}")
            return
        if editable:
            shutil.copytree(built, root, copy_function=shutil.copyfile, dirs_exist_ok=True)
            return
        build_data["force_include"].update({str(file): str(file.relative_to(built)) for file in _extensions(built)})
        build_data.update(pure_python=False, infer_tag=True)

    def clean(self, versions: list[str]) -> None:
        """Remove compiled modules beside their sources."""
        root = Path(self.root)
        for folder in {(root / module).parent for module in self.config["modules"]} | {root}:
            for file in _extensions(folder, "*"):
                file.unlink()


def _wanted() -> str:
    setting = os.environ.get(VARIABLE, "auto")
    if setting not in ("auto", "0", "1"):
        raise SystemExit(f"{VARIABLE}: expected auto, 0 or 1, found {setting!r}")
    return setting


def _may_compile() -> bool:
    return _wanted() == "1" or (_wanted() == "auto" and _has_compiler())


def _has_compiler() -> bool:
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return bool(shutil.which(command.split()[0])) and Path(sysconfig.get_path("include"), "Python.h").exists()


def _digest(root: Path, modules: list[str]) -> str:
    """Names what would be compiled: the sources, the interpreter and this file."""
    sources = [Path(__file__).read_bytes(), *((root / module).read_bytes() for module in modules)]
    return sha256(b"".join([EXTENSION.encode(), *sources])).hexdigest()[:16]


def _extensions(folder: Path, pattern: str = "**/*") -> list[Path]:
    return sorted(folder.glob(pattern + EXTENSION))


def _compile(root: Path, modules: list[str], into: Path) -> None:
    """Compile `modules` (paths below `root`) to extensions in the same places below the new folder `into`."""
    import simpy
    from mypyc.build import mypycify
    from setuptools import Distribution

    with TemporaryDirectory() as temporary:
        typed = Path(temporary, "typed")
        typed.mkdir()
        (typed / "simpy").symlink_to(Path(simpy.__file__).parent)
        os.environ["MYPYPATH"] = str(typed)
        extensions = _in_folder(
            root,
            lambda: mypycify(
                [*MYPY_OPTIONS, *modules], opt_level="2", debug_level="0", group_name=GROUP, target_dir=temporary
            ),
        )
        for extension in extensions:
            extension.extra_compile_args.append(EXACT)
        distribution = Distribution({"name": GROUP, "ext_modules": extensions})
        command: Any = distribution.get_command_obj("build_ext")
        command.build_lib = str(Path(temporary, "lib"))
        command.build_temp = temporary
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        _in_folder(root, command.run)
        into.parent.mkdir(exist_ok=True)
        shutil.move(command.build_lib, into)


def _in_folder(folder: Path, call: Callable[[], Any]) -> Any:
    """Call with `folder` as the working directory, from which mypyc derives the names of modules."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return call()
    finally:
        os.chdir(before)
