"""Imports of kernel tables that others have measured, for `twin calibrate import`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.sources.aiconfigurator.layout import TableFiles
    from latency_models.step_time import Origin

DEGREES = (1, 2, 4, 8, 16)
"""Ranks that share a layer in the files of `--all`, where the tables have them."""


@dataclass(frozen=True)
class TableImport:
    """One file to be: its content, the name that it has in a folder, and notes on it."""

    name: str
    document: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ModelRequest:
    """Kernels to take from aiconfigurator's tables.

    Attributes:
        model: a name or a file. degrees: numbers of ranks, a file for each.
        weights, cache: formats as the tables name them; weights may be None: the model's own.
        some: leave out degrees that the tables do not have, if they have any.
    """

    model: str | None
    degrees: tuple[int, ...]
    weights: str | None
    cache: str
    some: bool = False


def find_tables(folder: Path | None, system: str, engine: str, version: str) -> TableFiles:
    """The files of aiconfigurator's tables: in one folder, in its data in a folder, or in the installed package's."""
    from latency_models.sources.aiconfigurator.layout import data_folder, flat_tables, installed_data, packaged_tables
    from latency_models.sources.registry import AICONFIGURATOR, source_of

    if folder is not None and source_of(folder) == AICONFIGURATOR:
        if system:
            raise BadInput("expected none: the folder has the tables of one system", field="--system", value=system)
        return flat_tables(folder)
    data = installed_data() if folder is None else data_folder(folder)
    if data is None:
        expected = "expected a folder of tables (gemm_perf.parquet, …), or one of systems, such as h200_sxm"
        raise BadInput(expected, file=folder)
    return packaged_tables(data, system, engine or "vllm", version or None)


def import_aiconfigurator(files: TableFiles, request: ModelRequest, stated: Origin) -> list[TableImport]:
    """A file of one model's kernels for each degree of tensor parallelism."""
    from latency_models.deployment.hugging_face import any_model
    from latency_models.sources.aiconfigurator.kernels import Placement, compose, model_and_format
    from latency_models.sources.aiconfigurator.tables import read_tables

    if request.model is None:
        raise BadInput("expected a model, since these tables are of many shapes", field="--model")
    weights = request.weights
    if weights is None:
        model, weights = model_and_format(request.model)
    else:
        model = any_model(request.model)
    tables = read_tables(files)
    engine = tables.origin.engine or stated.engine or files.backend
    tables = replace(tables, origin=replace(tables.origin, engine=engine))
    imports, refused = [], []
    for degree in request.degrees:
        placement = Placement(
            tensor_parallel=degree, expert_tensor_parallel=degree, weights=weights, cache=request.cache
        )
        try:
            kernels = compose(tables, model, placement)
        except BadInput as error:
            refused.append((degree, error))
            continue
        origin = kernels.origin.completed(stated)
        kernels = replace(kernels, origin=replace(origin, engine_version=origin.engine_version or files.version))
        parts = (model.name, files.system or files.folder.name, files.backend, files.version, weights, f"tp{degree}")
        notes = (_describe(kernels.origin, weights, request.cache), *kernels.notes, *kernels.origin.unknown)
        imports.append(TableImport("-".join(filter(None, parts)) + ".yaml", kernels.document(), notes))
    if refused and not (imports and request.some):
        raise refused[0][1]
    missing = tuple(f"no file for tensor parallel {degree}: {error}" for degree, error in refused)
    return [*imports[:-1], replace(imports[-1], notes=(*imports[-1].notes, *missing))]


def import_collectives(files: TableFiles) -> TableImport:
    """The link file of measured all-reduces."""
    from latency_models.sources.aiconfigurator.tables import read_tables
    from latency_models.sources.kernel_tables.settings import HOSTS, PCIE

    all_reduces = read_tables(files).tables.get("custom_allreduce")
    if not all_reduces:
        raise BadInput("expected a table custom_allreduce_perf", file=files.folder)
    measured: list[dict[str, Any]] = [
        {"ranks": ranks, "bytes": [2 * int(size) for size in curve.x], "seconds": list(curve.y)}
        for ranks, curve in sorted(all_reduces.items())
    ]
    for row in measured:
        if len(row["bytes"]) < 2:
            expected = f"expected two sizes of messages among {row['ranks']} devices"
            raise BadInput(expected, field="message_size", file=files.path("custom_allreduce"))
    ranks, sizes, seconds = (measured[0][name] for name in ("ranks", "bytes", "seconds"))
    if seconds[-1] <= seconds[0]:
        expected = f"expected the longest message among {ranks} devices to take longer than the shortest"
        raise BadInput(expected, field="latency", value=1e3 * seconds[-1], file=files.path("custom_allreduce"))
    bandwidth = 2 * (ranks - 1) / ranks * sizes[-1] / (seconds[-1] - seconds[0])
    spread = HOSTS if bandwidth < PCIE else 0.1
    name = "-".join(filter(None, (files.system or files.folder.name, files.backend)))
    document = {
        "schema": "twin.link/1",
        "name": name,
        "kind": "measured",
        "latency": seconds[0],
        "bandwidth": bandwidth,
        "all_reduce": measured,
        "spread": spread,
        "source": f"all-reduces in aiconfigurator's tables, {name} {files.version}".rstrip(),
    }
    among = ", ".join(str(row["ranks"]) for row in measured)
    hosts = ", since other hosts of that GPU have other links" if spread == HOSTS else ""
    note = f"all-reduces among {among} devices; a spread of {100 * spread:.0f} % is assumed{hosts}"
    return TableImport(f"{name}.link.yaml", document, (note,))


def _describe(origin: Origin, weights: str, cache: str) -> str:
    device = origin.gpu or "devices that the tables do not name"
    engine = f"{origin.engine} {origin.engine_version}".strip() or "an engine that they do not name"
    return f"{origin.model} on {origin.tensor_parallel} × {device}, {engine}: weights in {weights}, cache in {cache}"


def import_kernel_tables(tables: Path, stated: Origin) -> TableImport:
    """The file of a profiler's tables."""
    from latency_models.sources.kernel_tables.files import named_degree, read_kernel_tables

    kernels = read_kernel_tables(tables, describe=True)
    degree = named_degree(tables) if tables.is_dir() else kernels.tensor_parallel
    origin = replace(kernels.origin, tensor_parallel=degree).completed(stated)
    assumed = "the folder's name does not end in tp1, tp2, …: taken as 1 rank; --tensor-parallel records it"
    notes = (*origin.unknown, *([] if origin.tensor_parallel else [assumed]))
    return TableImport(f"{tables.stem}.yaml", kernels.recorded(origin).document(), notes)
