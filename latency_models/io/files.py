"""Data files: those that come with the house, and columns of tables.

Calibrations, hardware, links and models are built in, by name. A model also goes by the repositories of its checkpoints
on Hugging Face, with or without their owner, and by its name with a format behind it:
`meta-llama/Llama-3.3-70B-Instruct`, `llama-3.3-70b-fp8`. A device also goes by the first parts of its name, if no other
begins with them: `h200`, and h200_sxm as AIConfigurator writes it.

Fields of a scenario that name a file start from its folder; on the command line they start from the current one.
"""

from __future__ import annotations

import csv
import functools
import gzip
import io
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from workloads.errors import BadInput, readable

Kind = Literal["calibrations", "hardware", "links", "models"]
FOLDER = Path(__file__).parents[1] / "data"

ENDINGS = (".yaml", ".yml", ".json")

FORMAT = re.compile(r"-(bf16|fp8|int8|nvfp4|fp4|mxfp4|int4)$")
"""A format of weights behind the name of a model."""

SIMILAR = 0.5
"""Similarity, by difflib's ratio, of a name that an unknown one may have meant."""


def builtin_names(kind: Kind) -> list[str]:
    return list(_names(kind))


@functools.cache  # they come with the package, and do not change
def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (FOLDER / kind).glob("*.yaml")))


@functools.cache  # likewise; read only for a name that is none of a file
def _repositories() -> dict[str, str]:
    """Models by the repositories of their checkpoints in lower case, with and without the owner."""
    from latency_models.io.config_io import read_yaml

    names: dict[str, str] = {}
    for name in _names("models"):
        for checkpoint in read_yaml(FOLDER / "models" / f"{name}.yaml").get("checkpoints", []):
            repository = checkpoint["repository"].lower()
            names |= {repository: name, repository.rpartition("/")[2]: name}
    return names


def is_path(text: str) -> bool:
    """True if text is a path, not a name: it ends as a YAML or JSON file, or has a slash and is no known repository."""
    return text.endswith(ENDINGS) or ("/" in text and text.lower() not in _repositories())


def builtin_name(kind: Kind, name: str) -> str | None:
    """The built-in name that `name` stands for; None if it is none."""
    names, text = _names(kind), name.lower()
    if name in names or text in names:
        return name if name in names else text
    if kind == "models":
        plain = FORMAT.sub("", text)
        return _repositories().get(text) or (plain if plain in names else None)
    if kind == "hardware":
        text = text.replace("_", "-")
        matches = [device for device in names if f"{device}-".startswith(f"{text}-")]
        return matches[0] if len(matches) == 1 else None
    return None


def find_data(kind: Kind, name: str | Path, base: Path = Path()) -> Path:
    """The path of a built-in file, or of a user's own, relative to `base`.

    Every `Path`, text that ends as a YAML or JSON file, and text with a slash that leads somewhere is a path.
    """
    if isinstance(name, Path) or name.endswith(ENDINGS) or (is_path(name) and _exists(base / name)):
        return base / name
    builtin = builtin_name(kind, name)
    if builtin is not None:
        return FOLDER / kind / f"{builtin}.yaml"
    import difflib

    names = {candidate: candidate for candidate in _names(kind)} | (_repositories() if kind == "models" else {})
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=1, cutoff=SIMILAR)
    hint = f" (did you mean {names[close[0]]}?)" if close else ""
    expected = f"expected a path or one of {', '.join(_names(kind))}{hint}"
    raise BadInput(expected, field=kind.removesuffix("s"), value=name)


def name_on_command_line(kind: Kind, flag: str, text: str) -> str:
    """The built-in name that a flag's value means (a model's stays as written), or the absolute path of a file."""
    try:
        path = find_data(kind, text)
    except BadInput as error:
        raise BadInput(error.expected, field=flag, value=text) from None
    if not path.is_relative_to(FOLDER):
        return str(path.absolute())
    return text if kind == "models" else path.stem


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name that a file can have
        return False


class CommandLineText(str):
    """Text that was given on the command line. The fields below tell it from text in a file."""


def from_command_line(value: Any) -> Any:
    """`value` with every text in it marked as given on the command line, also inside lists and mappings."""
    if isinstance(value, str):
        return CommandLineText(value)
    if isinstance(value, list):
        return [from_command_line(item) for item in value]
    if isinstance(value, dict):
        return {key: from_command_line(item) for key, item in value.items()}
    return value


def _absolute(value: Any) -> Any:
    return str(Path(value).absolute()) if isinstance(value, CommandLineText) else value


