"""`runs/<id>/`: one folder a run, written so that a killed run loses no finished point.

    manifest.json    the inputs, the versions, and the status (complete, or why not)
    points.jsonl     one line for each finished point, on disk before the next is counted
    summary.json     the whole document, written last
    figures/, report.html

The id is the time of the start, the command, and a fingerprint of the inputs. An unfinished run with the same
fingerprint is resumed, unless a live process holds it.

Columns of requests and steps are Parquet files, all of one length, a row each.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

SCHEMA = "twin.run/1"

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class RunDirectory:
    """One run's folder, held by this process until `close`, or to the end of a `with` block.

    If the block fails, the manifest says why. A `KeyboardInterrupt` that leaves it says what has been kept. Any failure
    to write is an `OSError` that carries the path.
    """

    path: Path
    manifest: dict[str, Any]
    _lock: IO[str]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = isinstance(error, KeyboardInterrupt)
        if error is not None:
            self.abandon("interrupted" if interrupted else f"{type(error).__name__}: {error}".rstrip(": "))
        summary = self._kept() if interrupted else ""
        self.close()
        if interrupted:
            raise KeyboardInterrupt(summary) from None

    def _kept(self) -> str:
        try:
            finished = len(self.points())
        except OSError:
            finished = 0
        if not finished:
            return ""
        points = "1 finished point is" if finished == 1 else f"{finished} finished points are"
        return f"{points} kept in {self.path}, and the same command (without --fresh) takes up there"

    @property
    def id(self) -> str:
        return self.path.name

    def points(self) -> dict[str, dict[str, Any]]:
        """Finished points by key. A last line cut short by a kill is dropped, from the file too."""
        file = self.path / "points.jsonl"
        points: dict[str, dict[str, Any]] = {}
        if not file.exists():
            return points
        with naming(file), file.open("r+b") as lines:
            size = 0
            for line in lines:
                try:
                    point = json.loads(line)
                except ValueError:
                    break
                if not line.endswith(b"\n"):
                    break
                points[point.pop("key")] = point
                size += len(line)
            lines.truncate(size)
        return points

    def add_point(self, key: str, point: dict[str, Any]) -> None:
        """Append one finished point; it is on disk when this returns."""
        file = self.path / "points.jsonl"
        data = (json.dumps({"key": key, **point}) + "\n").encode()
        with naming(file), file.open("ab", buffering=0) as lines:
            before = lines.tell()
            try:
                while data:
                    data = data[lines.write(data) :]
                os.fsync(lines.fileno())
            except OSError:
                lines.truncate(before)
                raise

    def write_json(self, name: str, document: object) -> Path:
        return self.write_text(name, json.dumps(document, indent=1) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a whole file, or leave the old one: never half of it."""
        return write_text(self.path / name, text)

    def set_status(self, complete: bool, status: str) -> None:
        """Set the status of the run in its manifest."""
        self.manifest |= {"complete": complete, "status": status, "updated": datetime.now(UTC).isoformat()}
        self.write_json("manifest.json", self.manifest)

    def abandon(self, why: str) -> None:
        """Record why the run stays unfinished, if the disk allows it."""
        with contextlib.suppress(OSError):
            try:
                self.set_status(False, why)
            except OSError:
                self._set_status_in_place(why)

    def _set_status_in_place(self, why: str) -> None:
        """Overwrite the manifest, which works on a full disk: without indentation, and with `why` cut to fit."""
        file = self.path / "manifest.json"
        size = file.stat().st_size
        spare = size - len(json.dumps({**self.manifest, "status": ""}))
        text = json.dumps({**self.manifest, "status": why.encode("ascii", "replace").decode()[:spare]})
        if spare > 0 and len(text) <= size:
            with file.open("r+b", buffering=0) as old:
                old.write(text.ljust(size).encode())

    def close(self) -> None:
        self._lock.close()


def fingerprint(identity: object) -> str:
    """A digest of everything that a run's results depend on, as JSON."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]


def open_run(root: Path, command: str, fingerprint: str, manifest: dict[str, Any], *, resume: bool) -> RunDirectory:
    """Resume an unfinished run of the same fingerprint under `root`, or begin a new one."""
    with naming(root):
        root.mkdir(parents=True, exist_ok=True)
    if resume:
        for path in sorted(root.glob(f"*-{command}-{fingerprint}*"), reverse=True):
            run = _take_up(path)
            if run is not None:
                return run
    started = datetime.now(UTC)
    return _begin(_new_folder(root, f"{started:%Y%m%dT%H%M%S}-{command}-{fingerprint}"), started, manifest)


def begin_run(path: Path, manifest: dict[str, Any]) -> RunDirectory:
    """Begin a run in the folder `path`; `FileExistsError` if it is not empty, else `OSError`."""
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(errno.EEXIST, "expected an empty folder, or none", str(path))
    return _begin(path, datetime.now(UTC), manifest)


def _begin(path: Path, started: datetime, manifest: dict[str, Any]) -> RunDirectory:
    lock = _hold(path)
    assert lock is not None, "a folder that was just made is free"
    name = path.resolve().name
    run = RunDirectory(path, {"schema": SCHEMA, "id": name, "started": started.isoformat(), **manifest}, lock)
    run.set_status(False, "running")
    return run


def read_run(path: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Manifest and summary (None: not yet) of a run; `OSError`, or `ValueError` where a file is no JSON object."""
    summary = path / "summary.json"
    return _read_object(path / "manifest.json"), _read_object(summary) if summary.exists() else None


