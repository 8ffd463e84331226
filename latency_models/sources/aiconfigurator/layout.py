"""The files of a set of kernel tables: one folder of them, or the data that aiconfigurator installs.

Three layouts are known, each with files `<table>_perf` that end in .parquet, .txt or .txt.gz:

    FOLDER                                             tables beside each other, as one engine's were once published
    DATA/<system>/<backend>/<version>                  such folders, as aiconfigurator had them up to 0.8
    DATA/<system>/<family>/<backend>/<version>         a folder for each family of kernels, as it has them since

In the last, a family may lack a version. Its newest earlier version is used then, as aiconfigurator does, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from workloads.errors import BadInput

TABLES = (
    "gemm", "context_attention", "generation_attention", "moe", "custom_allreduce", "context_mla", "generation_mla",
    "mla_context_module", "mla_generation_module", "gdn", "mamba2", "kda", "dsa_context_module",
    "dsa_generation_module", "glm5_mqa_logits_module", "glm5_topk_module",
)  # fmt: skip
"""The tables that are read."""

UNREAD = {
    "dsv4_": "no model file describes DeepSeek-V4's attention (CSA, HCA) and its fused experts",
    "mhc_": "no model file describes DeepSeek-V4's hyper-connections",
    "msa_": "no model file describes MiniMax-M3's sparse attention (MSA)",
    "wideep_": "kernels of wide expert parallelism; ranks of composed engines exchange rows by all-reduces",
    "moe_a2a": "all-to-alls of wide expert parallelism, as wideep_",
    "trtllm_alltoall": "all-to-alls of wide expert parallelism, as wideep_",
    "glm5_dsa_attn": "part of the layers that dsa_*_module time whole",
    "mla_bmm": "part of the layers that mla_*_module time whole",
    "computescale": "quantisation that engines fuse with the layer before",
    "scale_matrix": "quantisation that engines fuse with the layer before",
    "encoder_attention": "attention of vision encoders, which no workload has",
}
"""Tables that are not read, by the begin of their names, and why."""

ENDINGS = (".parquet", ".txt", ".txt.gz")

PACKAGES = ("aiconfigurator_core", "aiconfigurator")
"""Packages that install tables, in `systems/data`."""


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The tables of one engine on one device, with the folders' names ("" for tables beside each other) and notes."""

    folder: Path
    files: Mapping[str, Path]
    system: str = ""
    backend: str = ""
    version: str = ""
    system_file: Path | None = None
    notes: tuple[str, ...] = field(default=())

    def path(self, table: str) -> Path | None:
        """The file of a table; None if there is none."""
        return self.files.get(table)


def flat_tables(folder: Path) -> TableFiles:
    systems = sorted((folder.parent / "systems").glob("*.yaml"), key=lambda path: -len(path.stem))
    system = next((path for path in systems if folder.name.startswith(f"{path.stem}_")), None)
    files = {name: path for name, path in _tables(folder).items() if name in TABLES}
    return TableFiles(folder, files, system_file=system)


def installed_data() -> Path:
    """The data of an installed aiconfigurator."""
    for package in PACKAGES:
        module = find_spec(package)
        for place in module.submodule_search_locations or () if module else ():
            if (data := Path(place) / "systems" / "data").is_dir():
                return data
    expected = "expected aiconfigurator-core to be installed here (pip install aiconfigurator-core), or a folder"
    raise BadInput(expected, field="--aiconfigurator")


def data_folder(folder: Path) -> Path | None:
    """The folder whose children are systems, of a package, its `systems`, or itself; None if it is another folder."""
    candidates = (folder, folder / "data", folder / "systems" / "data")
    return next((candidate for candidate in candidates if systems(candidate)), None)


def systems(data: Path) -> dict[str, dict[str, list[str]]]:
    """Versions with GEMMs by system and backend of what `data` holds, newest last."""
    by_system: dict[str, dict[str, list[str]]] = {}
    for path in sorted(path for path in data.glob("*") if path.is_dir()):
        for backend, versions in sorted(_versions(path).items()):
            names = [version for version, tables in versions.items() if "gemm" in tables]
            if names:
                by_system.setdefault(path.name, {})[backend] = names
    return by_system


def packaged_tables(data: Path, system: str, backend: str, version: str | None = None) -> TableFiles:
    """The tables of one system and backend, by default of its newest version of GEMMs."""
    available = systems(data)
    for name, value, choices in (("--system", system, available), ("--backend", backend, available.get(system, {}))):
        if value not in choices:
            raise BadInput(f"expected one of {', '.join(sorted(choices))}", field=name, value=value)
    versions = available[system][backend]
    if version is not None and version not in versions:
        raise BadInput(f"expected one of {', '.join(versions)}", field="--version", value=version)
    newest = version or versions[-1]
    tables = _versions(data / system)[backend]
    usable = [name for name in tables if version_key(name) <= version_key(newest)]
    files: dict[str, Path] = {}
    notes: list[str] = []
    for table in TABLES:
        of_version = next((name for name in reversed(usable) if table in tables[name]), None)
        if of_version is None:
            continue
        files[table] = tables[of_version][table]
        if of_version != newest:
            notes.append(f"{table}: of {backend} {of_version}, since {newest} has no such table")
    notes += _not_read({name for of_version in tables.values() for name in of_version})
    system_file = data.parent / f"{system}.yaml"
    return TableFiles(
        data, files, system, backend, newest, system_file if system_file.is_file() else None, tuple(notes)
    )


def _not_read(tables: Iterable[str]) -> Iterator[str]:
    """A note for each reason why some of these tables are not read."""
    by_reason: dict[str, list[str]] = {}
    for table in sorted(set(tables) - set(TABLES)):
        reason = next((why for begin, why in UNREAD.items() if table.startswith(begin)), "")
        if reason:
            by_reason.setdefault(reason, []).append(table)
    for reason, names in by_reason.items():
        yield f"not read: {', '.join(names)} ({reason})"


def _versions(system: Path) -> dict[str, dict[str, dict[str, Path]]]:
    """Files by backend, version (oldest first) and table, in folders of versions or of families with such folders."""
    by_backend: dict[str, dict[str, dict[str, Path]]] = {}
    folders = {path.parent for depth in ("*/*", "*/*/*") for path in system.glob(f"{depth}/*_perf.*")}
    for folder in sorted(folders, key=lambda path: (version_key(path.name), path)):
        by_backend.setdefault(folder.parent.name, {}).setdefault(folder.name, {}).update(_tables(folder))
    return by_backend


def version_key(version: str) -> list[tuple[int, int | str]]:
    """A key by which versions sort: numbers by value, and 1.3.0rc20 before 1.3.0."""
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return [(2, int(part)) if part.isdigit() else (0, part) for part in parts] + [(1, "")]


def _tables(folder: Path) -> dict[str, Path]:
    """The files of a folder by table, in the first of ENDINGS that there is."""
    files: dict[str, Path] = {}
    for ending in (f"_perf{ending}" for ending in reversed(ENDINGS)):
        files |= {path.name.removesuffix(ending): path for path in folder.glob(f"*{ending}")}
    return files
