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

FAMILIES = {
    "gemm": "gemm",
    "context_attention": "attention",
    "generation_attention": "attention",
    "moe": "moe",
    "custom_allreduce": "comm",
    "context_mla": "mla",
    "generation_mla": "mla",
    "mla_context_module": "mla",
    "mla_generation_module": "mla",
    "gdn": "linear_attention",
    "mamba2": "linear_attention",
    "kda": "kda",
    "dsa_context_module": "sparse_attention",
    "dsa_generation_module": "sparse_attention",
    "glm5_mqa_logits_module": "sparse_attention",
    "glm5_topk_module": "sparse_attention",
}
"""The tables that are read, and the family of each."""

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
    files = {name: path for name in FAMILIES if (path := _table(folder, name)) is not None}
    systems = sorted((folder.parent / "systems").glob("*.yaml"), key=lambda path: -len(path.stem))
    system = next((path for path in systems if folder.name.startswith(f"{path.stem}_")), None)
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
    for candidate in (folder, folder / "data", folder / "systems" / "data"):
        if any(_versions(system) for system in _folders(candidate)):
            return candidate
    return None


def systems(data: Path) -> dict[str, dict[str, list[str]]]:
    """Versions by system and backend of what `data` holds, newest last."""
    by_system = {system.name: _versions(system) for system in _folders(data)}
    return {name: versions for name, versions in by_system.items() if versions}


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
    files: dict[str, Path] = {}
    notes: list[str] = []
    for table, family in FAMILIES.items():
        place = _place(data / system, family, backend, newest, table)
        if place is None:
            continue
        path, table_version = place
        files[table] = path
        if table_version != newest:
            notes.append(f"{table}: of {backend} {table_version}, since {newest} has no such table")
    notes += _not_read(path.name for path in (data / system).glob(f"*/{backend}/*/*_perf.*"))
    system_file = data.parent / f"{system}.yaml"
    return TableFiles(
        data, files, system, backend, newest, system_file if system_file.is_file() else None, tuple(notes)
    )


def _not_read(names: Iterable[str]) -> Iterator[str]:
    """A note for each reason why some of these files are not read."""
    by_reason: dict[str, list[str]] = {}
    for table in sorted({name.partition("_perf.")[0] for name in names} - FAMILIES.keys()):
        reason = next((why for begin, why in UNREAD.items() if table.startswith(begin)), "")
        if reason:
            by_reason.setdefault(reason, []).append(table)
    for reason, tables in by_reason.items():
        yield f"not read: {', '.join(tables)} ({reason})"


def _place(system: Path, family: str, backend: str, version: str, table: str) -> tuple[Path, str] | None:
    exact = _table(system / backend / version, table)
    if exact is not None:
        return exact, version
    versions = sorted((folder.name for folder in _folders(system / family / backend)), key=version_key)
    for name in reversed([name for name in versions if version_key(name) <= version_key(version)]):
        path = _table(system / family / backend / name, table)
        if path is not None:
            return path, name
    return None


def _versions(system: Path) -> dict[str, list[str]]:
    """Versions by backend that have GEMMs, oldest first."""
    by_backend: dict[str, set[str]] = {}
    for family in (system, system / "gemm"):
        for backend in _folders(family):
            for version in _folders(backend):
                if _table(version, "gemm") is not None:
                    by_backend.setdefault(backend.name, set()).add(version.name)
    return {backend: sorted(versions, key=version_key) for backend, versions in sorted(by_backend.items())}


def version_key(version: str) -> list[tuple[int, int | str]]:
    """A key by which versions sort: numbers by value, and 1.3.0rc20 before 1.3.0."""
    parts = re.findall(r"\d+|[a-z]+", version.lower())
    return [(2, int(part)) if part.isdigit() else (0, part) for part in parts] + [(1, "")]


def _folders(path: Path) -> Iterator[Path]:
    return iter(sorted(child for child in path.iterdir() if child.is_dir())) if path.is_dir() else iter(())


def _table(folder: Path, name: str) -> Path | None:
    paths = (folder / f"{name}_perf{ending}" for ending in ENDINGS)
    return next((path for path in paths if path.is_file()), None)