def _read_object(file: Path) -> dict[str, Any]:
    with naming(file):
        text = file.read_text(encoding="utf-8")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file.name} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return document


def write_text(file: Path, text: str) -> Path:
    """Write a file atomically; makes its folder."""
    return write_bytes(file, text.encode())


def write_bytes(file: Path, content: bytes) -> Path:
    """Write a file atomically; makes its folder."""
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as draft:
        draft.write_bytes(content)
    return file


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces the file if the block succeeds; `OSError` with the path."""
    draft = file.with_name(file.name + ".part")
    with naming(file):
        try:
            yield draft
            draft.replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give every `OSError` in the block a file name, so that an error message can name it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _take_up(path: Path) -> RunDirectory | None:
    """The unfinished run in `path`, or None when it is finished, unreadable, or held by a live process."""
    lock = _hold(path)
    if lock is None:
        return None
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = {"complete": True}
    if manifest.get("complete", True):
        lock.close()
        return None
    return RunDirectory(path, manifest, lock)


def _hold(path: Path) -> IO[str] | None:
    """Lock the folder for this process; None if another process has it.

    A record lock (`lockf`) ends with its process, while `flock` is shared with forked workers, which may outlive it.
    """
    with naming(path / "lock"):
        lock = (path / "lock").open("a")
    try:
        import fcntl

        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # no such lock on this platform: two equal sweeps at once are then the user's to avoid
        pass
    except OSError:
        lock.close()
        return None
    return lock


def _new_folder(root: Path, name: str) -> Path:
    for attempt in range(1000):
        path = root / (name if attempt == 0 else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise OSError(17, "no free name left for a run folder", str(root / name))


def commit() -> str | None:
    """The commit: the variable TWIN_COMMIT, or this checkout's, marked if files have changed since; None elsewhere."""
    if name := os.environ.get("TWIN_COMMIT"):
        return name
    if not (ROOT / ".git").exists():
        return None
    try:
        process = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def write_columns(file: Path, columns: Mapping[str, Any]) -> None:
    """Write columns of one length atomically; makes the folder."""
    with writing_columns(file) as write:
        write(columns)


@contextlib.contextmanager
def writing_columns(file: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends columns of one length; the file is there at the end of the block, or not at all.

    Each call has the columns of the first, and writes a row group. `OSError` with a path if the disk is full.
    """
    import pyarrow as pa
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        writer = None

        def write(columns: Mapping[str, Any]) -> None:
            nonlocal writer
            table = pa.table({name: _arrow(column) for name, column in columns.items()})
            if writer is None:
                draft = opened.enter_context(replacing(file))
                texts = [field.name for field in table.schema if field.type == pa.string()]
                options = {"compression": "zstd", "use_dictionary": texts}  # of times, a dictionary saves nothing
                writer = opened.enter_context(parquet.ParquetWriter(draft, table.schema, **options))
            writer.write_table(table)

        yield write


def read_columns(file: Path) -> dict[str, list[Any]]:
    """The columns that `write_columns` wrote; `OSError` if it cannot be read, or is no Parquet file."""
    from pyarrow import ArrowInvalid, parquet

    with naming(file):
        try:
            columns: dict[str, list[Any]] = parquet.read_table(file).to_pydict()
        except ArrowInvalid as error:
            raise OSError(errno.EINVAL, "is no Parquet file", str(file)) from error
    return columns


def _arrow(column: Any) -> Any:
    """A column as Arrow data; pyarrow's own conversion loads pandas, which takes longer than many a simulation."""
    import numpy as np
    import pyarrow as pa

    if not isinstance(column, np.ndarray) or column.ndim != 1:
        return column
    size, kind = len(column), column.dtype.str
    if kind in ("<f8", "<i8"):
        number = pa.float64() if kind == "<f8" else pa.int64()
        return pa.Array.from_buffers(number, size, [None, pa.py_buffer(np.ascontiguousarray(column))])
    if column.dtype == np.bool_:
        bits = np.packbits(column, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(bits)])
    if column.dtype.kind == "U":
        texts = [text.encode() for text in column.tolist()]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        return pa.Array.from_buffers(pa.string(), size, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    return column