def _absolute_file(value: Any) -> Any:
    return _absolute(value) if isinstance(value, CommandLineText) and is_path(value) else value


FilePath = Annotated[str, BeforeValidator(_absolute)]
"""The path of a file or folder."""

NAME_OR_FILE = BeforeValidator(_absolute_file)
"""Marks a field that may hold a built-in name or the path of a file (see `find_data`), beside other types."""

NameOrFile = Annotated[str, NAME_OR_FILE]
"""A built-in name, or the path of a file."""


class Columns:
    """Columns of a CSV file. Place i of every list is row i below the header."""

    def __init__(self, path: Path, names: Sequence[str], rows: Sequence[Sequence[str]], lines: Sequence[int]) -> None:
        self.path = path
        self.names = tuple(names)
        self._lines = lines
        self._columns = dict(zip(names, zip(*rows, strict=True), strict=True))

    def __len__(self) -> int:
        return len(self._lines)

    def text(self, name: str) -> list[str]:
        if name not in self._columns:
            raise BadInput(f"expected this column, found {', '.join(self.names)}", field=name, file=self.path, line=1)
        return list(self._columns[name])

    def numbers(self, name: str, *, above: float = -math.inf, blank: float | None = None) -> list[float]:
        """A column of finite numbers greater than `above`; an empty cell is `blank`, where that is given."""
        cells = self.text(name)
        stated = cells if blank is None else [cell or str(blank) for cell in cells]
        try:
            values = list(map(float, stated))
        except ValueError:
            values = list(map(_number, stated))
        if not (math.isfinite(sum(values)) and min(values) > above):
            for row, value in enumerate(values):
                if not (math.isfinite(value) and value > above):
                    bound = "" if above == -math.inf else f" above {above:g}"
                    raise self.fault(f"expected a finite number{bound}", row, name)
        return values

    def wholes(self, name: str, *, low: int, blank: int | None = None) -> list[int]:
        """A column of whole numbers of at least `low`; 8.0 is one. An empty cell is `blank`, where that is given."""
        try:
            counts = list(map(int, self.text(name)))
        except ValueError:  # one is written otherwise
            counts = []
        if counts and min(counts) >= low:
            return counts
        values = self.numbers(name, blank=None if blank is None else float(blank))
        for row, value in enumerate(values):
            if value < low or value != math.floor(value):
                raise self.fault(f"expected a whole number of at least {low}", row, name)
        return list(map(int, values))

    def where(self, keep: Sequence[bool]) -> Columns:
        """The rows that are kept."""
        rows = [row for row, selected in zip(zip(*self._columns.values(), strict=True), keep, strict=True) if selected]
        lines = [line for line, selected in zip(self._lines, keep, strict=True) if selected]
        return Columns(self.path, self.names, rows, lines)

    def fault(self, expected: str, row: int, name: str) -> BadInput:
        """The error about one cell."""
        return BadInput(expected, value=self._columns[name][row], field=name, file=self.path, line=self._lines[row])


def read_columns(path: Path) -> Columns:
    """A CSV file with a header, gzipped or not, whose blank lines are passed over; or a file that ends in .parquet."""
    if path.suffix == ".parquet":
        return _parquet_columns(path)
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise BadInput(f"expected a CSV file: {error}", file=path, line=reader.line_num) from None
    for name in header:
        if header.count(name) > 1:
            raise BadInput("expected each column once", value=name, file=path, line=1)
    for line, row in numbered:
        if len(row) != len(header):
            raise BadInput(f"expected {len(header)} cells, one a column", value=len(row), file=path, line=line)
    if not numbered:
        raise BadInput("expected a header and rows below it", file=path)
    lines, rows = zip(*numbered, strict=True)
    return Columns(path, header, rows, lines)


def _parquet_columns(path: Path) -> Columns:
    """The columns of a Parquet file, each cell as text; a number's is the shortest that reads as the same number."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path)
    except OSError as error:
        raise BadInput(f"expected a readable Parquet file: {error}", file=path) from None
    except ArrowException as error:
        raise BadInput(f"expected a Parquet file: {error}", file=path) from None
    if not table.num_rows:
        raise BadInput("expected a row", file=path)
    cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns]
    return Columns(path, table.column_names, list(zip(*cells, strict=True)), range(1, table.num_rows + 1))


def read_text(path: Path) -> str:
    """A text file's content, unpacked if it is a gzip file, and without a byte order mark."""
    with readable(path):
        data = path.read_bytes()
        try:
            text = (gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data).decode("utf-8-sig")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInput(f"expected a whole gzip file: {error}", file=path) from None
    return text


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
